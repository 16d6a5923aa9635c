"""Held part: the part of a parameter that a rank has, where its stage is split over several ranks.

Knows one parameter, no rank and no plan. It is written on the parameter itself, so whoever has one can ask.
Invariant: a part is a `range` of the whole parameter's elements in C order, whole along all dimensions but
the first.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_hybridpipe_part"


class HeldPart(NamedTuple):
    """The part of a parameter that a rank has.

    Args:
        whole: shape of the whole parameter.
        elements: those that are here.
    """

    whole: torch.Size
    elements: range

    @classmethod
    def along_first(cls, whole: torch.Size, index: int, count: int) -> "HeldPart":
        """Return part `index` of `count` equal ones along the first dimension."""
        size = whole.numel() // count
        return cls(whole, range(index * size, (index + 1) * size))

    @property
    def shape(self) -> torch.Size:
        """Shape of the part."""
        rest = self.whole[1:]
        return torch.Size([len(self.elements) // math.prod(rest), *rest])

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of this part of a whole tensor."""
        return whole.reshape(-1)[self.elements.start : self.elements.stop].clone().view(self.shape)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write a part into a whole, contiguous tensor."""
        whole.view(-1)[self.elements.start : self.elements.stop] = part.reshape(-1)


def held_part(parameter: Tensor) -> HeldPart | None:
    """Return what part of a parameter is here; None: all of it."""
    part: HeldPart | None = getattr(parameter, _ATTRIBUTE, None)
    return part


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter of which a part may be here."""
    part = held_part(parameter)
    return parameter.shape if part is None else part.whole


def part_of(parameter: Tensor, whole: Tensor, part: HeldPart) -> nn.Parameter:
    """Return a parameter that has a part of `whole` and the attributes of `parameter`."""
    made = nn.Parameter(part.of(whole), parameter.requires_grad)
    vars(made).update(vars(parameter))
    setattr(made, _ATTRIBUTE, part)
    return made


def whole_forms(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state by key; for a part the whole one, on the meta device."""
    return {key: _whole_form(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}


def _whole_form(tensor: Tensor) -> Tensor:
    part = held_part(tensor)
    if part is None:
        return tensor.detach()
    return torch.empty(part.whole, dtype=tensor.dtype, device="meta")
