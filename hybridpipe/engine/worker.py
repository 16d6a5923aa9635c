"""Worker: what one rank holds while a plan runs, from communicators to optimizer, wired together.

Everything collective is a method here, called by all ranks in the same order; a rank that the plan
leaves unused takes part in the collectives and does nothing else.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.comm.groups import communicators
from hybridpipe.comm.idle import cores_to_spare
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.comm.transport import Pending
from hybridpipe.data.stream import Minibatch, Stream
from hybridpipe.engine import rank_state
from hybridpipe.engine.executor import Executor
from hybridpipe.engine.faulty import FaultyExecutor, FaultyTransport
from hybridpipe.engine.rank_state import NewState, RankState
from hybridpipe.health import failure, faults, preemption
from hybridpipe.model.sequential import stage_module, stage_of_keys
from hybridpipe.model.structure import Structure
from hybridpipe.model.tensors import TensorTree, overwrite
from hybridpipe.optim.gradient_sync import HorovodSync
from hybridpipe.optim.nonfinite import NonfiniteCheck
from hybridpipe.optim.update import Update, UpdateRule
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import forward_program, program
from hybridpipe.planning.schedules.instructions import Forward, RankProgram, without_update
from hybridpipe.planning.schedules.resume_point import ResumePoint, resumed_program
from hybridpipe.planning.timeline import Event
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.state import kept
from hybridpipe.stage.weights import sparse_parameters
from hybridpipe.types import Loss

# MPI counts in 32 bits: larger tensors move in parts.
PART_BYTES = 2**30


class PendingLosses:
    """Numbers, one for each microbatch, being brought from where they arose to every rank.

    Each has one contributor and the rest add zero, so the result is exact and the same on all ranks. One more
    says how many ranks were asked to stop.
    """

    def __init__(self, numbers: np.ndarray, shape: tuple[int, ...], pending: Pending) -> None:
        self._numbers, self._shape, self._pending = numbers, shape, pending

    def wait(self) -> np.ndarray:
        """The numbers, once they are there."""
        self._pending.wait()
        return self._numbers[:-1].reshape(self._shape)

    def total(self) -> float:
        """Add the losses up in the order of the microbatches: one float on all ranks and under all plans."""
        return float(sum(self.wait().tolist()))

    def ask_to_stop(self) -> bool:
        """Was any rank asked to stop when it gave its numbers? All ranks find the same."""
        self._pending.wait()
        return bool(self._numbers[-1])


class Worker:
    """One rank under a plan that fits model and world.

    Collective over `world`; the model's weights become those of rank 0.

    Args:
        progress_thread: of its transport.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss: Loss,
        rule: UpdateRule,
        world: MPI.Comm,
        device: torch.device,
        seed: int,
        progress_thread: bool,
    ) -> None:
        self.model, self.plan, self.device = model, plan, device
        self.flushes = not plan.is_asynchronous  # after each minibatch
        self.place = plan.place(world.rank)
        self.communicators = communicators(world, plan)
        self.control = self.communicators.control
        transport = FaultyTransport if faults.any_left() else MpiTransport
        peers, to_spare = self.communicators.peers, cores_to_spare(world)
        self.transport = transport(peers, to_spare, progress_thread, device)
        self._left = False
        _broadcast_state(model, self.control)
        self.executor = self._executor(loss, rule, seed)
        self._structure = Structure(model)
        self._settings = self._structure.settings()
        self._program = lru_cache(maxsize=8)(self._make_program)
        self._forward_program = lru_cache(maxsize=8)(self._make_forward_program)

    def _executor(self, loss: Loss, rule: UpdateRule, seed: int) -> Executor:
        plan, place, replicas = self.plan, self.place, self.communicators.replicas
        if place is None or replicas is None:
            return Executor(plan, None, self.device, [], [], None, Update(None))
        held = plan.held_stages(place)
        stages = [
            Stage(
                stage_module(self.model, plan.stages[s].start, plan.stages[s].stop),
                self.device,
                seed,
                loss if s == plan.num_stages - 1 else None,
                recompute=plan.recomputes(s),
                split_backward=plan.traits.splits_backward,
                join_products=plan.traits.batches_wgrad,
            )
            for s in held
        ]
        parameters: Sequence[Tensor] = [p for stage in stages for p in stage.module.parameters()]
        sync = None
        if replicas.size > 1:
            sparse = set().union(*(sparse_parameters(stage.module) for stage in stages))
            sync = HorovodSync(parameters, replicas, rule.compression, sparse)
            parameters = sync.owned
        pieces = (
            plan,
            place,
            self.device,
            stages,
            [PointToPoint(plan, s, self.transport, self.device) for s in held],
            sync,
            rule.build(parameters, plan, place.stage, self._add_up),
            NonfiniteCheck(rule.on_nonfinite, plan, place, stages, self._largest),
        )
        if isinstance(self.transport, FaultyTransport):
            return FaultyExecutor(*pieces, transport=self.transport, num_stages=plan.num_stages)
        return Executor(*pieces)

    def renew(self) -> None:
        """Take up what users have changed in the model since it was last used. Collective.

        Modes, hooks, and which parameters require grad; every rank has changed the same.

        Raises:
            ValueError: a module or a parameter was replaced.
        """
        self._structure.check()
        settings, before = self._structure.settings(), self._settings
        self._settings = settings
        if settings != before:
            self.executor.renew()

    def _make_program(self, num_microbatches: int, update: bool = True) -> RankProgram:
        if self.place is None:
            return RankProgram(())
        whole = program(self.plan, self.place, num_microbatches)
        return RankProgram(whole if update else without_update(whole))

    def _make_forward_program(self, num_microbatches: int) -> RankProgram:
        if self.place is None:
            return RankProgram(())
        return RankProgram(forward_program(self.plan, self.place, num_microbatches))

    def _rest_of_stream(self, num_microbatches: int, point: ResumePoint) -> RankProgram:
        if self.place is None:
            return RankProgram(())
        return RankProgram(resumed_program(self.plan, self.place, num_microbatches, point))

    def _add_up(self, number: float) -> float:
        """The sum over the stages; replicas have the same number."""
        used, replicas = self.communicators.used, self.communicators.replicas
        assert used is not None and replicas is not None
        total: float = used.allreduce(number if replicas.rank == 0 else 0.0)
        return total

    def _largest(self, number: int) -> int:
        """Over the ranks that update together: of all stages or, where those do not, the replicas."""
        together = self.communicators.replicas if self.plan.is_asynchronous else self.communicators.used
        assert together is not None
        if together.size == 1:
            return number
        found = np.array([number])
        request = together.Iallreduce(MPI.IN_PLACE, found, op=MPI.MAX)
        self.transport.watch(request, found, "whether to update", together.ranks).wait()
        return int(found[0])

    def forget_gradients(self) -> None:
        """Drop what is in `.grad`, as the zero_grad() before a minibatch of any loop does."""
        self.executor.update.forget_gradients()

    def note_flight(self, wanted: bool) -> None:
        """Keep, or not, what saving the microbatches in flight takes; set it before a stream begins."""
        if self.executor.stashed is not None:
            self.executor.stashed.notes_flight = wanted

    def train(
        self, minibatch: Minibatch, step: int, update: bool = True
    ) -> tuple[PendingLosses, list[Event]]:
        """Train on one minibatch, and flush.

        Args:
            update: False: add the gradients up, and leave the weights as they are.

        Returns:
            the shares of the loss, one for each microbatch, on their way to all ranks; this rank's events.
        """
        losses: dict[int, float] = {}
        events: list[Event] = []
        try:
            todo = self._program(len(minibatch.sizes), update)
            for done in self.executor.run(todo, Stream([minibatch], step)):
                losses, events = done.losses, done.events
            numbers = np.zeros(len(minibatch.sizes))
            numbers[list(losses)] = list(losses.values())
            return self.share(numbers), events
        except BaseException as error:  # which a caller may catch, while other ranks wait for messages
            failure.end_job_for(error)
            raise

    def stream(
        self, minibatches: Sequence[Minibatch], step: int, done: int = 0
    ) -> Iterator[tuple[list[PendingLosses], list[Event]]]:
        """Train on minibatches without a flush in between, under an asynchronous schedule.

        Yields, for each update of this rank, what `train` returns, with shares of the loss for each
        minibatch that the update was of. A rank that the plan leaves unused sees them one by one.

        Args:
            step: of the first minibatch.
            done: so many of them were trained on before, by a run whose state is this one's now.
        """
        stream = Stream(minibatches, step)
        numbers = [np.zeros(len(minibatch.sizes)) for minibatch in minibatches]
        ahead = deque(numbers[done:])
        with failure.guard(), self._to_its_end():
            rest = self._rest_of_stream(len(stream.sizes), ResumePoint(done, len(minibatches)))
            for update in self.executor.run(rest, stream, done):
                for m, loss in update.losses.items():
                    at = stream[m]
                    numbers[at.step - step][at.microbatch] = loss
                yield [self.share(ahead.popleft()) for _ in range(update.num_minibatches)], update.events
            while ahead:
                yield [self.share(ahead.popleft())], []

    def loads(self, sizes: Sequence[int], begin: int = 0, stream_start: int = 0) -> list[tuple[int, int]]:
        """Minibatch and microbatch, in order, of what this rank loads of an epoch that it trains on.

        Args:
            sizes: the microbatches of each minibatch.
            begin: the first minibatch that was not trained on before.
            stream_start: the first one of the stream, under an asynchronous schedule.
        """
        if self.flushes:
            whole = enumerate(sizes[begin:], begin)
            return [(i, m) for i, size in whole for m in self._loaded(self._program(size))]
        point = ResumePoint(begin - stream_start, len(sizes) - stream_start)
        rest = self._rest_of_stream(sum(sizes[stream_start:]), point)
        places = [(i, m) for i, size in enumerate(sizes[stream_start:], stream_start) for m in range(size)]
        return [places[m] for m in self._loaded(rest)]

    def loads_to_infer(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """As `loads`, of an epoch that it evaluates on."""
        return [(i, m) for i, size in enumerate(sizes) for m in self._loaded(self._forward_program(size))]

    def _loaded(self, program: RankProgram) -> list[int]:
        """The microbatches whose inputs or targets a program takes."""
        held, ends = self.executor.held, (0, self.plan.num_stages - 1)
        forwards = (each for each in program.instructions if isinstance(each, Forward))
        return [each.microbatch for each in forwards if held[each.chunk] in ends]

    def leave_stream(self) -> None:
        """Let the generator of `stream` be closed in the middle, at a resume point, by all ranks alike.

        Messages between them stay under way, so the worker can only be looked at afterwards.
        """
        self._left = True

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """Around a stream: several ranks cannot stop in its middle, each at another minibatch."""
        try:
            yield
        except GeneratorExit as left:
            if self._left:
                return  # the generator ends behind the context
            cause = left.__context__  # what the caller did not catch
            if self.control.size == 1:  # nothing is under way between two updates
                raise
            if isinstance(cause, SystemExit):
                raise cause from None
            raise RuntimeError(
                f"training was left in the middle of an epoch, which ranks cannot do under "
                f"{self.plan.schedule}: minibatches are under way between them"
            ) from cause

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """This rank's layers in evaluation mode; afterwards each is in the mode that it was in."""
        stages = self.executor.stages
        modes = [(module, module.training) for stage in stages for module in stage.module.modules()]
        for stage in stages:
            stage.module.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def infer(
        self,
        minibatch: Minibatch,
        microbatch_metrics: Callable[[TensorTree, TensorTree], list[float]],
        width: int,
        number: int,
    ) -> PendingLosses:
        """Run one minibatch; `microbatch_metrics(outputs, targets)` gives `width` numbers for a microbatch.

        Args:
            number: of the minibatch in the evaluation.

        Returns:
            shape (num_microbatches, width), on their way to all ranks.
        """
        numbers = np.zeros((len(minibatch.sizes), width))

        def note(microbatch: int, outputs: TensorTree, targets: TensorTree) -> None:
            numbers[microbatch] = microbatch_metrics(outputs, targets)

        with failure.guard():
            self.executor.infer(self._forward_program(len(minibatch.sizes)), minibatch, note, number)
            return self.share(numbers)

    def share(self, numbers: np.ndarray) -> PendingLosses:
        """Add `numbers` up over all ranks, in the background."""
        carried = np.append(numbers, float(preemption.state.stop_requested))
        request = self.control.Iallreduce(MPI.IN_PLACE, carried, op=MPI.SUM)
        return PendingLosses(
            carried, numbers.shape, self.transport.watch(request, carried, "sum of the losses")
        )

    def average_statistics(self) -> None:
        """Let the replicas of a stage agree on their normalisation layers' statistics.

        In training each replica sees its own microbatches only.
        """
        replicas = self.communicators.replicas
        if replicas is None or replicas.size == 1:
            return

        def add_up(tensor: Tensor) -> Tensor:
            total = tensor.clone()
            replicas.Allreduce(MPI.IN_PLACE, total.numpy(), op=MPI.SUM)
            return total

        def of_first(tensor: Tensor) -> Tensor:
            sent = tensor.clone()
            replicas.Bcast(sent.numpy(), 0)
            return sent

        self.executor.statistics.agree(add_up, of_first)

    def state_dict(self, point: ResumePoint) -> RankState:
        """Return this rank's state at a resume point; its tensors are those that training works on."""
        return rank_state.take(self.executor, self.plan, point)

    def load_state(self, state: NewState) -> None:
        """Let this rank's state be `state`."""
        rank_state.put(self.executor, state)

    def not_split(self) -> list[str] | None:
        """The trained modules whose backward is whole under zero-bubble; None on other ranks than 0.

        Collective.
        """
        if not self.plan.traits.splits_backward:
            return []
        held = zip(self.executor.held, self.executor.stages, strict=True)
        gathered = self.control.gather([(s, stage.not_split) for s, stage in held])
        if gathered is None:
            return None
        by_stage = dict(each for ranks_own in gathered for each in ranks_own)  # replicas say the same
        return [name for s in sorted(by_stage) for name in by_stage[s]]

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """On rank 0 the whole model's state as it is now, on the CPU; None elsewhere."""
        self.average_statistics()
        stage_of = stage_of_keys(self.model, self.plan)
        state = {}
        for key, tensor in self.model.state_dict().items():
            rank = self.plan.stages[stage_of[key]].ranks[0]
            values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            if rank != 0 and self.control.rank == rank:
                for part in _parts(values):
                    self.control.Send([part, MPI.BYTE], 0)
            elif rank != 0 and self.control.rank == 0:
                for part in _parts(values):
                    self.control.Recv([part, MPI.BYTE], rank)
            state[key] = values
        return state if self.control.rank == 0 else None

    def close(self) -> None:
        """End what communicates in the background and give back the communicators. Collective.

        Not after `leave_stream`: what is under way would be waited for. The process is about to end then.
        """
        if self._left and self.control.size > 1:
            return
        if self.executor.sync is not None:
            self.executor.sync.close()
        self.transport.close()
        self.communicators.free()


def _broadcast_state(model: nn.Module, control: MPI.Comm) -> None:
    """Every rank starts from rank 0's weights and buffers, whatever each rank's model was initialised with.

    All buffers, those that no state_dict has, too.
    """
    for tensor in kept(model).values():
        values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        for part in _parts(values):
            control.Bcast([part, MPI.BYTE], 0)
        overwrite(tensor, values)


def _parts(tensor: Tensor) -> list[np.ndarray]:
    """The bytes of a contiguous CPU tensor, sharing its memory."""
    whole = tensor.reshape(-1).view(torch.uint8).numpy()
    return [whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES)]
