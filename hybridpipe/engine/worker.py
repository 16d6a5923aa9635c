"""Worker: one rank's communicators, stages, optimizer and executor, wired together for a plan.

Invariant: all ranks call its collective methods in the same order; a rank that the plan leaves unused takes
part in the collectives and does nothing else.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hybridpipe.comm.communicators import communicators
from hybridpipe.comm.courier import courier_of
from hybridpipe.comm.cuda_aware import cuda_aware
from hybridpipe.comm.cuda_ipc import asked_for, neighbours, readers
from hybridpipe.comm.exchange import RowExchange
from hybridpipe.comm.idle import cores_to_spare
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.comm.sums import TensorSums
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.data.stream import Minibatch, Stream
from hybridpipe.device import lanes_of
from hybridpipe.engine import rank_state, whole_state
from hybridpipe.engine.between_groups import BetweenGroups, with_centre
from hybridpipe.engine.executor import Executor, RankParts
from hybridpipe.engine.faulty import FaultyExecutor, FaultyTransport
from hybridpipe.engine.loss_weights import LossWeights
from hybridpipe.engine.pending import PendingLosses, blank, carried
from hybridpipe.engine.rank_state import NewState, RankState
from hybridpipe.engine.replication import average_statistics, replication
from hybridpipe.engine.splitting import NOTHING_TO_SPLIT, Splittable, split_experts, split_tensors
from hybridpipe.environment.allocator import returning_freed_memory
from hybridpipe.errors import UserError
from hybridpipe.health import failure, faults, preemption
from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.layers import Layers
from hybridpipe.model.structure import Structure
from hybridpipe.model.tensor_plan import SHARD
from hybridpipe.model.tensors import Tree
from hybridpipe.optim.loss_scale import DYNAMIC, LossScales
from hybridpipe.optim.nonfinite import NonfiniteCheck
from hybridpipe.optim.shared_gradients import SharedGradients
from hybridpipe.optim.update import Update, UpdateRule
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import forward_program, overflows_late, program
from hybridpipe.planning.schedules.instructions import Forward, RankProgram, without_update
from hybridpipe.planning.schedules.resume_point import ResumePoint, resumed_program
from hybridpipe.planning.timeline import TimedEvent
from hybridpipe.stage.losses import LossSum
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.tensor_split import TensorSplit
from hybridpipe.types import Loss


class Worker:
    """One rank under a plan that fits the model and the world.

    Making one is collective over all groups and gives the model rank 0's weights.

    Args:
        plan: with replicas it names a backend in `sync`.
        rule: optimizer, learning-rate scheduler and clipping.
        group: the ranks that train under the plan, among others that do as well.
        seed: seed of the run's random numbers.
        progress_thread: True if the transport needs a thread that moves messages while the rank computes.
        numbers: of the tensors on the meta device, of which the rank gets those of its stages.
        splittable: the modules that the plan may split over ranks.
    """

    def __init__(
        self,
        layers: Layers,
        plan: Plan,
        loss: Loss,
        rule: UpdateRule,
        group: TrainingGroup,
        device: torch.device,
        seed: int,
        progress_thread: bool,
        numbers: Numbers | None = None,
        splittable: Splittable = NOTHING_TO_SPLIT,
    ) -> None:
        self.layers, self.model, self.plan, self.device = layers, layers.model, plan, device
        self.group, world, self.lanes = group, group.world, lanes_of(device)
        self.place, self._is_cut = plan.place(world.rank), plan.num_stages > 1
        self.flushes = not plan.is_asynchronous  # each minibatch ends before the next begins
        self.communicators = communicators(world, plan)
        self.control = self.communicators.control
        self._between = BetweenGroups(group, self.communicators) if group.options.count > 1 else None
        self._everyone = self.control if self._between is None else self._between.everyone
        transport = FaultyTransport if faults.any_left() else MpiTransport
        peers, to_spare = self.communicators.peers, cores_to_spare(world)
        self.transport = transport(peers, to_spare, progress_thread, not self.lanes.on_host)
        direct = cuda_aware(self.control, device)
        others = frozenset[int]()
        if not direct and asked_for(self.control):
            others = readers(self.control, self.lanes, neighbours(plan, layers.holders(plan).values()))
        self.courier = courier_of(self.transport, self.lanes, direct, others)
        self._left = False
        self.end_requested = False  # by a callback of this rank
        whole_state.broadcast(self.model, self._everyone)
        self.tensors: TensorSplit | None = None  # the modules that this rank has in parts
        self._split(splittable, numbers)
        if numbers is not None and self.place is not None:
            spans = (plan.stages[s] for s in plan.held_stages(self.place))
            with returning_freed_memory():
                numbers.fill(self.model, *(layers.stage(span.start, span.stop).module for span in spans))
        self.executor = self._build_executor(loss, rule, seed)
        self._structure = Structure(self.model)
        self._modes = self._structure.settings()
        self._program = lru_cache(maxsize=8)(self._make_program)
        self._forward_program = lru_cache(maxsize=8)(self._make_forward_program)

    def _split(self, splittable: Splittable, numbers: Numbers | None) -> None:
        """Leave this rank's part of what its stages split in the model. Collective."""
        holders = self.layers.holders(self.plan)
        self.parts = splittable.parts(self.model, self.plan, holders)  # the first of each parameter in parts
        held = () if self.place is None else self.plan.held_stages(self.place)
        here = {key: part for key, part in self.parts.items() if not set(holders[key]).isdisjoint(held)}
        why, along = None, self.communicators.split
        if "replica" in along and along["replica"].size > 1:
            assert self.place is not None
            experts = [each for each in splittable.experts if each.keys[0] in here]
            rows = RowExchange(along["replica"], self.transport)
            with failure.guard():
                try:
                    split_experts(self.model, experts, self.plan, self.place, rows, numbers)
                except UserError as error:  # of the user's module, the same on all replicas
                    why = str(error)
        if "shard" in along and along["shard"].size > 1:
            inside = [
                each
                for each in splittable.tensors
                if any(not set(holders[key]).isdisjoint(held) for key in each.all_keys(self.model))
            ]
            of_shards = {key: part for key, part in here.items() if part.axis == SHARD}
            sums = TensorSums(along["shard"], self.transport)
            with failure.guard():
                self.tensors = split_tensors(self.model, inside, of_shards, sums, numbers)
        if self.parts:
            self._refuse(why)
            self._settle()  # records stay: they call what holds experts as a whole

    def _build_executor(self, loss: Loss, rule: UpdateRule, seed: int) -> Executor:
        plan, place, replicas = self.plan, self.place, self.communicators.along.get("replica")
        if place is None or replicas is None:
            self._refuse(None)
            return Executor(RankParts(plan, None, self.lanes, Update(None)))
        held = plan.held_stages(place)
        stages = [self._build_stage(s, loss, seed) for s in held]
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        names |= {p: key for stage in stages for p, key in stage.layers.parameters().items()}
        rule = rule.naming(names)
        groups = self._groups_that_share(stages)
        tie = replication(plan, place, stages, replicas, self.transport, rule, groups)
        with failure.guard():  # the user's factory may fail on this rank alone
            why = rule.why_not_predicted(tie.parameters, plan)
            has_all = plan.num_groups == 1
            why = why or rule.why_not_apart(self.model, tie.parameters, tie.shares, has_all=has_all)
        self._refuse(why)
        elsewhere = [p for p, others in groups.items() if others[0] != place.stage]
        with failure.guard():
            update = rule.build(
                tie.parameters, plan, place.stage, self._sum_over_ranks, tie.uncounted(elsewhere), tie.shares
            )
        agree = self._max_over_updating_ranks
        parts = RankParts(
            plan=plan,
            place=place,
            lanes=self.lanes,
            update=update,
            stages=stages,
            p2p=[PointToPoint(plan, s, self.courier, self.layers.precision, place.shard) for s in held],
            sync=tie.sync,
            check=NonfiniteCheck(rule.on_nonfinite, plan, place, stages, agree, elsewhere, tie.parts),
            shared=SharedGradients(plan, place, groups, self.courier, rule.compression) if groups else None,
            loss_weights=LossWeights(plan, self._sum_over_updating_ranks),
            scales=LossScales(DYNAMIC, overflows_late(plan)) if rule.scales_in_flight(plan) else None,
            shares=tie.shares,
            tensors=self.tensors,
            centre=None if self._between is None else self._between.centre(update, tie, groups),
        )
        if isinstance(self.transport, FaultyTransport):
            return FaultyExecutor(parts, self.transport)
        return Executor(parts)

    def _refuse(self, why: str | None) -> None:
        """Raise UserError on all ranks if any has a reason. Collective."""
        for told in self.control.allgather(why):
            if told is not None:
                raise UserError(told)

    def _build_stage(self, s: int, loss: Loss, seed: int) -> Stage:
        plan = self.plan
        layers = self.layers.stage(plan.stages[s].start, plan.stages[s].stop)
        layers.alternates = plan.alternates
        along, sums = self.communicators.split, None
        if plan.stages[s].sync_batchnorm > 1:
            sums = TensorSums(along["replica"], self.transport, "replicas that normalise together")
        return Stage(
            layers,
            self.device,
            seed,
            loss if s == plan.num_stages - 1 else None,
            recompute=plan.recomputes(s),
            split_backward=plan.traits.splits_backward,
            batches_wgrad=plan.traits.batches_wgrad,
            sums=sums,
        )

    def _groups_that_share(self, stages: Sequence[Stage]) -> dict[Tensor, list[int]]:
        """Return the groups of ranks that hold each of these stages' parameters that several groups hold.

        The owner's comes first. The order of the parameters is the same on all ranks.
        """
        keys = {key: p for stage in stages for p, key in stage.layers.parameters().items()}
        found = {}
        for key, stages_of in self.layers.holders(self.plan).items():
            groups = list(dict.fromkeys(map(self.plan.group_of, stages_of)))
            if key in keys and len(groups) > 1:
                found[keys[key]] = groups
        return found

    def renew(self) -> None:
        """Adopt the modes, hooks and requires_grad flags that users have changed in the model. Collective.

        All ranks must have made the same changes.

        Raises:
            ValueError: a module or a parameter was replaced.
        """
        self._structure.check()
        before, self._modes = self._modes, self._structure.settings()
        self.adopt_settings(forced=self._modes != before)
        if self._modes != before:
            self.executor.renew()

    def adopt_settings(self, forced: bool = False) -> None:
        """Adopt the attributes and globals that users have changed, between two minibatches."""
        settings = self.layers.settings
        if (settings is not None and settings.changed()) or forced:
            self.layers.renew()
            for stage in self.executor.stages:
                stage.layers.renew()

    def _settle(self) -> None:
        """Let what the layers have changed of themselves in a run not count as changed."""
        if self.layers.settings is not None:
            self.layers.settings.settle()

    def _make_program(self, num_microbatches: int, update: bool = True) -> RankProgram:
        whole = () if self.place is None else program(self.plan, self.place, num_microbatches)
        return RankProgram(whole if update else without_update(whole))

    def _make_forward_program(self, num_microbatches: int) -> RankProgram:
        return RankProgram(
            () if self.place is None else forward_program(self.plan, self.place, num_microbatches)
        )

    def _resumed_program(self, num_microbatches: int, point: ResumePoint) -> RankProgram:
        return RankProgram(
            () if self.place is None else resumed_program(self.plan, self.place, num_microbatches, point)
        )

    def _sum_over_ranks(self, number: float) -> float:
        """Return the sum over the ranks that the plan uses. Collective over them."""
        assert self.communicators.used is not None
        total: float = self.communicators.used.allreduce(number)
        return total

    def _max_over_updating_ranks(self, number: int) -> int:
        """Return the largest number of the ranks that update together. Collective over them."""
        return int(self._over_updating_ranks(np.array([number]), MPI.MAX)[0])

    def _sum_over_updating_ranks(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum of arrays of the ranks that update together. Collective over them."""
        return self._over_updating_ranks(numbers, MPI.SUM)

    def _over_updating_ranks(self, numbers: np.ndarray, op: MPI.Op) -> np.ndarray:
        """Reduce `numbers` in place over the ranks that update together. Collective over them.

        Those are all ranks that the plan uses under a synchronous schedule, and the stage's replicas under an
        asynchronous one.
        """
        those = self.communicators
        together = those.along["replica"] if self.plan.is_asynchronous else those.used
        assert together is not None
        if together.size > 1:
            request = together.Iallreduce(MPI.IN_PLACE, numbers, op=op)
            self.transport.watch(request, numbers, "agreement on an update", together.ranks).wait()
        return numbers

    def expect_shapes(self, vary: bool) -> None:
        """Say before a run whether microbatches of as many samples may differ in shape.

        Every stage then looks at the inputs. All ranks must say the same.
        """
        for stage in self.executor.stages:
            stage.layers.shapes_vary = vary and self._is_cut

    def zero_grad(self) -> None:
        """Drop all gradients, as zero_grad() does in any training loop."""
        self.executor.update.zero_grad()

    def keep_forward_state(self, wanted: bool) -> None:
        """Choose before a stream begins to keep the state that checkpoints need of microbatches in flight."""
        if self.executor.stashed is not None:
            self.executor.stashed.keeps_forward_state = wanted

    def train(
        self, minibatch: Minibatch, step: int, update: bool = True
    ) -> tuple[PendingLosses, list[TimedEvent]]:
        """Train on one minibatch, and flush.

        Args:
            step: number of minibatches trained on before.
            update: False accumulates gradients and leaves the weights as they are.

        Returns:
            each microbatch's loss, on the way to all ranks; this rank's events.
        """
        losses: dict[int, LossSum] = {}
        events: list[TimedEvent] = []
        with failure.guard():
            if self._between is not None:
                self._between.join(step, self.plan, self.executor.shares)
            todo = self._program(len(minibatch.sizes), update)
            for done in self.executor.run(todo, Stream([minibatch], step)):
                losses, events = done.losses, done.events
            count = len(minibatch.sizes)
            numbers = blank(count * self.group.options.count)  # those of the first group come first
            for m, loss in losses.items():
                numbers[self.group.index * count + m] = loss
            self._settle()
            return self.sum_losses(numbers), events

    def stream(
        self, minibatches: Sequence[Minibatch], step: int, done: int = 0
    ) -> Iterator[tuple[list[PendingLosses], list[TimedEvent]]]:
        """Train on minibatches without a flush in between, under an asynchronous schedule.

        Yields for each update of this rank the losses of the minibatches that it covers, and this rank's
        events. A rank that the plan leaves unused yields once a minibatch.

        Args:
            step: number of minibatches trained on before the first one.
            done: number of these minibatches that the run before a resume trained on.
        """
        stream = Stream(minibatches, step)
        numbers = [blank(len(minibatch.sizes)) for minibatch in minibatches]
        ahead, scales = deque(numbers[done:]), self.executor.scales
        with failure.guard(), self._refusing_early_end():
            rest = self._resumed_program(len(stream.sizes), ResumePoint(done, len(minibatches)))
            for update in self.executor.run(rest, stream, done):
                for m, loss in update.losses.items():
                    at = stream[m]
                    numbers[at.step - step][at.microbatch] = loss
                sums = [
                    self.sum_losses(ahead.popleft(), update.skipped) for _ in range(update.num_minibatches)
                ]
                if scales is not None:
                    scales.note(each.were_skipped for each in sums)
                yield sums, update.events
            while ahead:
                yield [self.sum_losses(ahead.popleft())], []
            self._settle()

    def loads(self, counts: Sequence[int], begin: int = 0, stream_start: int = 0) -> list[tuple[int, int]]:
        """Return the (minibatch, microbatch) pairs that this rank loads in a training epoch, in order.

        Args:
            counts: number of microbatches of each minibatch.
            begin: the first minibatch that was not trained on before.
            stream_start: the first minibatch of the stream, under an asynchronous schedule.
        """
        if not self.plan.is_asynchronous:
            whole = enumerate(counts[begin:], begin)
            return [(i, m) for i, count in whole for m in self._loaded(self._program(count), training=True)]
        point = ResumePoint(begin - stream_start, len(counts) - stream_start)
        rest = self._resumed_program(sum(counts[stream_start:]), point)
        of_stream = enumerate(counts[stream_start:], stream_start)
        places = [(i, m) for i, count in of_stream for m in range(count)]
        return [places[m] for m in self._loaded(rest, training=True)]

    def loads_to_infer(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the (minibatch, microbatch) pairs that this rank loads in an evaluation, in order."""
        programs = enumerate(map(self._forward_program, counts))
        return [(i, m) for i, program in programs for m in self._loaded(program, training=False)]

    @property
    def loads_samples(self) -> bool:
        """True on a rank that takes inputs or targets from the data set."""
        return any(stage.loads(training) for stage in self.executor.stages for training in (True, False))

    def _loaded(self, program: RankProgram, training: bool) -> list[int]:
        """Return the microbatches whose inputs or targets a program loads, each once."""
        loads = [stage.loads(training) for stage in self.executor.stages]
        forwards = (each for each in program.instructions if isinstance(each, Forward))
        return list(dict.fromkeys(each.microbatch for each in forwards if loads[each.chunk]))

    def leave_stream(self) -> None:
        """Allow all ranks to close the generator of `stream` early, at a resume point.

        Messages between ranks stay under way, so the worker's state can still be read, and nothing else.
        """
        self._left = True

    @contextmanager
    def _refusing_early_end(self) -> Iterator[None]:
        """Refuse to let a stream end early inside this context: each rank would stop at another minibatch.

        Raises:
            RuntimeError: the caller left the stream's generator early without `leave_stream`.
        """
        try:
            yield
        except GeneratorExit as left:
            if self._left:
                return  # the generator ends behind the context
            cause = left.__context__  # the exception that the caller did not catch
            if self.control.size == 1:  # no minibatch is under way between two updates
                raise
            if isinstance(cause, SystemExit):
                raise cause from None
            raise RuntimeError(
                f"training was left in the middle of an epoch, which several ranks cannot do under "
                f"{self.plan.schedule}: minibatches are under way between them"
            ) from cause

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set this rank's layers to evaluation mode inside this context, and back to what they were after it.

        What `expect_shapes` has said comes back as well.
        """
        stages = self.executor.stages
        modes = [(module, module.training) for stage in stages for module in stage.module.modules()]
        vary = [stage.layers.shapes_vary for stage in stages]
        for stage in stages:
            stage.module.eval()
        try:
            with with_centre(self.executor):
                yield
        finally:
            for module, training in modes:
                module.training = training
            self._settle()
            for stage, before in zip(stages, vary, strict=True):
                stage.layers.shapes_vary = before

    def infer(
        self,
        minibatch: Minibatch,
        microbatch_metrics: Callable[[Tree, Tree, int], list[float]],
        width: int,
        number: int,
    ) -> PendingLosses:
        """Run the forwards of one minibatch without a graph. Collective.

        Args:
            microbatch_metrics: maps (outputs, targets, samples) of a microbatch to `width` numbers.
            number: index of the minibatch in the evaluation.

        Returns:
            the numbers, shape (num_microbatches, width), on the way to all ranks.
        """
        numbers = np.zeros((len(minibatch.sizes), width))

        def note(microbatch: int, outputs: Tree, targets: Tree) -> None:
            numbers[microbatch] = microbatch_metrics(outputs, targets, minibatch.sizes[microbatch])

        with failure.guard():
            self.executor.infer(self._forward_program(len(minibatch.sizes)), minibatch, note, number)
            if self.tensors is not None:
                self.tensors.check_outputs()
            return self.sum_losses(numbers * self.group.tells)  # other groups have the same

    def sum_losses(self, numbers: np.ndarray, skipped: bool = False) -> PendingLosses:
        """Start to sum `numbers` over the ranks of all groups in the background. Collective.

        Args:
            skipped: True if this rank has skipped its update.
        """
        summed = carried(numbers, self.end_requested, preemption.state.stop_requested, skipped)
        request = self._everyone.Iallreduce(MPI.IN_PLACE, summed, op=MPI.SUM)
        pending = self.transport.watch(request, summed, "sum of the losses", self._everyone.ranks)
        return PendingLosses(summed, numbers.shape, pending)

    def average_statistics(self) -> None:
        """Average the normalisation layers' statistics over a stage's replicas, in all groups. Collective.

        In training each replica's statistics come from its own microbatches only.
        """
        replicas = self.communicators.along.get("replica")
        if self._between is not None:
            replicas = self._between.replicas
        if replicas is not None and replicas.size > 1:
            average_statistics(self.executor.statistics, replicas)

    def state_dict(self, point: ResumePoint) -> RankState:
        """Return this rank's state at a resume point; its tensors are the live ones, not copies."""
        return rank_state.take(self.executor, self.plan, point)

    def load_state(self, state: NewState) -> None:
        """Load a state into this rank."""
        rank_state.put(self.executor, state)
        if self._between is not None:
            self._between.come_again()

    def reset_centre(self) -> None:
        """Let groups have the present weights in common, which were loaded alike in all of them."""
        if self._between is not None:
            self._between.reset()

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """Return the whole model's present state on rank 0 of all, on the CPU; None elsewhere. Collective.

        With several groups its weights are those that they have in common.
        """
        state = {key: tensor.clone() for key, tensor in self.gathered(self.model.state_dict())}
        return state if self.group.leads else None

    def gathered(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the whole model's present state on rank 0 (`whole_state.gather`). Collective."""
        with with_centre(self.executor):
            yield from self._gathered(keys)

    def _gathered(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        self.average_statistics()
        axes = {key: part.axis for key, part in self.parts.items()}
        ranks = {
            key: self.plan.stages[stages[0]].holders_along(axes.get(key))
            for key, stages in self.layers.holders(self.plan).items()
        }
        yield from whole_state.gather(self.model, keys, ranks, self.parts, self.control)

    def close(self) -> None:
        """End background communication and free the communicators. Collective.

        Does nothing after `leave_stream` on several ranks: messages under way would never complete, and the
        process is about to end.
        """
        if self._left and self.control.size > 1:
            return
        if self.executor.sync is not None:
            self.executor.sync.close()
        for experts in (each for stage in self.executor.stages for each in stage.experts):
            experts.is_closed = True
        if self.tensors is not None:
            self.tensors.is_closed = True
        if self._between is not None:
            self._between.close()
        self.courier.close()
        self.transport.close()
        self.communicators.free()
