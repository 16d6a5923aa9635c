"""Executor: translates one rank's program into calls, and records when each instruction ran.

The program gives the order, the plan the peers and the versions of weights, the transport moves the bytes.
Invariant: the executor decides nothing; no other module turns a schedule's data into action.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.comm.status import Doing, rank_status
from hybridpipe.data.stream import Minibatch, Stream, StreamedMicrobatch
from hybridpipe.device import Lanes
from hybridpipe.engine.loss_weights import EQUAL, LossWeights
from hybridpipe.engine.splitting import whole_gradients
from hybridpipe.engine.stashed_weights import StashedWeights
from hybridpipe.model.rng import preserved_state
from hybridpipe.model.tensors import TensorTree, Tree, handed_over, map_tensors
from hybridpipe.optim.centre import Centre
from hybridpipe.optim.gradient_sync import GradientSync
from hybridpipe.optim.loss_scale import UNSCALED, LossScale, LossScales
from hybridpipe.optim.nonfinite import NonfiniteCheck
from hybridpipe.optim.shared_gradients import SharedGradients
from hybridpipe.optim.shares import ReplicaShares
from hybridpipe.optim.update import Update
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
    Load,
    Products,
    ProgramPart,
    RankProgram,
    ReceiveActivation,
    ReceiveGradient,
    ReduceScatter,
    Reduction,
    SendActivation,
    SendGradient,
    Step,
)
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.planning.timeline import TimedEvent
from hybridpipe.stage.losses import LossSum, MicrobatchLoss, summed
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.statistics import RunningStatistics
from hybridpipe.stage.tensor_split import TensorSplit
from hybridpipe.stage.weights import Weights

Gradient = Sequence[torch.Tensor | None]
OnOutputs = Callable[[int, Tree, Tree], None]  # microbatch, outputs, targets


class UpdateResult(NamedTuple):
    """Losses and events since the update before.

    Args:
        losses: each microbatch's loss, by microbatch; on last-stage ranks only.
        events: in seconds of this host's monotonic clock.
        num_minibatches: number of minibatches behind the update; 0 if no update was made.
        skipped: True if the update was skipped, since a number was not finite.
    """

    losses: dict[int, LossSum]
    events: list[TimedEvent]
    num_minibatches: int
    skipped: bool = False


class RankParts(NamedTuple):
    """The parts with which the rank at `place` runs programs; one that the plan leaves unused has no stage.

    Args:
        lanes: of the rank's device.
        update: the optimizer of all stages that the rank holds.
        stages, p2p: one of each for every stage that the rank holds, by chunk.
        sync: sums gradients over the stage's replicas; None if the stage has one replica.
        check: looks for NaN and infinity before an update; None leaves gradients unchecked.
        shared: sums gradients over the stages that share a parameter; None if no other rank's stage does.
        loss_weights: the factor on gradients where losses are (sum, weight); None: those of one rank.
        scales: of the losses of minibatches in flight; None: the scale is that of `update`, or there is none.
        shares: what each of the stage's replicas updates; None: everything.
        tensors: modules that the rank has in parts, as a shard; None: all are whole.
        centre: the weights in common with other groups; None: there is one group, or nothing is trained.
    """

    plan: Plan
    place: Place | None
    lanes: Lanes
    update: Update
    stages: Sequence[Stage] = ()
    p2p: Sequence[PointToPoint] = ()
    sync: GradientSync | None = None
    check: NonfiniteCheck | None = None
    shared: SharedGradients | None = None
    loss_weights: LossWeights | None = None
    scales: LossScales | None = None
    shares: ReplicaShares | None = None
    tensors: TensorSplit | None = None
    centre: Centre | None = None


class Executor:
    """Runs programs with a rank's parts."""

    def __init__(self, parts: RankParts) -> None:
        plan, self.place, stages = parts.plan, parts.place, parts.stages
        self.held = () if self.place is None else plan.held_stages(self.place)
        self.lanes, self.device, self.stages, self.p2p = parts.lanes, parts.lanes.device, stages, parts.p2p
        self.sync, self.update, self.check, self.shared = parts.sync, parts.update, parts.check, parts.shared
        self.loss_weights = parts.loss_weights or LossWeights(plan)
        self.scales, self.shares, self.tensors = parts.scales, parts.shares, parts.tensors
        self.centre = parts.centre
        # Other shards have the same losses and outputs.
        self.counts = self.place is None or not self.place.shard
        # The chunks behind and before each one that lie on this rank, and so exchange without a message.
        self.behind = [plan.chunk_of(s + 1) if plan.hands_over(s) else None for s in self.held]
        self.before = [plan.chunk_of(s - 1) if plan.hands_over(s - 1) else None for s in self.held]
        self.defers_wgrad = [plan.defers_wgrad(s) for s in self.held]
        together = [plan.stages[s].sync_batchnorm for s in self.held]
        self.statistics = RunningStatistics([stage.module for stage in stages], together)
        self.forms: list[Callable[[int], int]] = []  # of the present run, by chunk
        self.stashed: StashedWeights | None = None
        if plan.is_asynchronous and self.place is not None:
            layers = stages[0].layers
            predict = partial(parts.update.predicted, plan.prediction) if plan.predicts_weights else None
            self.stashed = StashedWeights(
                plan, self.place, layers.module, self.statistics, layers.precision, predict
            )

    def renew(self) -> None:
        """Adopt the layers' present modes, hooks and requires_grad. Collective over the stage's replicas."""
        for stage, p2p in zip(self.stages, self.p2p, strict=True):
            stage.renew()
            p2p.forget_specs()
        if self.sync is not None:
            self.sync.renew()
        if self.stashed is not None:
            self.stashed.renew()

    @property
    def num_skipped(self) -> int:
        """Number of updates skipped so far because a number was not finite."""
        return 0 if self.check is None else self.check.num_skipped

    def run(self, program: RankProgram, stream: Stream, done: int = 0) -> Iterator[UpdateResult]:
        """Train on a stream; yields after each update, and at the end if events follow the last one.

        Args:
            done: number of the stream's first minibatches that earlier updates cover; `program` leaves
                them out.
        """
        self._begin(program, stream, stream.step, training=True)
        run = self.new_run(stream, done)
        for part in program.parts:
            self._execute(run, program, part)
            if part.num_minibatches:
                yield run.take_result()
                run.begin_update()
        for stage, p2p in zip(self.stages, self.p2p, strict=True):
            stage.complete_gradients()
            p2p.end()
        self.forms = []  # they hold the microbatches, whose samples processes may hold
        run.end()
        if run.marks:
            yield run.take_result()

    def new_run(self, stream: Stream, done: int) -> "ProgramRun":
        """Return a new run of a program over a stream."""
        kind = ProgramRun if self.stashed is None else StashedRun
        return kind(self, stream, done)

    def infer(self, program: RankProgram, minibatch: Minibatch, on_outputs: OnOutputs, number: int) -> None:
        """Run the forwards of `program` without a graph; the last stage hands its outputs to `on_outputs`.

        Args:
            number: index of the minibatch in the evaluation; a part of the random key.
        """
        stream = Stream([minibatch], -1 - number)
        self._begin(program, stream, step=0, training=False)
        run = InferenceRun(self, stream, on_outputs)
        for part in program.parts:
            self._execute(run, program, part)
        for p2p in self.p2p:
            p2p.end()
        self.forms = []

    def _begin(self, program: RankProgram, stream: Stream, step: int, training: bool) -> None:
        self.forms = [cache(partial(_form, stage, stream, training)) for stage in self.stages]
        for stage, form, p2p in zip(self.stages, self.forms, self.p2p, strict=True):
            stage.begin(len(stream.sizes))
            p2p.begin(program.instructions, form, step, training)

    def _execute(self, run: "ProgramRun", program: RankProgram, part: ProgramPart) -> None:
        """Run the instructions of one part, and preserve the random state, since layers seed generators."""
        python_too = any(stage.draws_from_python for stage in self.stages)
        run.minibatches_due = part.num_minibatches
        with preserved_state(self.device, python_too):
            for i in part.range:
                run.do(program.instructions[i], i in program.finals)
        rank_status.doing = rank_status.doing._replace(instruction=None)

    def to_device(self, tree: Tree) -> Tree:
        """Move a tree's tensors to this rank's device."""
        return map_tensors(self.lanes.load, tree)


