"""Executor: translates one rank's program into calls, and records when each instruction ran.

The only place where a schedule's data becomes action. It decides nothing: what to do next is in the
program, which weights a microbatch sees and who the peers are in the plan, how bytes move in the transport.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.comm.status import rank_status
from hybridpipe.data.stream import Minibatch, Stream
from hybridpipe.engine.weight_policy import LatestWeights, StashedWeights, WeightPolicy
from hybridpipe.health import faults
from hybridpipe.model.rng import preserved_state
from hybridpipe.model.tensors import TensorTree, map_tensors
from hybridpipe.optim.gradient_sync import Gradients
from hybridpipe.optim.nonfinite import Finite
from hybridpipe.optim.update import Update
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.generators import minibatches_in_update
from hybridpipe.planning.schedules.instructions import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Load,
    Products,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Step,
    final_backwards,
)
from hybridpipe.planning.schedules.resume_point import ResumePoint, num_updates
from hybridpipe.planning.timeline import Event
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.statistics import RunningStatistics

Gradient = Sequence[torch.Tensor | None]

_POINTS: dict[type[Instruction], str] = {  # for `faults`
    ReceiveActivation: "receive-activation",
    Forward: "forward",
    SendActivation: "send-activation",
    ReceiveGradient: "receive-gradient",
    Backward: "backward",
    BackwardInput: "backward",
    BackwardWeight: "backward",
    SendGradient: "send-gradient",
    AllReduce: "all-reduce",
    Step: "step",
}


class UpdateResult(NamedTuple):
    """What has come in since the update before.

    Args:
        losses: the share of the loss of each microbatch that ended here (the last stage's ranks have them).
        events: in seconds of this host's monotonic clock.
        num_minibatches: that the update was made of; 0 without one.
    """

    losses: dict[int, float]
    events: list[Event]
    num_minibatches: int


class Executor:
    """Runs programs for the rank at `place`.

    Args:
        stages, p2p: one for each stage that the rank holds, by chunk.
        gradients, update: of all of them together.
        finite: the check before an update; None: none.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        stages: Sequence[Stage],
        p2p: Sequence[PointToPoint],
        gradients: Gradients,
        update: Update,
        finite: Finite | None = None,
    ) -> None:
        self.plan, self.place, self.held = plan, place, plan.held_stages(place)
        self.stages, self.p2p = stages, p2p
        self.gradients, self.update, self.finite = gradients, update, finite
        self.defers_wgrad = [plan.defers_wgrad(s) for s in self.held]
        self.statistics = RunningStatistics(stage.module for stage in stages)
        self.weight_policy: WeightPolicy = LatestWeights()
        if plan.is_asynchronous:
            self.weight_policy = StashedWeights(plan, place, stages[0].module, self.statistics)

    def renew(self) -> None:
        """Take up what has changed in the layers since the last run. Collective over the stage's replicas."""
        for stage, each in zip(self.stages, self.p2p, strict=True):
            stage.renew()
            each.forget()
        self.gradients.renew()
        self.weight_policy.renew()

    @property
    def num_skipped(self) -> int:
        """Updates left out so far, because a number was not finite."""
        return 0 if self.finite is None else self.finite.num_skipped

    @property
    def bytes_sent(self) -> int:
        """Activations and gradients sent so far."""
        return sum(each.bytes_sent for each in self.p2p)

    def run(self, program: Program, stream: Stream, done: int = 0) -> Iterator[UpdateResult]:
        """Train on a stream; yields after each update, and at the end if anything came after the last.

        Args:
            done: so many minibatches of the stream are in the weights already, and not in `program`.
        """
        for each in self.p2p:
            each.begin(program, stream.sizes, stream.step, training=True)
        run = _Run(self, stream, done)
        finals = final_backwards(program)
        for part in _until_steps(program):
            with self._generators_preserved():
                for i in part:
                    rank_status.at(self._stage_of(program[i]), run.step, program[i])
                    run.do(program[i], is_final=i in finals)
                    run.note(program[i])
            rank_status.outside()
            if isinstance(program[part[-1]], Step):
                yield run.take()
                run.now = self.clock()
        for stage in self.stages:
            stage.complete_gradients()
        self.weight_policy.end()
        if run.events:
            yield run.take()

    def infer(
        self,
        program: Program,
        minibatch: Minibatch,
        on_outputs: Callable[[int, TensorTree, TensorTree], None],
        number: int,
    ) -> None:
        """Run the forwards of `program` without a graph; the last stage hands its outputs to `on_outputs`.

        Args:
            number: of the minibatch in the evaluation; random draws follow from it.
        """
        for each in self.p2p:
            each.begin(program, minibatch.sizes, step=0, training=False)
        values: dict[tuple[int, int], TensorTree] = {}
        with self._generators_preserved():
            for instruction in program:
                rank_status.at(self._stage_of(instruction), None, instruction)
                match instruction:
                    case ReceiveActivation(m, c):
                        values[m, c] = self.p2p[c].receive_activation(m)
                    case Forward(m, c):
                        inputs = values.pop((m, c)) if self.held[c] else self.to_device(minibatch.inputs(m))
                        values[m, c] = self.stages[c].infer(m, inputs, step=-1 - number)
                        if self.stages[c].loss is not None:
                            on_outputs(m, values.pop((m, c)), self.to_device(minibatch.targets(m)))
                    case SendActivation(m, c):
                        self.p2p[c].send_activation(m, values.pop((m, c)))
        rank_status.outside()

    def _generators_preserved(self) -> AbstractContextManager[None]:
        """Around what runs layers, which seed the process's generators."""
        python_too = any(stage.draws_from_python for stage in self.stages)
        return preserved_state(self.stages[0].device, python_too)

    def to_device(self, value: TensorTree) -> TensorTree:
        """Where this rank computes."""
        device = self.stages[0].device
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)

    def _stage_of(self, instruction: Instruction) -> int:
        return self.held[getattr(instruction, "chunk", 0)]

    def clock(self) -> float:
        """The time, once the device is done with what it was given."""
        device = self.stages[0].device
        if device.type == "cuda":  # else an event would end when its kernels are queued
            torch.cuda.synchronize(device)
        return time.perf_counter()


