"""Tensors: trees of tensors, their bytes, norms and numbers that are not finite.

Knows torch only. Two kinds of trees: `Tree` is what a model takes and returns, `TensorTree` what stages send.
Invariant: a function that maps a tree keeps its containers and everything in it that is no tensor.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybridpipe.torch_private import foreach_norm, pytree

TensorTree = Tensor | tuple[Tensor, ...]  # crosses a boundary between stages
Tree = Any  # inputs, targets and outputs of a model: dicts, tuples, lists of tensors, numbers and None

_Tree = TypeVar("_Tree")


def tensors_in(tree: Tree) -> list[Tensor]:
    """Return the tensors in any tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def named_leaves(**trees: Tree) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of the trees with its key, such as "inputs['mask']"."""
    for name, tree in trees.items():
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            yield f"{name}{pytree.keystr(path)}", leaf


def described(tree: Tree) -> str:
    """Return what is in a tree for messages: "{'ids': int64 (16, 8), 'labels': int64 (16,)}"."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} {tuple(tree.shape)}"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key!r}: {described(value)}' for key, value in tree.items())}}}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(described, tree))})"
    return "None" if tree is None else type(tree).__name__


def map_tensors(function: Callable[[Tensor], Tensor], tree: _Tree) -> _Tree:
    """Return the tree with `function` applied to each of its tensors."""
    if isinstance(tree, Tensor):  # the usual trees, in a tenth of the time
        return function(tree)  # type: ignore[return-value]
    if tree is None:
        return tree
    mapped: _Tree = pytree.tree_map_only(Tensor, function, tree)
    return mapped


def split(tree: Tree, size: int, count: int) -> list[Tree]:
    """Return `count` parts of a tree, whose tensors are slices of that many samples, or of what is left."""
    starts = range(0, count * size, size)
    if isinstance(tree, Tensor):  # the usual tree, in a third of the time
        return [tree[start : start + size] for start in starts]
    leaves, spec = pytree.tree_flatten(tree)
    parts = []
    for start in starts:
        cut = [leaf[start : start + size] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        parts.append(pytree.tree_unflatten(cut, spec))
    return parts


def num_samples(**trees: Tree) -> int:
    """Return the number of samples, which each tensor of the trees holds in its first dimension.

    Raises:
        TypeError: a leaf is neither tensor, number nor None.
        ValueError: two tensors disagree, or there are no samples.
    """
    names, counts = " and ".join(trees), dict[int, str]()
    for key, leaf in named_leaves(**trees):
        if isinstance(leaf, Tensor):
            counts.setdefault(len(leaf) if leaf.ndim else 0, key)
        elif not isinstance(leaf, int | float | None):
            kind = type(leaf).__name__
            raise TypeError(f"{names} must hold tensors, numbers and None, got {kind} as {key}")
    if len(counts) > 1:
        found = " and ".join(f"{count} in {key}" for count, key in list(counts.items())[:2])
        raise ValueError(f"{names} must hold equally many samples, in the first dimension, got {found}")
    if not any(counts):
        raise ValueError(f"{names} must hold at least one sample, got none")
    return next(iter(counts))


def tensors_of(value: TensorTree) -> tuple[Tensor, ...]:
    """Return the tensors that cross a boundary between stages.

    Raises:
        TypeError: the value is neither a tensor nor a tuple of tensors.
    """
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"layers must pass on a tensor or a tuple of tensors, got {type(tensor).__name__} "
                f"in {type(value).__name__}"
            )
    return tensors


def received(value: TensorTree, requires_grad: Sequence[bool]) -> TensorTree:
    """Return a received value as leaves of this stage's graph.

    Args:
        requires_grad: one flag for each tensor of the value.
    """
    for tensor, needs in zip(tensors_of(value), requires_grad, strict=True):
        tensor.requires_grad_(needs)
    return value


def handed_over(value: TensorTree) -> TensorTree:
    """Return a stage's outputs as the next stage's inputs: leaves that share their memory with them."""
    inputs: TensorTree = map_tensors(Tensor.detach, value)
    return received(inputs, [tensor.requires_grad for tensor in tensors_of(value)])


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient's values as a dense tensor; of a sparse gradient, the values that it stores."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, a tensor of one number."""
    return list(foreach_norm([dense(gradient) for gradient in gradients])) if gradients else []


def not_finite(tensor: Tensor) -> str | None:
    """Return the counts of NaN and infinity in a dense tensor, in words; None if all numbers are finite.

    The usual case takes one pass at the speed of memory, for the least and the largest number.
    """
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    values = tensor.detach().resolve_conj()
    if values.is_floating_point() and values.element_size() == 1:
        values = values.float()  # torch cannot compare floats of 8 bits
    numbers = torch.view_as_real(values) if values.is_complex() else values
    if not numbers.is_floating_point() or all(math.isfinite(bound) for bound in numbers.aminmax()):
        return None
    return f"{int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite of {values.numel()}"


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor of any device, layout and dtype, in C order."""
    here = tensor.detach().cpu()
    if here.layout != torch.strided:
        here = here.to_dense()
    here = here.resolve_conj().resolve_neg().contiguous()
    return here.reshape(-1).view(torch.uint8).numpy().tobytes()  # viewed as bytes: NumPy has no bfloat16


@torch.no_grad()
def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor in place, even into one that `expand` has made.

    Raises:
        ValueError: the values differ along a dimension where the tensor is expanded.
    """
    for dim in expanded_dimensions(tensor):
        first = values.narrow(dim, 0, 1)
        if not torch.equal(first.expand_as(values), values):
            raise ValueError(f"values must be equal along dimension {dim} of an expanded tensor, and differ")
        tensor, values = tensor.narrow(dim, 0, 1), first
    tensor.copy_(values)


def expanded_dimensions(tensor: Tensor) -> list[int]:
    """Return the dimensions along which a tensor is expanded: it stores each number once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [dim for dim, (size, stride) in enumerate(sizes) if size > 1 and stride == 0]


def tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each tensor that has several names, by each of its other names.

    Tensors are the same if they are the same view of the same memory, on any device.
    """
    first: dict[tuple[object, ...], str] = {}
    names = {
        name: first.setdefault(_memory(tensor), name) for name, tensor in tensors.items() if tensor.numel()
    }
    return {name: other for name, other in names.items() if name != other}


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    storage = tensor.untyped_storage()._cdata  # an address would not tell tensors on the meta device apart
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
