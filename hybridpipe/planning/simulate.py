"""Simulate: run the programs of all ranks on a model of the machines; no torch, no MPI.

A discrete-event simulation. Ranks that share a node's processors share them fairly while they compute;
a message occupies its sender's outgoing and its receiver's incoming port, first come, first served; the
all-reduce of a bucket starts when the last backward of every replica has filled it, one bucket after the
other. The same programs run under two rules for sends: buffered, as the runtime's `Isend`, for time;
synchronous, as `MPI_Ssend`, to see what relies on buffering. Where nothing can advance, `Deadlock` names
every waiting rank.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost import StageCost, peak_memory_bytes, stage_costs
from hybridpipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Step,
    last_backward,
)
from hybridpipe.planning.plan import Plan, Prediction
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules import programs
from hybridpipe.planning.timeline import Event, Timeline

Callback = Callable[[], None]
MessageKey = tuple[int, int, bool, int]  # sender, receiver, forward?, microbatch


class Deadlock(RuntimeError):
    """Nothing can advance; the message names each waiting rank, its stage and its instruction."""


class _Clock:
    """Callbacks in the order of time; equal times in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callback]] = []
        self._order = count()

    def after(self, seconds: float, callback: Callback) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), callback))

    def run(self) -> None:
        while self._queue:
            self.now, _, callback = heapq.heappop(self._queue)
            callback()


