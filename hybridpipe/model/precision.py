"""Precision: the types in which a microbatch is computed, and in which its values cross a cut.

Knows torch and no model. Invariant: a context surrounds one microbatch's forward, never the training.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridpipe.planning.checks import PRECISIONS, one_of

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-params": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """The precision of a training; its weights, gradients and losses are in their own types.

    Args:
        name: one of PRECISIONS. "fp32" leaves every type as the model has it; under the others autocast
            computes in a type of 16 bits what tolerates it (torch.amp's lists). "bf16-params" also calls the
            layers with copies of their matrices in that type, made once an update instead of once a forward.
    """

    name: str = "fp32"

    def __post_init__(self) -> None:
        one_of("precision", self.name, PRECISIONS)

    @property
    def low(self) -> torch.dtype | None:
        """The type of 16 bits; None where there is none."""
        return _LOW.get(self.name)

    @property
    def lowers_weights(self) -> bool:
        """True if layers are called with copies of their weights, `copied`."""
        return self.name == "bf16-params"

    def copied(self, parameter: Tensor) -> Tensor:
        """Return the numbers of a trained parameter as a stage is called with them.

        They share the parameter's memory, unless it is a matrix that is lowered; norms' and biases' stay.
        """
        lowers = self.lowers_weights and parameter.dtype == torch.float32 and parameter.dim() > 1
        return parameter.data.to(self.low) if lowers else parameter.data

    @property
    def scales_loss(self) -> bool:
        """True if small gradients would vanish unless losses are scaled."""
        return self.low == torch.float16

    def forward(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context for one microbatch's forward, without its loss."""
        return nullcontext() if self.low is None else torch.autocast(device.type, self.low)

    def recording(self) -> AbstractContextManager[object]:
        """Return a context for a recording: `forward` on every kind of device that there is."""
        contexts = ExitStack()
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            contexts.enter_context(self.forward(torch.device(kind)))
        return contexts

    def sent(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which values of this type, and their gradients, cross a cut."""
        return self.low if self.low is not None and dtype == torch.float32 else dtype

    def sent_bytes(self, values: Iterable["Sized"]) -> int:
        """Return the bytes of values that cross a cut."""
        return sum(value.shape.numel() * self.sent(value.dtype).itemsize for value in values)

    def raised(self, tensor: Tensor) -> Tensor:
        """Return a tensor for loss and metrics: in float32 if it is in the type of 16 bits."""
        return tensor.float() if tensor.dtype == self.low else tensor


class Sized(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""


FP32 = Precision()
