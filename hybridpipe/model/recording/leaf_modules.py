"""Leaf modules: the modules of a model that are called whole.

Knows the module tree, nothing of a forward.
Invariant: no leaf module holds another, and the choice depends on the model alone, never on a plan.
"""

from collections.abc import Collection

import torch
from torch import nn

from hybridpipe.model.held_part import whole_shape

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
RANDOM_OR_COUNTING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)


def leaf_modules_of(
    model: nn.Module, opened: Collection[str] = (), share: float = 1.0, closed: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Return the leaf modules of a model by path, in order.

    A module is opened, so that its children become leaf modules, if it is a container, if most of its
    parameters stand in lists of several children, if it has more than `share` of the model's parameters, or
    if `opened` names it. One whose children have no parameters, such as experts in 3-D weights with an
    activation function, is not opened for its size, nor is TorchScript, as Python does not call its
    children. An opened module without children becomes glue, as do modules without parameters that neither
    draw random numbers, keep statistics nor have hooks.

    Args:
        opened: paths of further modules to open.
        share: part of the model's parameters, in (0, 1].
        closed: paths of modules that are not opened for their size.
    """
    sizes = {id(module): _size(module) for module in model.modules()}
    leaf_modules: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        size = sizes[id(module)]
        divides = any(sizes[id(child)] for child in module.children())
        large = size > share * sizes[id(model)] or 2 * _listed(module, sizes) > size
        opens = large and divides and path not in closed
        has_children = any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule)
        if path in opened or (has_children and (path == "" or type(module) in CONTAINERS or opens)):
            for name, child in module.named_children():
                visit(f"{path}.{name}".lstrip("."), child)
        elif id(module) not in seen and _matters(module):
            seen.add(id(module))
            leaf_modules[path] = module

    visit("", model)
    return leaf_modules


def _size(module: nn.Module) -> int:
    return sum(whole_shape(parameter).numel() for parameter in module.parameters())  # alike on all ranks


def _listed(module: nn.Module, sizes: dict[int, int]) -> int:
    """Parameters that stand in lists of several children."""
    return sum(
        sizes[id(child)] if isinstance(child, CONTAINERS) and len(child) > 1 else _listed(child, sizes)
        for child in module.children()
    )


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks."""
    return any(getattr(module, table) for table in HOOKS)


def _matters(module: nn.Module) -> bool:
    return any(
        part._parameters or isinstance(part, RANDOM_OR_COUNTING) or has_hooks(part)
        for part in module.modules()
    )
