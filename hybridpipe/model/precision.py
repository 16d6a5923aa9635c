"""Precision: the types in which a microbatch is computed, and in which its values cross a cut.

Knows torch and no model. Invariant: a context surrounds one microbatch's forward, never the training.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hybridpipe.planning.checks import PRECISIONS, one_of

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-params": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """The precision of a training; its weights, gradients and losses are in their own types.

    Args:
        name: one of PRECISIONS. "fp32" leaves every type as the model has it; under the others autocast
            computes in a type of 16 bits what tolerates it (torch.amp's lists). "bf16-params" also calls the
            layers with copies of some weights (`lowered`) in that type, made once an update, not a forward.
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
        """True if layers are called with copies of some weights."""
        return self.name == "bf16-params"

    def lowered(self, layers: nn.Module) -> set[Tensor]:
        """Return the weights of which layers are called with copies: those that autocast would cast itself.

        They are the weights of linear layers and convolutions, unless another kind of module also holds them,
        such as an embedding, which adds up its gradient in the weight's type.
        """
        lowered, others = set[Tensor](), set[Tensor]()
        for module in layers.modules() if self.lowers_weights else ():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    casts = name == "weight" and isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
                    (lowered if casts and parameter.dtype == torch.float32 else others).add(parameter)
        return lowered - others

    @property
    def scales_loss(self) -> bool:
        """True if small gradients would vanish unless losses are scaled."""
        return self.low == torch.float16

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context for one microbatch's forward, without its loss."""
        return nullcontext() if self.low is None else torch.autocast(device.type, self.low)

    def recording(self) -> AbstractContextManager[object]:
        """Return a context for a recording: `context` on every kind of device that there is."""
        contexts = ExitStack()
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            contexts.enter_context(self.context(torch.device(kind)))
        return contexts

    def sent(self, value: "Sendable") -> torch.dtype:
        """Return the type in which a value crosses a cut, as its gradient does.

        What has no gradient, such as a mask or a number, crosses as it is.
        """
        if self.low is not None and value.requires_grad and value.dtype == torch.float32:
            return self.low
        return value.dtype

    def sent_bytes(self, values: Iterable["Sendable"]) -> int:
        """Return the bytes of values that cross a cut."""
        return sum(value.shape.numel() * self.sent(value).itemsize for value in values)

    def raised(self, tensor: Tensor) -> Tensor:
        """Return a tensor for loss and metrics: in float32 if it is in the type of 16 bits."""
        return tensor.float() if tensor.dtype == self.low else tensor


class Sendable(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    @property
    def requires_grad(self) -> bool:
        """True if it gets a gradient."""


FP32 = Precision()