class _Run:
    """A program under way: what is between two instructions, by (microbatch, chunk)."""

    def __init__(self, executor: Executor, stream: Stream, done: int = 0) -> None:
        self.executor, self.stream, self.step = executor, stream, stream.step + done
        self.values: dict[tuple[int, int], TensorTree] = {}
        self.gradients: dict[tuple[int, int], Gradient] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.unchecked: dict[int, torch.Tensor] = {}  # losses that no update is made of so far
        self.events: list[Event] = []
        point = ResumePoint(done, len(stream.minibatches))
        self.num_updates = num_updates(executor.plan, executor.place.stage, point)
        self.applied = 0  # minibatches, since `take`
        self.covered = done  # minibatches, by all updates
        self.now = executor.clock()
        executor.weight_policy.begin(self.num_updates)

    def take(self) -> UpdateResult:
        """What has come in since this was called last."""
        done = UpdateResult({m: loss.item() for m, loss in self.losses.items()}, self.events, self.applied)
        self.losses, self.events, self.applied = {}, [], 0
        return done

    def note(self, instruction: Instruction | Load | Products) -> None:
        """It took from the end of the event before until now."""
        began, self.now = self.now, self.executor.clock()
        self.events.append(Event(instruction, began, self.now))

    def do(self, instruction: Instruction, is_final: bool) -> None:
        """One instruction. `is_final`: the last backward of a chunk before its gradients are used."""
        executor = self.executor
        fault = self.fault(_POINTS[type(instruction)], getattr(instruction, "microbatch", None))
        match instruction:
            case ReceiveActivation(m, c):
                self.values[m, c] = executor.p2p[c].receive_activation(m)
            case Forward(m, c):
                self.forward(m, c, fault)
            case SendActivation(m, c):
                executor.p2p[c].send_activation(m, self.values.pop((m, c)), fault)
            case ReceiveGradient(m, c):
                self.gradients[m, c] = executor.p2p[c].receive_gradient(m)
                if fault == "nan":
                    self.gradients[m, c] = [g if g is None else _not_numbers(g) for g in self.gradients[m, c]]
            case Backward() | BackwardInput() | BackwardWeight():
                self.backward(instruction, is_final)
            case SendGradient(m, c):
                executor.p2p[c].send_gradient(m, self.gradients.pop((m, c)), fault)
            case AllReduce():
                self.make_products()
                executor.gradients.finish()
            case Step():
                self.apply(fault)

    def fault(self, point: str, m: int | None) -> str | None:
        """Passes a point where something may be asked to go wrong."""
        if not faults.any_left():
            return None
        if m is None:
            return faults.at(point, step=self.stream.step + self.covered)
        at = self.stream[m]
        return faults.at(point, step=at.step, microbatch=at.microbatch)

    def forward(self, m: int, c: int, fault: str | None) -> None:
        executor, stage, at = self.executor, self.executor.stages[c], self.stream[m]
        self.step = at.step
        weights = executor.weight_policy.of(m)
        if executor.held[c] == 0 or stage.loss is not None:
            self.fault("load", m)
        inputs = self.values.pop((m, c)) if executor.held[c] else executor.to_device(at.inputs)
        targets = None if stage.loss is None else executor.to_device(at.targets)
        if executor.held[c] == 0 or targets is not None:
            self.note(Load(m, c))
        if fault == "nan":
            inputs = map_tensors(_not_numbers, inputs)
        if targets is None:
            self.values[m, c] = stage.forward(at.microbatch, inputs, at.step, weights, slot=m)
        else:
            loss = stage.forward_loss(at.microbatch, inputs, targets, at.share, at.step, weights, slot=m)
            if not loss.requires_grad:
                raise ValueError(
                    "the loss depends on nothing that is trained: the outputs were detached or made under "
                    "torch.no_grad(), or the loss is a constant"
                )
            self.losses[m] = self.unchecked[m] = loss.detach()
        executor.weight_policy.ran(m)
        if not c:  # each of a rank's stages sees the same
            executor.statistics.num_samples += self.stream.sizes[m]

    def backward(self, instruction: Backward | BackwardInput | BackwardWeight, is_final: bool) -> None:
        executor, m, factor = self.executor, instruction.microbatch, 1 / self.minibatches_due
        if is_final:
            executor.gradients.begin_final_backward()
        with executor.weight_policy.final(m, factor) if is_final else nullcontext():
            self.run_backward(instruction, is_final and not executor.defers_wgrad[instruction.chunk])
        executor.weight_policy.collect(m, factor)
        executor.gradients.end_final_backward()

    def run_backward(self, instruction: Backward | BackwardInput | BackwardWeight, is_final: bool) -> None:
        m, c = instruction.microbatch, instruction.chunk
        stage = self.executor.stages[c]
        match instruction:
            case Backward():
                self.gradients[m, c] = stage.backward(m, self.gradients.pop((m, c), ()), is_final)
            case BackwardInput():
                self.gradients[m, c] = stage.backward_input(m, self.gradients.pop((m, c), ()))
            case BackwardWeight():
                stage.backward_weight(m)
        if self.executor.held[c] == 0:
            self.gradients.pop((m, c), None)  # no one before it

    def make_products(self) -> None:
        """What backwards have left behind, now that no other rank waits for this one."""
        for stage in self.executor.stages:
            if stage.keeps_back:
                stage.complete_gradients()
                self.note(Products())

    def apply(self, fault: str | None) -> None:
        """The update that is due."""
        count = self.minibatches_due
        if fault == "nan":
            self.executor.update.spoil()
        finite, step = self.executor.finite, self.stream.step + self.covered
        covered = [m for m in self.unchecked if self.stream[m].step < step + count]  # others are ahead
        losses = {m: self.unchecked.pop(m) for m in covered}
        with self.executor.weight_policy.update():
            if finite is None or finite.allows(losses, self.stream, step):
                self.executor.update.step(count)
            else:  # a version like the one before: the numbers of versions stay those of the plan
                self.executor.update.leave_out(count)
        self.num_updates += 1
        self.applied += count
        self.covered += count

    @property
    def minibatches_due(self) -> int:
        """What goes into the next update."""
        plan, stage, count = self.executor.plan, self.executor.place.stage, len(self.stream.minibatches)
        return minibatches_in_update(plan, stage, self.num_updates, count)


def _until_steps(program: Program) -> Iterator[range]:
    """The indices of a program's instructions, in parts that end with a step or with the program."""
    start = 0
    for i, instruction in enumerate(program):
        if isinstance(instruction, Step) or i + 1 == len(program):
            yield range(start, i + 1)
            start = i + 1


def _not_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """In the place of a tensor that could hold them; others stay."""
    if not tensor.is_floating_point():
        return tensor
    return torch.full_like(tensor, torch.nan, requires_grad=tensor.requires_grad)
