"""Executor: translates one rank's program into calls, and records when each instruction ran.

The only place where a schedule's data becomes action. Decides nothing: the program says what comes next, the
plan which weights a microbatch sees and who the peers are, the transport how bytes move.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.comm.status import Doing, rank_status
from hybridpipe.data.stream import Minibatch, Stream
from hybridpipe.device import clock_of
from hybridpipe.engine.stashed_weights import StashedWeights
from hybridpipe.model.rng import preserved_state
from hybridpipe.model.tensors import TensorTree, map_tensors
from hybridpipe.optim.gradient_sync import GradientSync
from hybridpipe.optim.nonfinite import NonfiniteCheck
from hybridpipe.optim.update import Update
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.instructions import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Load,
    Part,
    Products,
    RankProgram,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Step,
)
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.planning.timeline import Event
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.statistics import RunningStatistics
from hybridpipe.stage.weights import Weights

Gradient = Sequence[torch.Tensor | None]
OnOutputs = Callable[[int, TensorTree, TensorTree], None]


class UpdateResult(NamedTuple):
    """All that has come in since the update before.

    Args:
        losses: the share of the loss of each microbatch that ended here; on the last stage's ranks only.
        events: in seconds of this host's monotonic clock.
        num_minibatches: number of minibatches behind the update; 0 without one.
    """

    losses: dict[int, float]
    events: list[Event]
    num_minibatches: int


class Executor:
    """Runs programs for the rank at `place`. A rank that the plan leaves unused holds no stage.

    Args:
        stages, p2p: one for each stage that the rank holds, by chunk.
        sync: sums gradients over the stage's replicas; None where there is one.
        update: the optimizer of all its stages.
        check: looks for NaN and infinity before an update; None: nothing does.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place | None,
        device: torch.device,
        stages: Sequence[Stage],
        p2p: Sequence[PointToPoint],
        sync: GradientSync | None,
        update: Update,
        check: NonfiniteCheck | None = None,
    ) -> None:
        self.place, self.held = place, () if place is None else plan.held_stages(place)
        self.device, self.stages, self.p2p = device, stages, p2p
        self.sync, self.update, self.check = sync, update, check
        self.clock = clock_of(device)
        self.defers_wgrad = [plan.defers_wgrad(s) for s in self.held]
        self.statistics = RunningStatistics(stage.module for stage in stages)
        self.stashed: StashedWeights | None = None
        if plan.is_asynchronous and place is not None:
            self.stashed = StashedWeights(plan, place, stages[0].module, self.statistics)

    def renew(self) -> None:
        """Take up what has changed in the layers since the last run. Collective over the stage's replicas."""
        for stage, p2p in zip(self.stages, self.p2p, strict=True):
            stage.renew()
            p2p.forget()
        if self.sync is not None:
            self.sync.renew()
        if self.stashed is not None:
            self.stashed.renew()

    @property
    def num_skipped(self) -> int:
        """Updates left out so far, because a number was not finite."""
        return 0 if self.check is None else self.check.num_skipped

    @property
    def bytes_sent(self) -> int:
        """Activations and gradients sent so far."""
        return sum(each.bytes_sent for each in self.p2p)

    @property
    def bytes_reduced(self) -> int:
        """Gradients handed to the all-reduce so far."""
        return 0 if self.sync is None else self.sync.bytes_reduced

    def run(self, program: RankProgram, stream: Stream, done: int = 0) -> Iterator[UpdateResult]:
        """Train on a stream; yields after each update, and at the end if anything came after the last.

        Args:
            done: number of minibatches of the stream that are in the weights already, and not in `program`.
        """
        for each in self.p2p:
            each.begin(program.instructions, stream.sizes, stream.step, training=True)
        run = self.begin(stream, done)
        for part in program.parts:
            self._execute(run, program, part)
            if part.num_minibatches:
                yield run.take()
                run.now = self.clock()
        for stage in self.stages:
            stage.complete_gradients()
        run.end()
        if run.events:
            yield run.take()

    def begin(self, stream: Stream, done: int) -> "ProgramRun":
        """Start the run of a program over a stream."""
        kind = ProgramRun if self.stashed is None else StashedRun
        return kind(self, stream, done)

    def infer(self, program: RankProgram, minibatch: Minibatch, on_outputs: OnOutputs, number: int) -> None:
        """Run the forwards of `program` without a graph; the last stage hands its outputs to `on_outputs`.

        Args:
            number: of the minibatch in the evaluation; random draws follow from it.
        """
        for each in self.p2p:
            each.begin(program.instructions, minibatch.sizes, step=0, training=False)
        run = InferenceRun(self, minibatch, on_outputs, number)
        for part in program.parts:
            self._execute(run, program, part)

    def _execute(self, run: "ProgramRun", program: RankProgram, part: Part) -> None:
        """Run the instructions up to the next update; layers seed the process's generators."""
        python_too = any(stage.draws_from_python for stage in self.stages)
        run.minibatches_due = part.num_minibatches
        with preserved_state(self.device, python_too):
            for i in part.range:
                run.do(program.instructions[i], i in program.finals)
        rank_status.doing = rank_status.doing._replace(instruction=None)

    def to_device(self, value: TensorTree) -> TensorTree:
        """Move the value to where this rank computes."""
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), value)


