"""Simulation: the programs of all ranks, executed one instruction at a time on a model of the machines.

Computing, messages and collectives are jobs on the resources of `resources`, and slow each other down
wherever they share one. This file decides which instruction starts which job, and which waits for which. A
send ends when the message is handed over, and a receive when it has arrived and was taken. A reduction ends
when all buckets are summed, one after the other, each started when the last backward of every replica has
filled it, and gradients of shared parameters are exchanged. An all-gather of weights starts when all replicas
have come to it. Replicas that split experts begin each pass together. Deferred products are computed in the
last backward, or before the all-reduce (`Plan.defers_wgrad`). Where a rank holds several stages, the buckets
of the last come first, as its gradients are ready first.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.formula import StageCost, reduction_of
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.instructions import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    JoinBackward,
    JoinForward,
    Products,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    ReduceScatter,
    SendActivation,
    SendGradient,
    Step,
)
from hybridpipe.planning.shared_parameters import exchange_of
from hybridpipe.planning.simulator.fluid_engine import Engine
from hybridpipe.planning.simulator.ranks import Key, Message, Rank, Replicas
from hybridpipe.planning.simulator.resources import Machines, RingRoute, pass_at_once
from hybridpipe.planning.timeline import TimedEvent, Timeline


class Deadlock(RuntimeError):
    """Nothing can advance; the message names each waiting rank, its stage and its instruction."""


class _Round(NamedTuple):
    """A collective that travels around a ring, at whose end `done(replicas)` is called."""

    ring: RingRoute
    done: Callable[[Replicas], None]
    replicas: Replicas


class Simulation:
    """One run; the arguments are those of `predict.simulate`."""

    def __init__(
        self,
        programs: Mapping[int, Program],
        plan: Plan,
        costs: Sequence[StageCost],
        cluster: Cluster,
        until: Callable[[TimedEvent], bool] | None,
    ) -> None:
        self.plan, self.cluster, self.until = plan, cluster, until
        self.engine = Engine()
        self.machines = Machines(cluster)
        self.are_private = cluster.are_processors_private
        self.handling_seconds = cluster.handling_seconds
        # Spares a call for each message where messages take no processor time.
        self.has_handling = cluster.message_seconds > 0 or cluster.message_seconds_per_byte > 0
        self.messages: dict[Key, Message] = {}  # without those that both sides are done with
        self.costs, self.numbers = costs, [stage.ranks for stage in plan.stages]
        self.ranks: list[Rank] = []
        for group, stage in enumerate(plan.stages[: plan.num_groups]):
            held = plan.held_stages(Place(group, 0))
            of_stages = [costs[s] for s in held]
            replicas = Replicas(stage.ranks, of_stages, self.machines, reduction_of(plan, group))
            replicas.ranks = [
                Rank(rank, held, programs[rank], costs, replicas, self.machines, plan.defers_wgrad)
                for rank in stage.ranks
            ]
            self.ranks += replicas.ranks
        num_active = Counter(cluster.node(rank.number) for rank in self.ranks)
        for rank in self.ranks if cluster.wakeup_seconds else ():
            rank.is_crowded = cluster.is_busy(num_active[cluster.node(rank.number)] - 1)
        # The start of each kind of instruction; it returns True if the instruction is done at once.
        self.passes: dict[type, Callable[[Rank, Any], bool]] = {
            Forward: self.forward,
            Backward: self.backward,
            BackwardInput: self.backward_input,
            JoinForward: self.join,
            JoinBackward: self.join,
        }
        exchanges = any(rank.replicas.token_ring for rank in self.ranks)
        self.start: dict[type, Callable[[Rank, Any], bool]] = {
            **(dict.fromkeys(self.passes, self.together) if exchanges else self.passes),
            BackwardWeight: self.backward_weight,
            Step: self.step,
            AllReduce: self.finish_reduction,
            ReduceScatter: self.finish_reduction,
            AllGather: self.gather,
            SendActivation: self.send_activation,
            SendGradient: self.send_gradient,
            ReceiveActivation: self.receive_activation,
            ReceiveGradient: self.receive_gradient,
        }

    def run(self) -> Timeline:
        """Return the events of each rank.

        Raises:
            Deadlock: nothing can advance, although some rank is not done.
        """
        for rank in self.ranks:
            self.advance(rank)
        self.engine.run()
        waiting = [rank for rank in self.ranks if rank.position < len(rank.program)]
        if self.engine.is_stopped:
            for rank in waiting:
                rank.events.append(TimedEvent(rank.program[rank.position], rank.since, self.engine.now))
        elif waiting:
            raise Deadlock(
                "nothing can advance: "
                + "; ".join(
                    f"rank {rank.number} (stage {rank.stage}) waits at instruction {rank.position}, "
                    f"{rank.program[rank.position]}"
                    for rank in waiting
                )
            )
        return Timeline({rank.number: tuple(rank.events) for rank in self.ranks})

    def advance(self, rank: Rank) -> None:
        """Start instructions until one takes time; its end calls `finish`."""
        program, start = rank.program, self.start
        now = rank.since = self.engine.now
        while rank.position < len(program):
            instruction = program[rank.position]
            if not start[type(instruction)](rank, instruction):
                return
            rank.events.append(TimedEvent(instruction, now, now))
            rank.position += 1

    def finish(self, rank: Rank) -> None:
        """End the current instruction of a rank, once its exchange is over, and start the next."""
        if not self.exchange(rank):
            return
        event = TimedEvent(rank.program[rank.position], rank.since, self.engine.now)
        rank.events.append(event)
        rank.position += 1
        if self.until is not None and rank is self.ranks[0] and self.until(event):
            self.engine.is_stopped = True
        self.advance(rank)

    # Computing

    def compute(self, rank: Rank, seconds: float, done: Callable[[Any], None], argument: object) -> bool:
        """Start computing; its end calls `done(argument)`. Return False: the instruction takes time."""
        if self.are_private:
            self.engine.after(seconds / rank.speed, done, argument)
        else:
            self.engine.start(seconds / rank.speed, rank.processors, done, argument)
        return False

    def together(self, rank: Rank, instruction: Instruction) -> bool:
        """Start a pass; replicas that exchange tokens start it once all of them have come to it."""
        replicas = rank.replicas
        replicas.together.append((rank, instruction))
        if replicas.token_ring is None or len(replicas.together) == len(replicas.ranks):
            arrived, replicas.together = replicas.together, []
            for each, its in arrived:
                self.passes[type(its)](each, its)
        return False

    def forward(self, rank: Rank, instruction: Forward) -> bool:
        """Compute the forward of a microbatch."""
        return self.compute(rank, rank.costs[instruction.chunk].forward_seconds, self.finish, rank)

    def backward(self, rank: Rank, instruction: Backward) -> bool:
        """Compute the backward of a microbatch."""
        seconds = rank.costs[instruction.chunk].backward_seconds
        return self.weight_gradients(rank, instruction, seconds)

    def backward_input(self, rank: Rank, instruction: BackwardInput) -> bool:
        """Compute the inputs' half of a split backward."""
        cost = rank.costs[instruction.chunk]
        return self.compute(rank, cost.backward_seconds - cost.weight_seconds, self.finish, rank)

    def join(self, rank: Rank, instruction: JoinForward | JoinBackward) -> bool:
        """Compute the tokens of other replicas in a pass for which the rank has no microbatch."""
        seconds = rank.join_seconds.get((instruction.chunk, type(instruction)), 0.0)
        return self.compute(rank, seconds, self.finish, rank)

    def backward_weight(self, rank: Rank, instruction: BackwardWeight) -> bool:
        """Compute the weights' half of a split backward."""
        return self.weight_gradients(rank, instruction, rank.costs[instruction.chunk].weight_seconds)

    def step(self, rank: Rank, _: Step) -> bool:
        """Compute the optimizer's step."""
        return self.compute(rank, rank.update_seconds, self.finish, rank)

    def weight_gradients(self, rank: Rank, instruction: Backward | BackwardWeight, seconds: float) -> bool:
        """Compute a backward that makes weight gradients; the last one of a round fills buckets."""
        if rank.position not in rank.finals:
            return self.compute(rank, seconds, self.finish, rank)
        products = rank.costs[instruction.chunk].products_seconds
        if rank.defers_wgrad[instruction.chunk]:
            rank.products_seconds += products
            products = 0.0
        if not rank.replicas.buckets:
            return self.compute(rank, seconds + products, self.finish, rank)
        if self.are_private:
            return self.backward_alone(rank, instruction.chunk, seconds + products)
        return self.backward_piece((rank, instruction.chunk, seconds + products))

    def backward_alone(self, rank: Rank, chunk: int, seconds: float) -> bool:
        """Start the last backward on a private processor, where all buckets' times are known at once."""
        now, taken = self.engine.now, seconds / rank.speed
        times = [now + bucket.fraction * taken for bucket in rank.costs[chunk].buckets]
        self.fill_when_ready(rank, chunk, times)
        return self.compute(rank, seconds, self.finish, rank)

    def backward_piece(self, piece: tuple[Rank, int, float]) -> bool:
        """Start the next piece of the last backward; at its end one more bucket of gradients is ready."""
        rank, chunk, seconds = piece
        buckets, i = rank.costs[chunk].buckets, rank.num_filled[chunk]
        begin = buckets[i - 1].fraction if i else 0.0
        if i < len(buckets):
            return self.compute(rank, (buckets[i].fraction - begin) * seconds, self.piece_done, piece)
        return self.compute(rank, (1.0 - begin) * seconds, self.finish, rank)

    def piece_done(self, piece: tuple[Rank, int, float]) -> None:
        """Fill a bucket and start the next piece."""
        self.fill(piece[0], piece[1])
        self.backward_piece(piece)

    def wake(self, rank: Rank, num_computing: int, done: Callable[[Any], None], argument: object) -> None:
        """Continue a rank after a wait, after which `num_computing` ranks of its machine compute."""
        by_computing = self.cluster.wakeup_seconds
        seconds = by_computing[min(num_computing, len(by_computing)) - 1] if rank.is_crowded else 0.0
        if seconds:
            self.compute(rank, seconds, done, argument)
        else:
            done(argument)

    # Gradients

    def products_done(self, rank: Rank) -> None:
        """Note the event of deferred products, and continue with the all-reduce."""
        rank.events.append(TimedEvent(Products(), rank.since, self.engine.now))
        self.advance(rank)

    def finish_reduction(self, rank: Rank, instruction: AllReduce | ReduceScatter) -> bool:
        """Compute deferred products, then wait until all buckets are summed."""
        if rank.products_seconds:
            seconds, rank.products_seconds = rank.products_seconds, 0.0
            return self.compute(rank, seconds, self.products_done, rank)
        replicas = rank.replicas
        for chunk in reversed(range(len(rank.costs) if replicas.buckets else 0)):
            missing = len(rank.costs[chunk].buckets) - rank.num_filled[chunk]
            if missing and self.are_private:
                self.fill_when_ready(rank, chunk, [self.engine.now] * missing)
            elif missing:  # a replica without a microbatch contributes zeros
                self.fill(rank, chunk, missing)
            rank.num_filled[chunk] = 0
        rank.round += 1
        if instruction.completes:
            place = Place(rank.stages[0], replicas.numbers.index(rank.number))
            factor = self.cluster.allreduce_factor
            rank.exchanging.extend(exchange_of(self.plan, place, rank.costs[0].exchanged, factor))
        if replicas.num_reduced == rank.round * len(replicas.buckets):
            return self.exchange(rank)
        replicas.waiting.append(rank)
        return False

    def exchange(self, rank: Rank) -> bool:
        """Send and take the messages that are left of an exchange. Return True if none is left."""
        while rank.exchanging:
            sender, receiver, num_bytes = rank.exchanging.popleft()
            key = (sender, receiver, True, -rank.round, 0)  # no microbatch's
            if not (self.receive(rank, key) if receiver == rank.number else self.send(rank, key, num_bytes)):
                return False
        return True

    def fill(self, rank: Rank, chunk: int, count: int = 1) -> None:
        """Fill the next buckets of a rank."""
        replicas = rank.replicas
        for _ in range(count):
            replicas.filled[rank.bucket(chunk)] += 1
            rank.num_filled[chunk] += 1
            self.reduce_next(replicas)

    def fill_when_ready(self, rank: Rank, chunk: int, times: Sequence[float]) -> None:
        """Note when a rank's buckets are ready; once every replica has, an event fills each bucket."""
        replicas, first = rank.replicas, rank.bucket(chunk)
        rank.num_filled[chunk] = len(times)
        each = replicas.ready_times.setdefault(chunk, [])
        each.append(times)
        if len(each) == len(replicas.ranks):
            del replicas.ready_times[chunk]
            for bucket, at in enumerate(map(max, *each), first):
                self.engine.after(at - self.engine.now, self.all_filled, (replicas, bucket))

    def all_filled(self, which: tuple[Replicas, int]) -> None:
        """Note a bucket that all replicas have filled."""
        replicas, bucket = which
        replicas.filled[bucket] = len(replicas.ranks)
        self.reduce_next(replicas)

    def reduce_next(self, replicas: Replicas, going: bool = False) -> None:
        """Start the reduction of the next full bucket.

        Args:
            going: True if another bucket has just been summed.
        """
        ring = replicas.ring
        if ring is None or replicas.num_parts or replicas.filled[replicas.num_reduced] < len(replicas.ranks):
            return
        replicas.num_parts = 1
        if ring.wait_seconds and not going:
            self.engine.after(ring.wait_seconds, self.reduce, replicas)
        else:
            self.reduce(replicas)

    def reduce(self, replicas: Replicas) -> None:
        """Start the reduction of a bucket on the ring, and its processor time on every replica."""
        ring = replicas.ring
        assert ring is not None
        num_bytes = replicas.buckets[replicas.num_reduced % len(replicas.buckets)].num_bytes
        limited = self.go_round(_Round(ring, self.part_done, replicas), num_bytes)
        if self.cluster.overlap < 1:
            # The share was measured while every rank of the machine computed.
            speed = self.cluster.shared_speed(self.cluster.node_ranks or 1)
            seconds = limited / ring.cap + ring.latency_seconds  # with the link to itself
            for rank in replicas.ranks:
                replicas.num_parts += 1
                handling = (1 - self.cluster.overlap) * seconds * speed
                self.engine.start(handling, rank.processors, self.part_done, replicas)

    def go_round(self, round_: "_Round", num_bytes: float) -> float:
        """Start a collective around its ring. Return the part of its work that bandwidth limits."""
        ring = round_.ring
        work = num_bytes * ring.work_per_byte
        limited = work - pass_at_once(ring.bursts, work, self.engine.now)
        if limited:
            self.engine.start(limited, ring.resources, self.went_round, round_, ring.cap)
        else:
            self.engine.after(ring.latency_seconds, round_.done, round_.replicas)
        return limited

    def went_round(self, round_: "_Round") -> None:
        """Empty the bursts of a ring whose transfer was limited by bandwidth; its latency follows."""
        for burst in round_.ring.bursts:
            burst.leave(0.0, self.engine.now)
        self.engine.after(round_.ring.latency_seconds, round_.done, round_.replicas)

    def part_done(self, replicas: Replicas) -> None:
        """End one job of a bucket; after the last job of the last bucket the replicas continue."""
        replicas.num_parts -= 1
        if replicas.num_parts:
            return
        del replicas.filled[replicas.num_reduced]
        replicas.num_reduced += 1
        if replicas.num_reduced % len(replicas.buckets) == 0:
            waiting, replicas.waiting = replicas.waiting, []
            self.wake_all(waiting)
        self.reduce_next(replicas, going=True)

    def wake_all(self, ranks: Sequence[Rank]) -> None:
        """Continue ranks that have waited for the same."""
        woken = Counter(rank.processors for rank in ranks)  # together, on each machine
        computing = {processors: processors[0].num_jobs + n for processors, n in woken.items()}
        for rank in ranks:
            self.wake(rank, computing[rank.processors], self.finish, rank)

    def gather(self, rank: Rank, _: AllGather) -> bool:
        """Wait for the other replicas, and for the weights that they have updated."""
        replicas = rank.replicas
        if replicas.gather_ring is None:
            return True
        replicas.gathering.append(rank)
        if len(replicas.gathering) == len(replicas.ranks):
            self.go_round(_Round(replicas.gather_ring, self.gathered, replicas), replicas.num_bytes)
        return False

    def gathered(self, replicas: Replicas) -> None:
        """Continue replicas that have each other's weights."""
        waiting, replicas.gathering = replicas.gathering, []
        self.wake_all(waiting)

    # Messages

    def send_activation(self, rank: Rank, instruction: SendActivation) -> bool:
        """Send a microbatch's output to the next stage."""
        m, stage = instruction.microbatch, rank.stages[instruction.chunk]
        key = (rank.number, self.peer(stage + 1, m), True, m, stage + 1)
        return self.send(rank, key, self.costs[stage].output_bytes)

    def send_gradient(self, rank: Rank, instruction: SendGradient) -> bool:
        """Send the gradient of a microbatch's input to the stage before."""
        m, stage = instruction.microbatch, rank.stages[instruction.chunk]
        key = (rank.number, self.peer(stage - 1, m), False, m, stage - 1)
        return self.send(rank, key, self.costs[stage - 1].gradient_bytes)

    def receive_activation(self, rank: Rank, instruction: ReceiveActivation) -> bool:
        """Wait for a microbatch's input."""
        m, stage = instruction.microbatch, rank.stages[instruction.chunk]
        return self.receive(rank, (self.peer(stage - 1, m), rank.number, True, m, stage))

    def receive_gradient(self, rank: Rank, instruction: ReceiveGradient) -> bool:
        """Wait for the gradient of a microbatch's output."""
        m, stage = instruction.microbatch, rank.stages[instruction.chunk]
        return self.receive(rank, (self.peer(stage + 1, m), rank.number, False, m, stage))

    def peer(self, stage: int, microbatch: int) -> int:
        """Return the rank that handles a microbatch in a stage."""
        numbers = self.numbers[stage]
        return numbers[microbatch % len(numbers)]

    def message(self, key: Key) -> Message:
        """Return the message of this key, created on first use."""
        found = self.messages.get(key)
        if found is None:
            found = self.messages[key] = Message(key)
        return found

    def handle(self, rank: Rank, num_bytes: float, done: Callable[[Any], None], argument: object) -> bool:
        """Spend the processor time of a message at one end. Return True if it takes none."""
        seconds = self.handling_seconds(num_bytes) if self.has_handling else 0.0
        return self.compute(rank, seconds, done, argument) if seconds else True

    def send(self, rank: Rank, key: Key, num_bytes: float) -> bool:
        """Hand a message over, after its processor time."""
        message = self.message(key)
        message.sender, message.num_bytes = rank, num_bytes
        if self.handle(rank, num_bytes, self.handed_over, message):
            self.transfer(message)
            return True
        return False

    def handed_over(self, message: Message) -> None:
        """Start the transfer of a message and continue its sender."""
        self.transfer(message)
        self.finish(message.sender)

    def receive(self, rank: Rank, key: Key) -> bool:
        """Take a message that has arrived, or wait for it."""
        message = self.message(key)
        message.receiver = rank
        return message.arrived and self.take(message, rank)

    def transfer(self, message: Message) -> None:
        """Start the transfer of a message over its links."""
        sender, receiver = message.key[:2]
        route = message.route = self.machines.route(sender, receiver)
        limited = message.num_bytes - pass_at_once(route.bursts, message.num_bytes, self.engine.now)
        if limited:
            self.engine.start(limited, route.resources, self.sent, message)
        else:
            self.engine.after(0.0, self.transferred, message)

    def sent(self, message: Message) -> None:
        """Empty the bursts of a route whose transfer was limited by bandwidth."""
        for burst in message.route.bursts:
            burst.leave(0.0, self.engine.now)
        self.transferred(message)

    def transferred(self, message: Message) -> None:
        """Let the latency of a message pass."""
        if message.route.latency_seconds:
            self.engine.after(message.route.latency_seconds, self.arrive, message)
        else:
            self.arrive(message)

    def arrive(self, message: Message) -> None:
        """Note the arrival of a message and wake a rank that waits for it."""
        message.arrived = True
        if message.receiver is not None:
            self.wake_receiver(message)

    def wake_receiver(self, message: Message) -> None:
        """Continue a rank that has waited for a message."""
        rank = message.receiver
        assert rank is not None
        self.wake(rank, rank.processors[0].num_jobs + 1, self.taken_late, message)

    def taken_late(self, message: Message) -> None:
        """Take a message for which the receiver has waited."""
        rank = message.receiver
        assert rank is not None
        if self.take(message, rank):
            self.finish(rank)

    def take(self, message: Message, rank: Rank) -> bool:
        """Spend the receiver's processor time of a message. Return True if it takes none."""
        del self.messages[message.key]
        return self.handle(rank, message.num_bytes, self.finish, rank)
