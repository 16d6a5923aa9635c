"""Sleeping layers: a model that takes the time and moves the bytes of a profile, and computes nothing.

Ranks and messages are not known here. Tensors over a cut and reduced gradients have their profiled sizes, all
others have one element. Buffers hold zeros throughout, so microbatches share them.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.model.tensors import TensorTree, tensors_of
from hybridpipe.planning.profile import LayerProfile

ITEM_BYTES = 4  # float32
SHORTEST_SECONDS = 2e-4  # each sleep costs about 50 µs of processor time


class Pace:
    """Sleeps whose total length is exact: the excess of one sleep shortens the next.

    A rank that shares its processor, and wakes up late, still keeps the profiled pace.
    """

    def __init__(self) -> None:
        self._owed_seconds = 0.0
        self._ended = 0.0

    def sleep(self, seconds: float, uninterrupted: bool = False) -> None:
        """Sleep for `seconds`, or add them to the next sleep if they are fewer than SHORTEST_SECONDS.

        Args:
            uninterrupted: True if no message was awaited since the last sleep. The time since then, spent in
                Python or waiting for a processor, then counts as part of this sleep.
        """
        now = time.perf_counter()
        self._owed_seconds += seconds - uninterrupted * (now - self._ended)
        if self._owed_seconds >= SHORTEST_SECONDS:
            time.sleep(self._owed_seconds)
            self._owed_seconds -= time.perf_counter() - now
        self._ended = time.perf_counter()


class SleepingLayer(nn.Module):
    """One profiled layer, without state to save.

    Args:
        profile: times in seconds and sizes in bytes.
        pace: the rank's sleeps.
        reduced: True if replicas reduce its gradients: the parameter has the profiled size.
        cut: True if its output goes to another rank: the output has the profiled size.
        leads: True for the first layer of a stage, whose wait for an activation is not part of its time.
        ends: True for the last layer of a stage, whose wait for a gradient is not part of its time.
        split: True if the weights' half of the backward runs as a hook of the parameter, for schedules that
            postpone it.
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
        """Sleep; return a tensor with a gradient and, at a cut, one with the bytes that need none."""
        output: Tensor = _Sleep.apply(self, self.weight, tensors_of(value)[0])  # type: ignore[no-untyped-call]
        return (output, _alias(self.rest)) if len(self.rest) else output

    def gradient_of(self, shape: torch.Size) -> Tensor:
        """Zeros of an input's shape; the buffer is kept, as the shape hardly ever changes."""
        if self.returned.shape != shape:
            self.returned = torch.zeros(shape)
        return _alias(self.returned)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing: a sleeping layer has no state."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, layer: SleepingLayer, _: Tensor | None, value: Tensor) -> Tensor:
        context.layer, context.shape = layer, value.shape
        layer.pace.sleep(layer.profile.forward_seconds, uninterrupted=not layer.leads)
        return _alias(layer.output)

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        layer = context.layer
        layer.pace.sleep(layer.backward_seconds, uninterrupted=not layer.ends)
        _, weighted, has_gradient = context.needs_input_grad
        of_weight = _alias(layer.gradient) if weighted else None
        return None, of_weight, layer.gradient_of(context.shape) if has_gradient else None


class SleepingOptimizer(torch.optim.Optimizer):
    """Optimizer that sleeps for the profiled updates and changes no parameter."""

    def __init__(self, parameters: Iterable[Tensor], pace: Pace, seconds: float) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._pace, self._seconds = pace, seconds

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sleep for the seconds of one update."""
        self._pace.sleep(self._seconds)


def sleeping_loss(outputs: TensorTree, _: TensorTree) -> Tensor:
    """Loss of negligible cost: the sum of the first output."""
    return tensors_of(outputs)[0].sum()


def _alias(tensor: Tensor) -> Tensor:
    """Return a new tensor on the same memory, which autograd takes as a gradient without copying."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.detach())  # type: ignore[call-overload,no-any-return]
