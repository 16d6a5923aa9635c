"""Observed: one pass of all layers, which finds what each receives and passes on, and the bytes it keeps.

Knows stages of one layer; no clock. Invariant: a storage counts in the layer that keeps it first.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.environment.allocator import returning_freed_memory
from hybridpipe.measure.allocated import Allocated, allocated
from hybridpipe.model.tensors import (
    TensorTree,
    Tree,
    map_tensors,
    num_samples,
    received,
    tensors_in,
    tensors_of,
)
from hybridpipe.stage.recompute import copied
from hybridpipe.stage.stage import Stage


class LayerBytes(NamedTuple):
    """Bytes of one microbatch in one layer."""

    activation: int  # kept for the backward
    output: int  # passed on to the next layer, with what that layer relays
    gradient: int  # received from it


class Observed(NamedTuple):
    """One layer in a pass of the whole model: enough to run it by itself, as often as needed.

    Args:
        form: of the microbatch, as the layer has said.
        received: what the layer before passed on, as leaves; None for the first layer.
        gradients: of its outputs; empty for the last layer.
        workspace: bytes that its passes have for a moment, besides what they keep, their inputs, and the
            gradients of its parameters; None where that could not be seen.
    """

    form: int
    received: TensorTree | None
    gradients: tuple[Tensor | None, ...]
    bytes: LayerBytes
    workspace: int | None = None


@returning_freed_memory()  # nothing is timed, and gradients that come and go would each leave a hole
def observe(
    stages: Sequence[Stage], inputs: Tree, targets: Tree, keep_gradients: bool = True
) -> list[Observed]:
    """Run one forward and one backward of a microbatch through layers in order.

    Args:
        keep_gradients: False to drop each layer's gradients at once.
    """
    kept: dict[int, Any] = {
        tensor.untyped_storage().data_ptr(): tensor
        for stage in stages
        for tensor in (*stage.module.parameters(), *stage.module.buffers(), *stage.copy_weights())
    }
    counting = [0]
    for stage in stages:
        stage.module.zero_grad(set_to_none=True)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = tensor  # alive until the end, so that no address is used twice
            counting[-1] += storage.nbytes()
        return tensor

    found = []
    value: TensorTree | None = None
    for stage in stages:
        form = stage.layers.form(num_samples(inputs=inputs, targets=targets), lambda: inputs, training=True)
        given = inputs if stage.layers.needs_inputs(training=True) else None
        before = copied(value)  # as it is before the layer, which may work in place
        counting.append(0)
        crossing: tuple[Tensor, ...] = ()  # no layer follows the loss
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, allocated(stage.device) as seen:
            if stage.loss is None:
                outputs = stage.forward(0, value, step=0, inputs=given, form=form)
                value = _leaves(outputs)
                crossing = tensors_of(outputs)
            else:
                stage.forward_loss(0, value, targets, share=1.0, step=0, inputs=given, form=form)
        sent_bytes = stage.layers.precision.sent_bytes
        passed_on = sent_bytes(crossing)
        returned = sent_bytes(tensor for tensor in crossing if tensor.requires_grad)
        of_layer = LayerBytes(counting[-1], passed_on, returned)
        found.append(Observed(form, before, (), of_layer, seen.passing))
    kept.clear()  # backwards free what is kept as they come to it
    gradients: tuple[Tensor | None, ...] = ()
    for i, stage in reversed(list(enumerate(stages))):
        found[i] = found[i]._replace(gradients=gradients)
        with allocated(stage.device) as seen:
            gradients = stage.backward(0, gradients)
        found[i] = found[i]._replace(workspace=_workspace(found[i], stage, seen))
        if not keep_gradients:
            stage.module.zero_grad(set_to_none=True)
    return found


def stand_ins(stages: Sequence[Stage], sizes: Sequence[Sequence[Observed]]) -> list[int]:
    """Return for each layer the first one that takes as long.

    Such layers are of equal signature, receive values of equal shapes and types, and keep equally many bytes.

    Args:
        sizes: the layers observed with microbatches of several sizes.
    """
    first: dict[Any, int] = {}
    keys = (
        (stage.layers.signature(), stage.loss is None, *(_facts(layers[i]) for layers in sizes))
        for i, stage in enumerate(stages)
    )
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors' elements; of sparse ones, those that they store."""
    return sum(part.nbytes for tensor in tensors for part in _stored(tensor))


def trained_bytes(stage: Stage) -> int:
    """Return the bytes of a stage's trained parameters."""
    return total_bytes(p for p in stage.module.parameters() if p.requires_grad)


def largest_bytes(stage: Stage) -> int:
    """Return the bytes of the largest of a stage's trained parameters."""
    return max((p.nbytes for p in stage.module.parameters() if p.requires_grad), default=0)


def frozen_bytes(stage: Stage) -> int:
    """Return the bytes of a stage's other parameters and of its buffers."""
    frozen = (p for p in stage.module.parameters() if not p.requires_grad)
    return total_bytes([*frozen, *stage.module.buffers()])


def _workspace(found: Observed, stage: Stage, backward: Allocated) -> int | None:
    """Return a layer's workspace, by what was seen of its forward and its backward."""
    if found.workspace is None or backward.most is None:
        return None
    gradients = total_bytes(p.grad for p in stage.module.parameters() if p.grad is not None)
    return max(0, found.workspace, backward.most - gradients)


def _stored(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor._values(), tensor._indices()) if tensor.is_sparse else (tensor,)


def _facts(layer: Observed) -> Any:
    tensors = [(each.shape, each.dtype, each.requires_grad) for each in tensors_in(layer.received)]
    return layer.bytes, tuple(tensors), tuple(gradient is None for gradient in layer.gradients)


def _leaves(outputs: TensorTree) -> TensorTree:
    """Return a stage's outputs as leaves of the next stage's graph."""
    flags = [tensor.requires_grad for tensor in tensors_of(outputs)]
    return received(map_tensors(lambda tensor: tensor.detach(), outputs), flags)
