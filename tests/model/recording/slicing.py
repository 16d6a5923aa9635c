"""Runs a record in slices in one process, and compares it with the user's own forward.

Shared by the tests of this folder. Between slices tensors are detached and copied, as if they had been sent.
"""

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpipe.model import rng
from hybridpipe.model.recording import Event, ModelLookup, Record, Slice, call_arguments
from tests.model.one_process import Keyed, arguments

CPU = torch.device("cpu")
Loss = Callable[[Any], Tensor]


class Outcome(NamedTuple):
    """What a training step leaves: the loss, gradients and buffers by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def seed(event: Event) -> None:
    rng.seed_generators(event.key, CPU, python_too=True)


def in_slices(
    record: Record, cuts: Sequence[int], model: nn.Module, inputs: Any, loss: Loss, backward: bool = True
) -> Outcome:
    """Forward and backward over the slices between cuts, on a copy of the model."""
    model = copy.deepcopy(model)
    lookup, leaves = ModelLookup(model), pytree.tree_leaves(call_arguments(inputs))
    sent: Any = ()
    crossings = []
    for start, stop in itertools.pairwise([0, *cuts, len(record.events)]):
        part = Slice(record, start, stop, lookup)
        flags = [record.needs_gradient(value, start) for value in part.takes]
        got = [
            t.detach().clone().requires_grad_(flag and backward) for t, flag in zip(sent, flags, strict=True)
        ]
        crossings.append((sent, got))
        needed = [leaf if i in part.needs else None for i, leaf in enumerate(leaves)]
        sent = part.run([t.clone() if t.requires_grad else t for t in got], needed, seed)
    value = loss(sent)
    if backward:
        value.backward()
        for out, got in reversed(crossings[1:]):
            pairs = [(o, g.grad) for o, g in zip(out, got, strict=True) if g.grad is not None]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return outcome(model, value)


def own_forward(
    model: nn.Module, inputs: Any, loss: Loss, opened: Collection[str] = (), backward: bool = True
) -> Outcome:
    """The user's own forward, uncut, in one process; `opened`, of the record, matters if it draws numbers."""
    model = copy.deepcopy(model)
    keyed = Keyed(model, opened)
    keyed.begin(lambda key: key)
    with keyed:
        args, kwargs = arguments(pytree.tree_map_only(Tensor, torch.clone, inputs))
        outputs = model(*args, **kwargs)
    value = loss(outputs)
    if backward:
        value.backward()
    return outcome(model, value)


def outcome(model: nn.Module, loss: Tensor) -> Outcome:
    gradients = {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), gradients, {n: b.detach().clone() for n, b in model.named_buffers()})


def difference(got: Outcome, expected: Outcome, tolerance: float = 1e-10) -> str | None:
    """What differs, in words."""
    if not (got.loss - expected.loss).abs() <= tolerance:
        return f"loss {got.loss.item()} for {expected.loss.item()}"
    if got.gradients.keys() != expected.gradients.keys():
        return f"gradients of {sorted(got.gradients.keys() ^ expected.gradients.keys())[:3]}"
    if got.buffers.keys() != expected.buffers.keys():
        return f"buffers {sorted(got.buffers.keys() ^ expected.buffers.keys())[:3]}"
    for what in ("gradients", "buffers"):
        for name, tensor in getattr(expected, what).items():
            have = getattr(got, what)[name]
            if not torch.allclose(have.double(), tensor.double(), tolerance, tolerance, equal_nan=True):
                return f"{what}: {name}"
    return None


def cut_places(record: Record) -> list[int]:
    """The candidate cuts."""
    return [layer.start for layer in record.layers[1:]]
