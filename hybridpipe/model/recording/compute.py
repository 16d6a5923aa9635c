"""Compute: the result of a call during a recording: real tensors, or fake ones that have shapes only.

Knows one event and torch's fake tensors, and no model.
Invariant: free glue is computed for real, since guards read it; a leaf module only on random numbers.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridpipe.model.recording.events import Event, Unsplittable, fact
from hybridpipe.model.recording.refusals import reads_data
from hybridpipe.model.recording.watch import Watch
from hybridpipe.model.tensors import tensors_in
from hybridpipe.torch_private import (
    FAKE_TENSOR_LOG,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    pytree,
)


def compute(
    event: Event,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    fake: FakeTensorMode | None,
    watch: Watch,
) -> Any:
    """Return the result of an event's call.

    Raises:
        Unsplittable: glue reads data that only one stage has.
    """
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs)))
    if fake is None or (event.free and not is_fake):
        with watch:
            return call(*args, **kwargs)
    try:
        with fake, watch, _quiet():
            return call(*args, **kwargs)
    except Unsplittable:
        raise
    except Exception as error:  # routing by data, or an operator that does not know its shapes
        if event.is_module:
            return _on_random_numbers(event, call, args, kwargs, fake, watch)
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            raise reads_data(event.where, event.name) from None
        raise


def _on_random_numbers(
    event: Event, call: Callable[..., Any], args: Any, kwargs: Any, fake: FakeTensorMode, watch: Watch
) -> Any:
    """Run a leaf module for real, twice, on numbers of which no result may depend that Python learns."""
    with watch:
        first = call(*random_like(args), **random_like(kwargs))
        second = call(*random_like(args), **random_like(kwargs))
    if list(map(fact, pytree.tree_leaves(first))) != list(map(fact, pytree.tree_leaves(second))):
        raise Unsplittable(f"{event.where}: {event.name} returns a shape or a number that follows from data")
    return pytree.tree_map_only(Tensor, lambda tensor: as_fake(tensor, fake), second)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging a traceback where an operator does not know its shapes."""
    logger = logging.getLogger(FAKE_TENSOR_LOG)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def as_fake(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """Return a fake tensor of the same shape, which requires a gradient if the tensor does."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return fake.from_tensor(tensor)


def random_like(tree: Any) -> Any:
    """Return a tree with fresh leaves in place of its tensors: normal numbers, and zeros for integers."""

    def fresh(tensor: Tensor) -> Tensor:
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        numbers = torch.randn(shape, dtype=dtype, device=device)
        return numbers.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, fresh, tree)
