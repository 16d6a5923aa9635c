"""Sleeping: a model that computes nothing, and takes as long and moves as many bytes as a profile says.

Knows profiles, autograd and time; no ranks and no messages. A layer's forward and backward sleep for the
profiled times; what flows over a cut, and the gradients that replicas reduce, are real tensors of the
profiled sizes. Everything else has one number, and buffers are shared among microbatches, as nobody looks at
what is in them: it is zeros throughout.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.model.tensors import TensorTree, tensors_of
from hybridpipe.planning.profile import LayerProfile

ITEM_BYTES = 4  # float32
SHORTEST_SECONDS = 2e-4  # a sleep costs about 50 µs of processor time, whatever its length


class Pace:
    """Sleeps as long as it was told to in total: what one sleep was too long, the next is shorter.

    So a rank that shares its processor with many, and gets it late, still computes at the profiled pace.
    """

    def __init__(self) -> None:
        self._owed_seconds = 0.0
        self._ended = 0.0

    def sleep(self, seconds: float, goes_on: bool = False) -> None:
        """Sleep, or owe what is too short a sleep to be worth it.

        Args:
            goes_on: no message was waited for since the sleep before, so the time between the two is part
                of this one: it went by in Python, or waiting for a processor.
        """
        now = time.perf_counter()
        self._owed_seconds += seconds - goes_on * (now - self._ended)
        if self._owed_seconds >= SHORTEST_SECONDS:
            time.sleep(self._owed_seconds)
            self._owed_seconds -= time.perf_counter() - now
        self._ended = time.perf_counter()


class SleepingLayer(nn.Module):
    """One profiled layer.

    It has no state: there is nothing for ranks to agree on, or to save.

    Args:
        profile: times, and sizes in bytes.
        pace: of this rank.
        reduced: its gradients are reduced among replicas, so the parameter has the profiled size.
        cut: its output goes to another rank, so it has the profiled size.
        leads: it is the first of its stage; `ends`: the last. What it waits for is no part of its time.
        split: the weights' half of its backward is a hook of its parameter: a schedule can put it off.
    """

    def __init__(
        self,
        profile: LayerProfile,
        pace: Pace,
        *,
        reduced: bool = False,
        cut: bool = False,
        leads: bool = True,
        ends: bool = True,
        split: bool = False,
    ) -> None:
        super().__init__()
        self.profile, self.pace, self.leads, self.ends = profile, pace, leads, ends
        self.backward_seconds = profile.input_backward_seconds if split else profile.backward_seconds
        with_gradient = profile.returned_bytes if cut else ITEM_BYTES
        self.output = torch.zeros(max(1, with_gradient // ITEM_BYTES))
        self.rest = torch.zeros(max(0, profile.output_bytes - self.output.nbytes) * cut, dtype=torch.uint8)
        self.returned = torch.zeros(0)
        self.weight: nn.Parameter | None = None
        if profile.parameter_bytes:
            size = profile.parameter_bytes // ITEM_BYTES if reduced else 1
            self.weight = nn.Parameter(torch.zeros(max(1, size)))
            self.gradient = torch.zeros_like(self.weight)
            if split:
                self.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _: pace.sleep(profile.weight_backward_seconds)
                )

    def forward(self, value: TensorTree) -> TensorTree:
        """What flows on is one tensor with a gradient and, over a cut, one with the bytes that have none."""
        output: Tensor = _Sleep.apply(self, self.weight, tensors_of(value)[0])  # type: ignore[no-untyped-call]
        return (output, _alias(self.rest)) if len(self.rest) else output

    def gradient_of(self, shape: torch.Size) -> Tensor:
        """Zeros for an input, which is of one size always."""
        if self.returned.shape != shape:
            self.returned = torch.zeros(shape)
        return _alias(self.returned)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """There is none."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, layer: SleepingLayer, _: Tensor | None, value: Tensor) -> Tensor:
        context.layer, context.shape = layer, value.shape
        layer.pace.sleep(layer.profile.forward_seconds, goes_on=not layer.leads)
        return _alias(layer.output)

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        layer = context.layer
        layer.pace.sleep(layer.backward_seconds, goes_on=not layer.ends)
        _, weighted, has_gradient = context.needs_input_grad
        of_weight = _alias(layer.gradient) if weighted else None
        return None, of_weight, layer.gradient_of(context.shape) if has_gradient else None


class SleepingOptimizer(torch.optim.Optimizer):
    """Takes as long as the profiled updates, and updates nothing."""

    def __init__(self, parameters: Iterable[Tensor], pace: Pace, seconds: float) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._pace, self._seconds = pace, seconds

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sleep."""
        self._pace.sleep(self._seconds)


def sleeping_loss(outputs: TensorTree, _: TensorTree) -> Tensor:
    """A loss that costs nothing."""
    return tensors_of(outputs)[0].sum()


def _alias(tensor: Tensor) -> Tensor:
    """A tensor of its own on the same memory: autograd takes it as a gradient without copying."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.detach())  # type: ignore[call-overload,no-any-return]