class ProgramRun:
    """A program under way: what is between two instructions, by (microbatch, chunk)."""

    weights: Weights | None = None  # to call the layers with; None: their own parameters

    def __init__(self, executor: Executor, stream: Stream, done: int = 0) -> None:
        self.executor, self.stream = executor, stream
        self.step: int | None = stream.step + done  # for reports; None in an evaluation
        self.values: dict[tuple[int, int], TensorTree] = {}
        self.gradients: dict[tuple[int, int], Gradient] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.unchecked: dict[int, torch.Tensor] = {}  # losses that no update is made of so far
        self.events: list[Event] = []
        self.is_final = False  # the last backward of a chunk before its gradients are used
        self.minibatches_due = 0  # in the next update
        self.applied = 0  # minibatches, since `take`
        self.covered = done  # minibatches, by all updates
        self.now = executor.clock()

    def do(self, instruction: Instruction, is_final: bool) -> None:
        """Run one instruction."""
        stage = self.executor.held[getattr(instruction, "chunk", 0)]
        rank_status.doing = Doing(stage, self.step, instruction)
        if is_final:
            self.finally_do(instruction)
        else:
            self.handle(instruction)
        self.note(instruction)

    def handle(self, instruction: Instruction) -> None:
        """Call the method of the instruction's kind."""
        getattr(self, _HANDLERS[type(instruction)])(instruction)

    def finally_do(self, instruction: Instruction) -> None:
        """Run the last backward before the gradients are used: each is final as it arrives."""
        sync, self.is_final = self.executor.sync, True
        if sync is not None:
            sync.begin_final_backward()
        self.handle(instruction)
        if sync is not None:
            sync.end_final_backward()
        self.is_final = False

    def note(self, instruction: Instruction | Load | Products) -> None:
        """Record that it took from the end of the event before until now."""
        began, self.now = self.now, self.executor.clock()
        self.events.append(Event(instruction, began, self.now))

    def take(self) -> UpdateResult:
        """Return what has come in since the last call."""
        result = UpdateResult({m: loss.item() for m, loss in self.losses.items()}, self.events, self.applied)
        self.losses, self.events, self.applied = {}, [], 0
        return result

    def end(self) -> None:
        """The program is done; no microbatch is under way."""

    def receive_activation(self, instruction: ReceiveActivation) -> None:
        m, c = instruction.microbatch, instruction.chunk
        self.values[m, c] = self.executor.p2p[c].receive_activation(m)

    def send_activation(self, instruction: SendActivation) -> None:
        m, c = instruction.microbatch, instruction.chunk
        self.executor.p2p[c].send_activation(m, self.values.pop((m, c)))

    def receive_gradient(self, instruction: ReceiveGradient) -> None:
        m, c = instruction.microbatch, instruction.chunk
        self.gradients[m, c] = self.executor.p2p[c].receive_gradient(m)

    def send_gradient(self, instruction: SendGradient) -> None:
        m, c = instruction.microbatch, instruction.chunk
        self.executor.p2p[c].send_gradient(m, self.gradients.pop((m, c)))

    def forward(self, instruction: Forward) -> None:
        m, c = instruction.microbatch, instruction.chunk
        stage, at = self.executor.stages[c], self.stream[m]
        self.step = at.step
        held = self.executor.held[c]
        inputs = self.values.pop((m, c)) if held else self.executor.to_device(at.inputs)
        targets = None if stage.loss is None else self.executor.to_device(at.targets)
        if not held or targets is not None:
            self.note(Load(m, c))
        if targets is None:
            self.values[m, c] = stage.forward(at.microbatch, inputs, at.step, self.weights, slot=m)
        else:
            share = at.share, at.step, self.weights
            loss = stage.forward_loss(at.microbatch, inputs, targets, *share, slot=m)
            if not loss.requires_grad:
                raise ValueError(
                    "the loss depends on nothing that is trained: the outputs were detached or made under "
                    "torch.no_grad(), or the loss is a constant"
                )
            self.losses[m] = self.unchecked[m] = loss.detach()
        if not c:  # each of a rank's stages sees the same samples
            self.executor.statistics.num_samples += self.stream.sizes[m]

    def backward(self, instruction: Backward) -> None:
        m, c = instruction.microbatch, instruction.chunk
        completes = self.is_final and not self.executor.defers_wgrad[c]
        gradients = self.executor.stages[c].backward(m, self.gradients.pop((m, c), ()), completes)
        if self.executor.held[c]:  # else no stage is before it
            self.gradients[m, c] = gradients

    def backward_input(self, instruction: BackwardInput) -> None:
        m, c = instruction.microbatch, instruction.chunk
        gradients = self.executor.stages[c].backward_input(m, self.gradients.pop((m, c), ()))
        if self.executor.held[c]:
            self.gradients[m, c] = gradients

    def backward_weight(self, instruction: BackwardWeight) -> None:
        self.executor.stages[instruction.chunk].backward_weight(instruction.microbatch)

    def all_reduce(self, _: AllReduce) -> None:
        for stage in self.executor.stages:  # no other rank waits for this one now
            if stage.keeps_back:
                stage.complete_gradients()
                self.note(Products())
        if self.executor.sync is not None:
            self.executor.sync.finish()

    def update(self, instruction: Step) -> None:
        count, check, step = instruction.num_minibatches, self.executor.check, self.stream.step + self.covered
        covered = [m for m in self.unchecked if self.stream[m].step < step + count]  # others are ahead
        losses = {m: self.unchecked.pop(m) for m in covered}
        if check is None or check.allows(losses, self.stream, step):
            self.executor.update.step(count)
        else:  # a version like the one before: the numbers of versions stay those of the plan
            self.executor.update.leave_out(count)
        self.applied += count
        self.covered += count


