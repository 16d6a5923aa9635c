"""Layer bytes: the bytes that one microbatch keeps and passes on in each layer.

Knows stages of one layer; no clock. Invariant: a storage counts in the layer that keeps it first.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.model.tensors import TensorTree, Tree, map_tensors, received, tensors_of
from hybridpipe.stage.stage import Stage


class LayerBytes(NamedTuple):
    """Bytes of one microbatch in one layer."""

    activation: int  # kept for the backward
    output: int  # passed on to the next layer
    gradient: int  # received from it


def measure_bytes(stages: list[Stage], inputs: Tree, targets: Tree) -> list[LayerBytes]:
    """Count the bytes of each layer. A storage counts in the layer that keeps it first."""
    kept: dict[int, Any] = {
        tensor.untyped_storage().data_ptr(): tensor
        for stage in stages
        for tensor in (*stage.module.parameters(), *stage.module.buffers())
    }
    counting = [0]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = tensor  # alive until the end, so that no address is used twice
            counting[-1] += storage.nbytes()
        return tensor

    found = []
    value: TensorTree | None = None
    for stage in stages:
        given = inputs if stage.layers.needs_inputs(training=True) else None
        counting.append(0)
        crossing: tuple[Tensor, ...] = ()  # no layer follows the loss
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if stage.loss is None:
                outputs = stage.forward(0, value, step=0, inputs=given)
                value = leaves(outputs, require_grad(outputs))
                crossing = tensors_of(outputs)
            else:
                stage.forward_loss(0, value, targets, share=1.0, step=0, inputs=given)
        returned = total_bytes(tensor for tensor in crossing if tensor.requires_grad)
        found.append(LayerBytes(counting[-1], total_bytes(crossing), returned))
    gradients: tuple[Tensor | None, ...] = ()
    for stage in reversed(stages):
        gradients = stage.backward(0, gradients)
    return found


def leaves(outputs: TensorTree, flags: list[bool]) -> TensorTree:
    """Return a stage's outputs as leaves of the next stage's graph."""
    return received(map_tensors(lambda tensor: tensor.detach(), outputs), flags)


def require_grad(outputs: TensorTree) -> list[bool]:
    """Return which of a stage's outputs require a gradient."""
    return [tensor.requires_grad for tensor in tensors_of(outputs)]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors' elements."""
    return sum(tensor.nbytes for tensor in tensors)