def _form(stage: Stage, stream: Stream, training: bool, microbatch: int) -> int:
    at = stream[microbatch]
    inputs = partial(at.minibatch.inputs, at.microbatch)
    return stage.layers.form(stream.sizes[microbatch], inputs, training)


def _drop(at: StreamedMicrobatch) -> None:
    """Say that a microbatch's tensors are used no more on this rank."""
    if at.minibatch.drop is not None:
        at.minibatch.drop(at.microbatch)


class ProgramRun:
    """A running program; it holds values and gradients between instructions, by (microbatch, chunk)."""

    training = True
    weights: Weights | None = None  # the layers are called with these; None: with their own parameters

    def __init__(self, executor: Executor, stream: Stream, done: int = 0) -> None:
        self.executor, self.stream = executor, stream
        self.step: int | None = stream.step + done  # for reports; None in an evaluation
        self.values: dict[tuple[int, int], TensorTree] = {}
        self.gradients: dict[tuple[int, int], Gradient] = {}
        self.losses: dict[int, MicrobatchLoss] = {}
        self.unchecked: dict[int, MicrobatchLoss] = {}  # losses that no update covers so far
        self.is_final = False  # True in the last backward of a chunk before its gradients are used
        self.minibatches_due = 0  # number of minibatches in the next update
        self.applied = 0  # number of minibatches in updates since the last `take_result`
        self.skipped = False  # True if the update since then was skipped
        self.covered = done  # number of minibatches in all updates so far
        self.marks: list[tuple[Instruction | Load | Products, Any]] = []  # ends of instructions so far
        self.begin_update()

    def begin_update(self) -> None:
        """Mark the beginning of the next instruction."""
        self.began = self.executor.lanes.mark()

    def do(self, instruction: Instruction, is_final: bool) -> None:
        """Run one instruction; `is_final` marks a chunk's last backward before its gradients are used."""
        stage = self.executor.held[getattr(instruction, "chunk", 0)]
        rank_status.doing = Doing(stage, self.step, instruction)
        if is_final:
            self.do_final(instruction)
        else:
            self.handle(instruction)
        self.note(instruction)

    def handle(self, instruction: Instruction) -> None:
        """Call the handler of the instruction's kind."""
        getattr(self, _HANDLERS[type(instruction)])(instruction)

    def do_final(self, instruction: Instruction) -> None:
        """Run the last backward before the gradients are used: each gradient is final as it arrives."""
        sync, self.is_final = self.executor.sync, True
        if self.executor.shared is not None:
            self.executor.shared.begin()
        if sync is not None:
            sync.begin_final_backward()
        self.handle(instruction)
        if sync is not None:
            sync.end_final_backward()
        self.is_final = False

    def note(self, instruction: Instruction | Load | Products) -> None:
        """Mark the end of an instruction, which began at the end of the one before."""
        self.marks.append((instruction, self.executor.lanes.mark()))

    def take_result(self) -> UpdateResult:
        """Return losses and events since the last call; waits until their work is done."""
        result = UpdateResult(
            summed(self.losses, self.stream.sizes), self._events(), self.applied, self.skipped
        )
        self.losses, self.marks, self.applied, self.skipped = {}, [], 0, False
        return result

    def _events(self) -> list[TimedEvent]:
        """Return the events between the marks, whose times are read only now."""
        seconds = self.executor.lanes.seconds([self.began, *(mark for _, mark in self.marks)])
        each = zip(self.marks, seconds, seconds[1:], strict=False)
        return [TimedEvent(instruction, began, end) for (instruction, _), began, end in each]

    def scale_of(self, minibatch: int) -> LossScale:
        """Return the scale of a minibatch's loss."""
        return self.executor.update.loss_scale

    def end(self) -> None:
        """End the run; no microbatch is in flight."""

    def receive_activation(self, instruction: ReceiveActivation) -> None:
        """Wait for the microbatch's input and hold it for the forward."""
        m, c = instruction.microbatch, instruction.chunk
        self.values[m, c] = self.executor.p2p[c].receive_activation(m)

    def send_activation(self, instruction: SendActivation) -> None:
        """Start sending the forward's output to the next stage."""
        m, c = instruction.microbatch, instruction.chunk
        self.executor.p2p[c].send_activation(m, self.values.pop((m, c)))
        if c == len(self.executor.stages) - 1:
            _drop(self.stream[m])

    def receive_gradient(self, instruction: ReceiveGradient) -> None:
        """Wait for the gradients of the output and hold them for the backward."""
        m, c = instruction.microbatch, instruction.chunk
        self.gradients[m, c] = self.executor.p2p[c].receive_gradient(m)

    def send_gradient(self, instruction: SendGradient) -> None:
        """Start sending the gradients of the input to the stage before."""
        m, c = instruction.microbatch, instruction.chunk
        self.executor.p2p[c].send_gradient(m, self.gradients.pop((m, c)))

    def forward(self, instruction: Forward) -> None:
        """Run the layers on one microbatch; the last stage computes its loss."""
        m, c = instruction.microbatch, instruction.chunk
        stage, at = self.executor.stages[c], self.stream[m]
        step = self.step = at.step
        received, inputs = self.values.pop((m, c), None), self.inputs_of(instruction)
        targets = None if stage.loss is None else self.executor.to_device(at.minibatch.targets(at.microbatch))
        if inputs is not None or targets is not None:
            self.note(Load(m, c))
        weights, form = self.weights, self.executor.forms[c](m)
        if targets is None:
            self.pass_on(m, c, stage.forward(at.microbatch, received, step, weights, m, inputs, form))
        else:
            samples, scale = at.minibatch_samples, self.scale_of(step).value
            loss = stage.forward_loss(
                at.microbatch, received, targets, at.share, step, weights, m, inputs, samples, form, scale
            )
            self._check_loss(loss, at.share)
            self.note_made(loss.value)
            self.unchecked[m] = loss
            if self.executor.counts:
                self.losses[m] = loss
            _drop(at)
        if not c:  # each of a rank's stages sees the same samples
            self.executor.statistics.num_samples += self.stream.sizes[m]

    def note_made(self, made: TensorTree) -> None:
        """Let shards compare what each of them has made alike, at their first update."""
        if self.executor.tensors is not None:
            self.executor.tensors.note(made)

    def _check_loss(self, loss: MicrobatchLoss, share: float) -> None:
        """Raise ValueError if the loss depends on nothing that is trained, or as `LossWeights.check`."""
        if not loss.value.requires_grad:
            raise ValueError(
                "the loss depends on nothing that is trained: the outputs were detached or made under "
                "torch.no_grad(), or the loss is a constant"
            )
        weights = self.executor.loss_weights
        if loss.weight is not None or not weights.are_means:
            weights.check(loss, share, updates=self.minibatches_due > 0)

    def inputs_of(self, instruction: Forward) -> Tree:
        """Load the model's inputs for one microbatch; None where the stage needs none."""
        if not self.executor.stages[instruction.chunk].layers.needs_inputs(self.training):
            return None
        at = self.stream[instruction.microbatch]
        return self.executor.to_device(at.minibatch.inputs(at.microbatch))

    def pass_on(self, m: int, c: int, outputs: TensorTree) -> None:
        """Hold a chunk's outputs for their send, or as the inputs of the chunk behind it on this rank."""
        self.note_made(outputs)
        behind = self.executor.behind[c]
        if behind is None:
            self.values[m, c] = outputs
        else:
            self.values[m, behind] = handed_over(outputs)

    def pass_back(self, m: int, c: int, gradients: Gradient) -> None:
        """Hold the gradients of a chunk's inputs for their send, or for the chunk before it on this rank."""
        before = self.executor.before[c]
        if self.executor.held[c]:  # stage 0 has no stage before it
            self.gradients[m, c if before is None else before] = gradients

    def backward(self, instruction: Backward) -> None:
        """Run a microbatch's whole backward and hold the gradients of its input."""
        m, c = instruction.microbatch, instruction.chunk
        completes = self.is_final and not self.executor.defers_wgrad[c]
        self.pass_back(m, c, self.executor.stages[c].backward(m, self.gradients.pop((m, c), ()), completes))

    def backward_input(self, instruction: BackwardInput) -> None:
        """Run the input half of a split backward and hold the gradients of the microbatch's input."""
        m, c = instruction.microbatch, instruction.chunk
        self.pass_back(m, c, self.executor.stages[c].backward_input(m, self.gradients.pop((m, c), ())))

    def backward_weight(self, instruction: BackwardWeight) -> None:
        """Run the weight half of a split backward."""
        self.executor.stages[instruction.chunk].backward_weight(instruction.microbatch)

    def join_forward(self, instruction: JoinForward) -> None:
        """Take part in the forward of other replicas, where this rank has no microbatch."""
        self.executor.stages[instruction.chunk].join_forward(instruction.microbatch)

    def join_backward(self, instruction: JoinBackward) -> None:
        """Run the backward of `join_forward`."""
        self.executor.stages[instruction.chunk].join_backward(instruction.microbatch)

    def reduce(self, instruction: Reduction) -> None:
        """Compute the deferred weight gradients, then sum all gradients over replicas and other holders."""
        for stage in self.executor.stages:  # here, where no other stage waits for this rank
            if stage.has_deferred_wgrad:
                stage.complete_gradients()
                self.note(Products())
            for experts in stage.experts if instruction.completes else ():
                experts.add_missing_gradients()
        if self.executor.sync is not None:
            self.executor.sync.finish(instruction.completes)
        if self.executor.shared is not None and instruction.completes:
            self.executor.shared.exchange()
        if self.executor.shares is not None and instruction.completes:
            self.executor.shares.take()

    def update(self, instruction: Step) -> None:
        """Apply the gradients, or skip the update where the check finds a number that is not finite."""
        count, step = instruction.num_minibatches, self.stream.step + self.covered
        check, update = self.executor.check, self.executor.update
        if self.executor.tensors is not None:
            gradients = partial(whole_gradients, self.executor.stages, self.executor.shares)
            self.executor.tensors.check_once(gradients)
        covered = [m for m in self.unchecked if self.stream[m].step < step + count]  # later ones wait
        losses = {m: self.unchecked.pop(m) for m in covered}
        weights = self.executor.loss_weights
        mine = losses if self.executor.counts else {}
        weighed = EQUAL if weights.are_all_means else weights.weigh(mine, self.stream.sizes)
        update.scale(weighed.factor)
        values = {m: loss.value for m, loss in losses.items()}
        scale = max(map(self.scale_of, range(step, step + count)))
        if check is None or check.allows(values, self.stream, step, weighed.has_weight, scale):
            if self.executor.shares is not None:
                self.executor.shares.adopt()
            update.step(count)
        else:  # counts as an update, so that versions keep the plan's numbers
            update.skip(count)
            self.skipped = True
        if self.executor.centre is not None:
            self.executor.centre.after(update.num_minibatches, count)
        self.applied += count
        self.covered += count

    def all_gather(self, _: AllGather) -> None:
        """Give the stage's replicas the weights that this one has updated, and take theirs."""
        assert self.executor.shares is not None
        self.executor.shares.gather()