_HANDLERS: dict[type[Instruction], str] = {
    ReceiveActivation: "receive_activation",
    Forward: "forward",
    SendActivation: "send_activation",
    ReceiveGradient: "receive_gradient",
    Backward: "backward",
    BackwardInput: "backward_input",
    BackwardWeight: "backward_weight",
    SendGradient: "send_gradient",
    AllReduce: "all_reduce",
    Step: "update",
}


class StashedRun(ProgramRun):
    """A run whose microbatches see stashed weights. Source: weight stashing, PipeDream (SOSP 2019)."""

    def __init__(self, executor: Executor, stream: Stream, done: int = 0) -> None:
        super().__init__(executor, stream, done)
        assert executor.stashed is not None
        self.stashed = executor.stashed
        self.stashed.begin(ResumePoint(done, len(stream.minibatches)))

    def forward(self, instruction: Forward) -> None:
        self.weights = self.stashed.of(instruction.microbatch)
        super().forward(instruction)
        self.weights = None  # only a microbatch in flight keeps a version alive
        self.stashed.ran(instruction.microbatch)

    def finally_do(self, instruction: Instruction) -> None:
        assert isinstance(instruction, Backward)
        with self.stashed.handing_over(instruction.microbatch, 1 / self.minibatches_due):
            super().finally_do(instruction)

    def backward(self, instruction: Backward) -> None:
        super().backward(instruction)
        self.stashed.collect(instruction.microbatch, 1 / self.minibatches_due)

    def update(self, instruction: Step) -> None:
        with self.stashed.update():
            super().update(instruction)

    def end(self) -> None:
        self.stashed.end()


class InferenceRun(ProgramRun):
    """A run of forwards without a graph."""

    def __init__(self, executor: Executor, minibatch: Minibatch, on_outputs: OnOutputs, number: int) -> None:
        super().__init__(executor, Stream([minibatch], -1 - number))
        self.on_outputs, self.step = on_outputs, None

    def note(self, instruction: Instruction | Load | Products) -> None:
        """An evaluation records no events."""

    def forward(self, instruction: Forward) -> None:
        m, c = instruction.microbatch, instruction.chunk
        stage, at = self.executor.stages[c], self.stream[m]
        inputs = self.values.pop((m, c)) if self.executor.held[c] else self.executor.to_device(at.inputs)
        outputs = stage.infer(m, inputs, at.step)
        if stage.loss is None:
            self.values[m, c] = outputs
        else:
            self.on_outputs(m, outputs, self.executor.to_device(at.targets))
