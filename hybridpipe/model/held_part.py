"""Held part: the part of a parameter that a rank has, where its stage is split over several ranks.

Knows one parameter, no rank and no plan. It is written on the parameter itself, so whoever has one can ask.
Invariant: the parts of a parameter are equal slices along one dimension, of every weight that it packs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_hybridpipe_part"


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a parameter that a rank has.

    Args:
        whole: shape of the whole parameter.
        axis: of `Place`, along which ranks have its parts.
        index: of this part.
        count: number of parts.
        dim: dimension along which it is cut.
        packs: number of weights that stand one after the other along `dim`, each of which is cut: 2 for the
            gate and the up-projection in one weight.
    """

    whole: torch.Size
    axis: str
    index: int
    count: int
    dim: int = 0
    packs: int = 1

    @property
    def is_possible(self) -> bool:
        """True if the parameter has such a part."""
        in_range = self.index < self.count and self.packs and 0 <= self.dim < len(self.whole)
        return bool(in_range) and self.whole[self.dim] % (self.packs * self.count) == 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the part."""
        sizes = list(self.whole)
        sizes[self.dim] //= self.count
        return torch.Size(sizes)

    @property
    def all_parts(self) -> "list[HeldPart]":
        """The parts of the parameter, in their order."""
        return [replace(self, index=i) for i in range(self.count)]

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of this part of a whole tensor."""
        return torch.cat(list(self._slices(whole)), self.dim)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write a part into a whole tensor."""
        for to, values in zip(self._slices(whole), part.chunk(self.packs, self.dim), strict=True):
            to.copy_(values)

    @property
    def spans(self) -> list[range]:
        """The indices along `dim` that the part has, of each weight that the parameter packs."""
        packed = self.whole[self.dim] // self.packs
        length = packed // self.count
        starts = (i * packed + self.index * length for i in range(self.packs))
        return [range(start, start + length) for start in starts]

    def _slices(self, whole: Tensor) -> Iterator[Tensor]:
        """Yield views of the part's slices."""
        return (whole.narrow(self.dim, span.start, len(span)) for span in self.spans)


def common_elements(one: HeldPart | None, other: HeldPart | None, shape: torch.Size) -> int:
    """Return the number of elements of a parameter that two parts have in common; None is all of it."""
    if one is None or other is None:
        return min(shape.numel() if each is None else each.shape.numel() for each in (one, other))
    if one.dim != other.dim:
        return shape.numel() // (one.count * other.count)
    both = (range(max(a.start, b.start), min(a.stop, b.stop)) for a in one.spans for b in other.spans)
    return sum(map(len, both)) * (shape.numel() // shape[one.dim])


def held_part(parameter: Tensor) -> HeldPart | None:
    """Return what part of a parameter is here; None: all of it."""
    part: HeldPart | None = getattr(parameter, _ATTRIBUTE, None)
    return part


def axis_of(parameter: Tensor) -> str | None:
    """Return the axis along which ranks have parts of a parameter; None where it is whole."""
    part = held_part(parameter)
    return None if part is None else part.axis


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