_HANDLERS: dict[type[Instruction], str] = {
    ReceiveActivation: "receive_activation",
    Forward: "forward",
    SendActivation: "send_activation",
    ReceiveGradient: "receive_gradient",
    Backward: "backward",
    BackwardInput: "backward_input",
    BackwardWeight: "backward_weight",
    JoinForward: "join_forward",
    JoinBackward: "join_backward",
    SendGradient: "send_gradient",
    AllReduce: "reduce",
    ReduceScatter: "reduce",
    Step: "update",
    AllGather: "all_gather",
}


class StashedRun(ProgramRun):
    """A run whose microbatches use stashed weights. Source: weight stashing, PipeDream (SOSP 2019)."""

    def __init__(self, executor: Executor, stream: Stream, done: int = 0) -> None:
        super().__init__(executor, stream, done)
        assert executor.stashed is not None
        self.stashed = executor.stashed
        self.stashed.begin(ResumePoint(done, len(stream.minibatches)))
        if executor.scales is not None:
            executor.scales.begin(stream.step + done)

    def scale_of(self, minibatch: int) -> LossScale:
        """Return the scale of a minibatch's loss, which may be another than the next one's."""
        scales = self.executor.scales
        return UNSCALED if scales is None else scales.of(minibatch)

    def factor_of(self, microbatch: int) -> float:
        """Return the factor on a microbatch's gradients: of the update's mean, and against the scale."""
        return 1 / (self.minibatches_due * self.scale_of(self.stream[microbatch].step).value)

    def forward(self, instruction: Forward) -> None:
        """Run the layers with the version of the weights that the plan gives the microbatch."""
        self.weights = self.stashed.weights_for(instruction.microbatch)
        super().forward(instruction)
        self.weights = None  # only a microbatch in flight keeps a version alive
        self.stashed.forward_done(instruction.microbatch)

    def do_final(self, instruction: Instruction) -> None:
        """Run the last backward before an update; gradients move to the parameters while it runs."""
        assert isinstance(instruction, Backward)
        with self.stashed.handing_over(instruction.microbatch, self.factor_of(instruction.microbatch)):
            super().do_final(instruction)

    def backward(self, instruction: Backward) -> None:
        """Run a backward and move the gradients from the stashed version to the parameters."""
        super().backward(instruction)
        self.stashed.collect(instruction.microbatch, self.factor_of(instruction.microbatch))

    def update(self, instruction: Step) -> None:
        """Make a new version of the weights."""
        with self.stashed.update():
            super().update(instruction)

    def end(self) -> None:
        """Drop all versions but the newest."""
        self.stashed.end()


class InferenceRun(ProgramRun):
    """A run of forwards without a graph."""

    training = False

    def __init__(self, executor: Executor, stream: Stream, on_outputs: OnOutputs) -> None:
        super().__init__(executor, stream)
        self.on_outputs, self.step = on_outputs, None

    def note(self, instruction: Instruction | Load | Products) -> None:
        """Record nothing: an evaluation has no timeline."""

    def forward(self, instruction: Forward) -> None:
        """Run the layers without a graph; the last stage hands its outputs to `on_outputs`."""
        m, c = instruction.microbatch, instruction.chunk
        stage, at = self.executor.stages[c], self.stream[m]
        received, inputs = self.values.pop((m, c), None), self.inputs_of(instruction)
        outputs = stage.infer(m, received, at.step, inputs, self.executor.forms[c](m))
        if stage.loss is None:
            self.pass_on(m, c, outputs)
            return
        self.note_made(outputs)
        if self.executor.counts:
            self.on_outputs(m, outputs, self.executor.to_device(at.minibatch.targets(at.microbatch)))
        _drop(at)

    def join_forward(self, instruction: JoinForward) -> None:
        """Take part in the forward of other replicas, where this rank has no microbatch."""
        self.executor.stages[instruction.chunk].join_inference()