class _Processors:
    """One node's compute, shared fairly: with n ranks active on s slots each runs at min(1, s/n)."""

    def __init__(self, clock: _Clock, slots: float) -> None:
        self._clock = clock
        self._slots = slots
        self._jobs: dict[int, tuple[float, Callback]] = {}  # rank: work left, what follows
        self._since = 0.0
        self._epoch = 0

    def start(self, rank: int, work: float, done: Callback) -> None:
        self._progress()
        self._jobs[rank] = (work, done)
        self._next()

    def _rate(self) -> float:
        return min(1.0, self._slots / len(self._jobs))

    def _progress(self) -> None:
        if self._jobs:
            worked = (self._clock.now - self._since) * self._rate()
            self._jobs = {rank: (left - worked, done) for rank, (left, done) in self._jobs.items()}
        self._since = self._clock.now

    def _next(self) -> None:
        self._epoch += 1  # a wake-up that was planned for another set of jobs is void
        if self._jobs:
            epoch, rank = self._epoch, min(self._jobs, key=lambda r: self._jobs[r][0])
            self._clock.after(max(self._jobs[rank][0], 0.0) / self._rate(), lambda: self._finish(rank, epoch))

    def _finish(self, rank: int, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._progress()
        _, done = self._jobs.pop(rank)
        self._next()
        done()


class _StageAllReduce:
    """The buckets of one stage: each reduced once every replica has filled it, one after the other."""

    def __init__(self, clock: _Clock, seconds: Sequence[float], replicas: int) -> None:
        self._clock = clock
        self._seconds = seconds
        self._missing = [replicas] * len(seconds)
        self._next = 0
        self._busy = False
        self._waiting: list[Callback] = []

    def fill(self, bucket: int) -> None:
        self._missing[bucket] -= 1
        self._start()

    def wait(self, done: Callback) -> None:
        self._waiting.append(done)
        self._start()

    def _start(self) -> None:
        if self._next == len(self._seconds):
            waiting, self._waiting = self._waiting, []
            for done in waiting:
                done()
        elif not self._busy and self._missing[self._next] == 0:
            self._busy = True
            self._clock.after(self._seconds[self._next], self._finish)

    def _finish(self) -> None:
        self._busy = False
        self._next += 1
        self._start()


class _Simulation:
    def __init__(
        self,
        programs: Mapping[int, Program],
        plan: Plan,
        costs: Sequence[StageCost],
        cluster: Cluster,
        synchronous: bool,
    ) -> None:
        self.programs, self.plan, self.costs, self.cluster = programs, plan, costs, cluster
        self.synchronous = synchronous
        self.clock = _Clock()
        self.nodes = {cluster.node(rank): _Processors(self.clock, cluster.slots) for rank in programs}
        self.stage_of = {rank: s for s, stage in enumerate(plan.stages) for rank in stage.ranks}
        self.allreduce = [
            _StageAllReduce(
                self.clock,
                [cluster.allreduce_seconds(bucket.num_bytes, stage.ranks) for bucket in cost.buckets],
                stage.replicas,
            )
            for stage, cost in zip(plan.stages, costs, strict=True)
        ]
        self.counter = dict.fromkeys(programs, 0)
        self.events: dict[int, list[Event]] = {rank: [] for rank in programs}
        self.filled = dict.fromkeys(programs, 0)  # buckets this rank has filled
        self.last_backward = {rank: last_backward(program) for rank, program in programs.items()}
        self.arrived: set[MessageKey] = set()
        self.wanted: dict[MessageKey, Callback] = {}  # receives that wait for their message
        self.offered: dict[MessageKey, Callback] = {}  # synchronous sends that wait for their receive
        self.outgoing = dict.fromkeys(programs, 0.0)  # when each rank's port is free again
        self.incoming = dict.fromkeys(programs, 0.0)

    def run(self) -> Timeline:
        for rank in self.programs:
            self.advance(rank)
        self.clock.run()
        waiting = {rank: i for rank, i in self.counter.items() if i < len(self.programs[rank])}
        if waiting:
            raise Deadlock(
                "nothing can advance: "
                + "; ".join(
                    f"rank {rank} (stage {self.stage_of[rank]}) waits at instruction {i}, {instruction}"
                    for rank, i in waiting.items()
                    for instruction in [self.programs[rank][i]]
                )
            )
        return Timeline({rank: tuple(events) for rank, events in self.events.items()})

    def advance(self, rank: int) -> None:
        """Start the rank's next instruction; its end calls `advance` again."""
        if self.counter[rank] == len(self.programs[rank]):
            return
        instruction = self.programs[rank][self.counter[rank]]
        start = self.clock.now

        def done() -> None:
            self.events[rank].append(Event(instruction, start, self.clock.now))
            self.counter[rank] += 1
            self.advance(rank)

        self.start(rank, instruction, done)

    def start(self, rank: int, instruction: Instruction, done: Callback) -> None:
        stage = self.stage_of[rank]
        cost = self.costs[stage]
        match instruction:
            case Forward():
                self.compute(rank, cost.forward_seconds, done)
            case Backward():
                if self.counter[rank] == self.last_backward[rank]:
                    self.last_backward_from(rank, 0.0, done)
                else:
                    self.compute(rank, cost.backward_seconds, done)
            case Step():
                self.compute(rank, cost.update_seconds, done)
            case AllReduce():
                while self.filled[rank] < len(cost.buckets):  # a replica without a microbatch has zeros ready
                    self.fill_next(rank)
                self.allreduce[stage].wait(done)
            case SendActivation(m):
                self.send((rank, self.plan.rank_of(stage + 1, m), True, m), cost.output_bytes, done)
            case SendGradient(m):
                self.send(
                    (rank, self.plan.rank_of(stage - 1, m), False, m),
                    self.costs[stage - 1].output_bytes,
                    done,
                )
            case ReceiveActivation(m):
                self.receive((self.plan.rank_of(stage - 1, m), rank, True, m), done)
            case ReceiveGradient(m):
                self.receive((self.plan.rank_of(stage + 1, m), rank, False, m), done)

    def compute(self, rank: int, seconds: float, done: Callback) -> None:
        self.nodes[self.cluster.node(rank)].start(rank, seconds / self.cluster.speed(rank), done)

    def last_backward_from(self, rank: int, fraction: float, done: Callback) -> None:
        """The backward in pieces: at the end of each one more bucket of gradients is ready."""
        cost = self.costs[self.stage_of[rank]]
        if self.filled[rank] == len(cost.buckets):
            return self.compute(rank, (1.0 - fraction) * cost.backward_seconds, done)
        until = cost.buckets[self.filled[rank]].fraction

        def piece_done() -> None:
            self.fill_next(rank)
            self.last_backward_from(rank, until, done)

        self.compute(rank, (until - fraction) * cost.backward_seconds, piece_done)

    def fill_next(self, rank: int) -> None:
        self.filled[rank] += 1
        self.allreduce[self.stage_of[rank]].fill(self.filled[rank] - 1)

    def send(self, key: MessageKey, num_bytes: float, done: Callback) -> None:
        self.handle_message(key[0], lambda: self.hand_over(key, num_bytes, done))

    def handle_message(self, rank: int, done: Callback) -> None:
        """The processor time that a message takes at either end."""
        if self.cluster.message_seconds:
            self.compute(rank, self.cluster.message_seconds, done)
        else:
            done()

    def hand_over(self, key: MessageKey, num_bytes: float, done: Callback) -> None:
        if not self.synchronous:
            self.transfer(key, num_bytes, lambda: None)
            done()
        elif key in self.wanted:
            self.transfer(key, num_bytes, done)
        else:
            self.offered[key] = lambda: self.transfer(key, num_bytes, done)

    def receive(self, key: MessageKey, done: Callback) -> None:
        if key in self.arrived:
            self.arrived.remove(key)
            return self.handle_message(key[1], done)
        self.wanted[key] = lambda: self.handle_message(key[1], done)
        if key in self.offered:
            self.offered.pop(key)()

    def transfer(self, key: MessageKey, num_bytes: float, sent: Callback) -> None:
        sender, receiver, _, _ = key
        link = self.cluster.link(sender, receiver)
        begin = max(self.clock.now, self.outgoing[sender], self.incoming[receiver])
        end = begin + num_bytes / link.bandwidth
        self.outgoing[sender] = self.incoming[receiver] = end
        self.clock.after(end - self.clock.now, sent)
        self.clock.after(end + link.latency_seconds - self.clock.now, lambda: self.arrive(key))

    def arrive(self, key: MessageKey) -> None:
        if key in self.wanted:
            self.wanted.pop(key)()
        else:
            self.arrived.add(key)


def simulate(
    programs: Mapping[int, Program],
    plan: Plan,
    costs: Sequence[StageCost],
    cluster: Cluster,
    *,
    synchronous: bool = False,
) -> Timeline:
    """Run one program a rank and return what each rank does when.

    Args:
        programs: by rank, such as `schedules.programs(plan)`.
        costs: one for each stage.
        synchronous: a send lasts until its message was received (`MPI_Ssend`).

    Raises:
        Deadlock: nothing can advance, although some rank is not done.
    """
    return _Simulation(programs, plan, costs, cluster, synchronous).run()


def predict(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Timeline, Prediction]:
    """The timeline of one full minibatch under the plan, and the figures that follow from it.

    The profile is that of the plan's microbatch.

    Raises:
        ValueError: plan and profile differ in layers, or the plan names a rank that the cluster lacks.
    """
    plan.check_world(cluster.num_ranks)
    timeline = simulate(programs(plan), plan, stage_costs(profile, plan), cluster)
    seconds = timeline.seconds
    samples = profile.samples * plan.num_microbatches
    return timeline, Prediction(
        minibatch_seconds=seconds,
        samples_per_second=samples / seconds if seconds else 0.0,
        bubble_fraction=timeline.bubble_fraction,
        peak_memory_bytes=peak_memory_bytes(profile, plan),
    )
