"""Recompute: keeps the buffers that a forward changes, so that its second run equals its first.

Random numbers are keyed and inputs stashed elsewhere; running statistics, for one, need copies.
Source: rematerialisation, GPipe (Huang et al. 2019).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe.model.tensors import Tree, map_tensors
from hybridpipe.stage.weights import named_tensors


class _Before(NamedTuple):
    """The buffers before a forward, by path: copies of some, and autograd's version counter of the others."""

    copies: dict[str, Tensor]
    versions: dict[str, tuple[Tensor, int]]


class ChangingBuffers:
    """The buffers that forwards change, as found in the first forward; later ones may add some."""

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers
        self._changing: set[str] | None = None

    def before(self) -> _Before:
        """Copy the buffers that a first forward may change; call this before it."""
        buffers = self._buffers()
        changing = buffers.keys() if self._changing is None else self._changing
        copy_of = {id(buffer): buffer.clone() for path, buffer in buffers.items() if path in changing}
        return _Before(
            {path: copy_of[id(buffer)] for path, buffer in buffers.items() if path in changing},
            {path: (buffer, buffer._version) for path, buffer in buffers.items() if path not in changing},
        )

    def after(self, before: _Before) -> Mapping[str, Tensor]:
        """Return the changed buffers as they were before, by path in the stage; call after the forward."""
        buffers = self._buffers()
        if self._changing is None:
            self._changing = {
                path for path, copy in before.copies.items() if not _same(buffers.get(path), copy)
            }
        copies = {path: copy for path, copy in before.copies.items() if path in self._changing}
        for path, (buffer, version) in before.versions.items():
            if buffers.get(path) is not buffer or buffer._version != version:
                self._changing.add(path)
                copies[path] = buffer.clone()  # changed once already; the second forward changes the copy
        return copies

    def _buffers(self) -> dict[str, Tensor]:
        return dict(named_tensors(self._layers, lambda module: module._buffers))


def _same(now: Tensor | None, before: Tensor) -> bool:
    # values are compared, since fused kernels change buffers without raising the version counter
    return now is not None and now.dtype == before.dtype and torch.equal(now, before)


def copied(tree: Tree) -> Tree:
    """Return a copy of a tree with its tensors as leaves, since a layer may change its inputs in place."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), tree)


def without_graph(tree: Tree) -> Tree:
    """Return a tree without its graph; its tensors require grad as before."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), tree)
