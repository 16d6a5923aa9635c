"""Values: what flows between layers, a tensor or a tuple of tensors, as `nn.Sequential` passes it on.

And how large the gradients of weights are, and which numbers are none.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TensorTree = Tensor | tuple[Tensor, ...]


def tensors_of(value: TensorTree) -> tuple[Tensor, ...]:
    """The tensors of a value. Raises TypeError if it is neither a tensor nor a tuple of tensors."""
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"layers must pass on a tensor or a tuple of tensors, got {type(tensor).__name__} "
                f"in {type(value).__name__}"
            )
    return tensors


def rebuild(tensors: tuple[Tensor, ...], like: TensorTree) -> TensorTree:
    """The inverse of `tensors_of`: a tuple where `like` is one."""
    return tensors if isinstance(like, tuple) else tensors[0]


def map_tensors(function: Callable[[Tensor], Tensor], value: TensorTree) -> TensorTree:
    """The value with `function` applied to each of its tensors."""
    return rebuild(tuple(map(function, tensors_of(value))), value)


def dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient; of a sparse one, such as an embedding's, those that are there."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Of each: what is looked at before an update."""
    return list(torch._foreach_norm([dense(gradient) for gradient in gradients])) if gradients else []


def not_finite(tensor: Tensor) -> str | None:
    """The counts of NaN and infinity in a dense tensor, in words; None if there are none.

    Its least and largest number tell, in one pass at the speed of memory.
    """
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    values = tensor.detach().resolve_conj()
    if values.is_floating_point() and values.element_size() == 1:
        values = values.float()  # torch compares no numbers of 8 bits
    numbers = torch.view_as_real(values) if values.is_complex() else values
    if not numbers.is_floating_point() or all(math.isfinite(bound) for bound in numbers.aminmax()):
        return None
    return f"{int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite of {values.numel()}"


def raw_bytes(tensor: Tensor) -> bytes:
    """The numbers of a tensor of any device, layout and dtype, in C order."""
    here = tensor.detach().cpu()
    if here.layout != torch.strided:
        here = here.to_dense()
    here = here.resolve_conj().resolve_neg().contiguous()
    return here.reshape(-1).view(torch.uint8).numpy().tobytes()  # as bytes, since NumPy knows no bfloat16


@torch.no_grad()
def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy numbers into a tensor in place, even one that `expand` has made.

    Raises:
        ValueError: along a dimension where it holds each number once the values differ.
    """
    for dim in expanded_dimensions(tensor):
        first = values.narrow(dim, 0, 1)
        if not torch.equal(first.expand_as(values), values):
            raise ValueError(f"values must be alike along dimension {dim} of an expanded tensor, and differ")
        tensor, values = tensor.narrow(dim, 0, 1), first
    tensor.copy_(values)


def expanded_dimensions(tensor: Tensor) -> list[int]:
    """The dimensions along which a tensor holds each number once, as `expand` makes them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [dim for dim, (size, stride) in enumerate(sizes) if size > 1 and stride == 0]
