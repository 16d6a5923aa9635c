"""Fault injection for HYBRIDPIPE_FAULT: executor and transport that fail at points of `health.faults`.

Knows how to spoil messages and gradients; not which fault was requested.
Invariant: the worker installs them only where a fault is requested, so other trainings pass no such point.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.p2p import KINDS, SPEC
from hybridpipe.comm.transport import Pending
from hybridpipe.data.stream import Stream
from hybridpipe.device import Completion
from hybridpipe.engine.executor import Executor, ProgramRun, RankParts
from hybridpipe.health import faults
from hybridpipe.model.tensors import Tree, map_tensors
from hybridpipe.optim.update import gradients_of
from hybridpipe.planning.schedules.instructions import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    ReduceScatter,
    Reduction,
    SendActivation,
    SendGradient,
    Step,
)

_POINTS: dict[type[Instruction], str] = {
    ReceiveActivation: "receive-activation",
    Forward: "forward",
    SendActivation: "send-activation",
    ReceiveGradient: "receive-gradient",
    Backward: "backward",
    BackwardInput: "backward",
    BackwardWeight: "backward",
    SendGradient: "send-gradient",
    AllReduce: "all-reduce",
    ReduceScatter: "all-reduce",
    Step: "step",
    AllGather: "all-gather",
}


class Spoiling:
    """Mix-in in front of a transport: spoils the messages that are sent while `fault` is set.

    Args:
        fault: "badsize", "badtag", or another kind, which leaves messages as they are.
        next_tag: distance between the tags of one microbatch's message and of the next one's.
    """

    fault: str | None = None
    next_tag = 0

    def send(self, buffer: Tensor, peer: int, tag: int, ready: Sequence[Completion] | None = None) -> Pending:
        """Start sending, with a wrong size or tag if `fault` says so."""
        if tag % KINDS != SPEC:
            if self.fault == "badsize":
                buffer = torch.cat([buffer, buffer])
            elif self.fault == "badtag":
                tag += self.next_tag
        pending: Pending = super().send(buffer, peer, tag, ready)  # type: ignore[misc]  # defined by the transport
        return pending


class FaultyTransport(Spoiling, MpiTransport):
    """Transport between processes that can spoil messages."""


class FaultyExecutor(Executor):
    """Executor that passes the points of `health.faults`."""

    def __init__(self, parts: RankParts, transport: FaultyTransport) -> None:
        super().__init__(parts)
        self._transport, self._spoils_inputs = transport, False
        transport.next_tag = KINDS * parts.plan.num_stages

    def new_run(self, stream: Stream, done: int) -> ProgramRun:
        """Start the run of a program over a stream."""
        run = super().new_run(stream, done)
        vars(run)["handle"] = partial(self._pass, run, run.handle)
        return run

    def to_device(self, tree: Tree) -> Tree:
        """Move a tree's tensors to this rank's device, as NaN where a fault says so."""
        moved = super().to_device(tree)
        return map_tensors(_not_numbers, moved) if self._spoils_inputs else moved

    def _pass(self, run: ProgramRun, handle: Callable[[Instruction], None], instruction: Instruction) -> None:
        if isinstance(instruction, Reduction | Step | AllGather):
            m, chunk = -1, 0
        else:
            m, chunk = instruction.microbatch, instruction.chunk
        if isinstance(instruction, Forward) and self.stages[chunk].loads(training=True):
            self._fault(run, "load", m)
        fault = self._fault(run, _POINTS[type(instruction)], m)
        if fault == "nan" and isinstance(instruction, Step):
            for gradient in gradients_of(self.update.optimizer)[:1]:
                gradient.fill_(torch.nan)
        elif fault == "nan" and (m, chunk) in run.values:
            run.values[m, chunk] = map_tensors(_not_numbers, run.values[m, chunk])
        self._spoils_inputs, self._transport.fault = fault == "nan", fault
        handle(instruction)
        self._spoils_inputs, self._transport.fault = False, None
        if fault == "nan" and isinstance(instruction, ReceiveGradient):
            gradients = run.gradients[m, chunk]
            run.gradients[m, chunk] = [g if g is None else _not_numbers(g) for g in gradients]

    def _fault(self, run: ProgramRun, point: str, m: int) -> str | None:
        if m < 0:
            return faults.at(point, step=run.stream.step + run.covered)
        at = run.stream[m]
        return faults.at(point, step=at.step, microbatch=at.microbatch)


def _not_numbers(tensor: Tensor) -> Tensor:
    """Return NaN in a floating-point tensor's place; return any other tensor itself."""
    if not tensor.is_floating_point():
        return tensor
    return torch.full_like(tensor, torch.nan, requires_grad=tensor.requires_grad)
