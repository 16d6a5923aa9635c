"""Executor: translates one rank's program into calls, and records when each instruction ran.

The only place where a schedule's data becomes action. It decides nothing: what to do next is in the
program, who the peers are in the plan, how bytes move in the transport.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hybridpipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Step,
    final_backwards,
)
from hybridpipe.planning.timeline import Event
from hybridpipe.runtime.boundary import Boundary
from hybridpipe.runtime.gradients import Gradients
from hybridpipe.runtime.position import position
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.values import Value, map_tensors


class Minibatch(NamedTuple):
    """One minibatch's microbatches; inputs and targets are fetched where, and when, they are needed."""

    sizes: Sequence[int]
    inputs: Callable[[int], Value]
    targets: Callable[[int], Value]

    @property
    def num_samples(self) -> int:
        """Samples in all microbatches."""
        return sum(self.sizes)


class Executor:
    """Runs programs for the rank that holds `stage`, which is number `index` of the pipeline.

    Args:
        optimizer: None where the stage has nothing to train.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        boundary: Boundary,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.stage, self.index, self.boundary = stage, index, boundary
        self.gradients, self.optimizer = gradients, optimizer

    def run(self, program: Program, minibatch: Minibatch, step: int) -> tuple[dict[int, float], list[Event]]:
        """Train on one minibatch.

        Args:
            step: the number of updates so far.

        Returns:
            the share of the loss of each microbatch that ended here (the last stage's ranks have them), and
            the events, in seconds of this host's monotonic clock.
        """
        self.stage.module.train()
        self.boundary.begin(program, minibatch.sizes, step, training=True)
        finals = final_backwards(program)
        values: dict[int, Value] = {}
        gradients: dict[int, Sequence[torch.Tensor | None]] = {}
        losses: dict[int, torch.Tensor] = {}
        events = []
        now = self._clock()
        for i, instruction in enumerate(program):
            started = now
            position.at(self.index, step, instruction)
            match instruction:
                case ReceiveActivation(m):
                    values[m] = self.boundary.receive_activation(m)
                case Forward(m):
                    inputs = values.pop(m) if m in values else self._fetch(minibatch.inputs, m)
                    if self.stage.loss is None:
                        values[m] = self.stage.forward(m, inputs, step)
                    else:
                        targets = self._fetch(minibatch.targets, m)
                        share = minibatch.sizes[m] / minibatch.num_samples
                        losses[m] = self.stage.forward_loss(m, inputs, targets, share, step)
                case SendActivation(m):
                    self.boundary.send_activation(m, values.pop(m))
                case ReceiveGradient(m):
                    gradients[m] = self.boundary.receive_gradient(m)
                case Backward(m):
                    if i in finals:
                        self.gradients.arm()
                    gradients[m] = self.stage.backward(m, gradients.pop(m, ()))
                case SendGradient(m):
                    self.boundary.send_gradient(m, gradients.pop(m))
                case AllReduce():
                    self.gradients.finish()
                case Step():
                    self._update()
            now = self._clock()
            events.append(Event(instruction, started, now))
        position.outside()
        return {m: loss.item() for m, loss in losses.items()}, events

    def infer(
        self, program: Program, minibatch: Minibatch, judge: Callable[[int, Value, Value], None]
    ) -> None:
        """Run the forwards of `program` in evaluation; the last stage hands its outputs to `judge`."""
        self.stage.module.eval()
        self.boundary.begin(program, minibatch.sizes, step=0, training=False)
        values: dict[int, Value] = {}
        for instruction in program:
            position.at(self.index, None, instruction)
            match instruction:
                case ReceiveActivation(m):
                    values[m] = self.boundary.receive_activation(m)
                case Forward(m):
                    inputs = values.pop(m) if m in values else self._fetch(minibatch.inputs, m)
                    values[m] = self.stage.infer(inputs)
                    if self.stage.loss is not None:
                        judge(m, values.pop(m), self._fetch(minibatch.targets, m))
                case SendActivation(m):
                    self.boundary.send_activation(m, values.pop(m))
        position.outside()

    def _fetch(self, source: Callable[[int], Value], microbatch: int) -> Value:
        return map_tensors(lambda tensor: tensor.to(self.stage.device, non_blocking=True), source(microbatch))

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _clock(self) -> float:
        if self.stage.device.type == "cuda":  # else an event would end when its kernels are queued
            torch.cuda.synchronize(self.stage.device)
        return time.perf_counter()
