"""Recompute: what a microbatch's second forward needs to come out like its first.

Its random numbers are keyed, its inputs stashed; left are the buffers that a forward changes, such as
running statistics: the second forward works on copies of what they were before the first.
Source: rematerialisation, GPipe (Huang et al. 2019).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe.model.tensors import TensorTree, map_tensors, rebuild, tensors_of
from hybridpipe.stage.weights import places


class _Before(NamedTuple):
    copies: dict[str, Tensor]
    versions: dict[str, tuple[Tensor, int]]  # of those not copied


class ChangingBuffers:
    """The buffers that forwards change. The first forward shows which they are, later ones may add some."""

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers
        self._changing: set[str] | None = None

    def before(self) -> _Before:
        """Call before a first forward."""
        buffers = self._buffers()
        changing = buffers.keys() if self._changing is None else self._changing
        copy_of = {id(buffer): buffer.clone() for path, buffer in buffers.items() if path in changing}
        return _Before(
            {path: copy_of[id(buffer)] for path, buffer in buffers.items() if path in changing},
            {path: (buffer, buffer._version) for path, buffer in buffers.items() if path not in changing},
        )

    def after(self, before: _Before) -> Mapping[str, Tensor]:
        """Call after it. The buffers that it changed, by their path in the stage, as they were before."""
        buffers = self._buffers()
        if self._changing is None:
            self._changing = {
                path for path, copy in before.copies.items() if not _same(buffers.get(path), copy)
            }
        copies = {path: copy for path, copy in before.copies.items() if path in self._changing}
        for path, (buffer, version) in before.versions.items():
            if buffers.get(path) is not buffer or buffer._version != version:
                self._changing.add(path)
                copies[path] = buffer.clone()  # too late for its numbers, in time to change it once only
        return copies

    def _buffers(self) -> dict[str, Tensor]:
        return dict(places(self._layers, lambda module: module._buffers))


def _same(now: Tensor | None, before: Tensor) -> bool:
    # a changed number shows in the value: fused kernels change buffers without counting versions
    return now is not None and now.dtype == before.dtype and torch.equal(now, before)


def copied(value: TensorTree) -> TensorTree:
    """The value as leaves with memory of their own, as a layer may work in place."""
    return like(map_tensors(lambda tensor: tensor.detach().clone(), value), value)


def without_graph(value: TensorTree) -> TensorTree:
    """The value without its graph, still telling which of its tensors require grad."""
    return like(map_tensors(Tensor.detach, value), value)


def like(value: TensorTree, other: TensorTree) -> TensorTree:
    """The value's tensors, as leaves that require grad where the other's do."""
    tensors = tuple(
        tensor.requires_grad_(needs.requires_grad)
        for tensor, needs in zip(tensors_of(value), tensors_of(other), strict=True)
    )
    return rebuild(tensors, value)
