"""Initialise: lets the modules of a model that was built on the meta device set their own tensors.

Knows no tape and no file. Invariant: each module comes once, after those that it holds, as when they are
constructed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from torch import Tensor, nn

OWN_METHODS = (
    "reset_parameters",
    "_reset_parameters",
    "init_weights",
)  # the first that a module has is called


def is_on_meta(model: nn.Module) -> bool:
    """Return True if a parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(model))


def initialisers(model: nn.Module) -> list[Callable[[], object]]:
    """Return the calls that set the tensors of modules on the meta device.

    A module is set by the nearest module around it with `_init_weights(module)`, as models of Hugging Face
    have, or else by a method of its own (`OWN_METHODS`).
    """
    return list(_of_module(model, None, set()))


def _of_module(
    module: nn.Module, outer: Callable[[nn.Module], object] | None, done: set[nn.Module]
) -> Iterator[Callable[[], object]]:
    """Yield the calls of a module and those in it; `outer` sets modules of the one around it."""
    if module in done or not is_on_meta(module):
        return
    done.add(module)
    outer = getattr(module, "_init_weights", outer)
    for child in module.children():
        yield from _of_module(child, outer, done)
    own = (getattr(module, name) for name in OWN_METHODS if hasattr(module, name))
    yield from [partial(outer, module)] if outer is not None else islice(own, 1)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
