"""Validation: arguments of `Trainer` and models that cannot be trained as they are, refused in one line.

Knows torch, no ranks and no plan; data sets are `samples`' affair.
Every function raises TypeError or ValueError that says what is accepted.
"""

import sys
from collections.abc import Iterator
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridpipe.planning.checks import plain


def integer(name: str, value: Any, least: int = -(2**63)) -> int:
    """A Python integer of at most 64 bits, from that or from NumPy's."""
    what = "a 64-bit integer" if least < 0 else f"an integer >= {least}"
    if isinstance(value, bool) or not isinstance(plain(value), int) or not least <= value < 2**63:
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return int(value)


def sizes(minibatch_size: Any, microbatch_size: Any) -> tuple[int, int | None]:
    """The two sizes as integers; a microbatch, where it is given, is no larger than the minibatch."""
    minibatch_size = integer("minibatch_size", minibatch_size, least=1)
    if microbatch_size is None:
        return minibatch_size, None
    microbatch_size = integer("microbatch_size", microbatch_size, least=1)
    if microbatch_size > minibatch_size:
        raise ValueError(
            f"microbatch_size must be <= minibatch_size = {minibatch_size}, got {microbatch_size}"
        )
    return minibatch_size, microbatch_size


def check_factories(optimizer: Any, lr_scheduler: Any) -> None:
    """Optimizer and scheduler are made by each stage, for its own parameters."""
    _check_factory("optimizer", optimizer, "parameters", "partial(torch.optim.SGD, lr=0.1)")
    if lr_scheduler is not None:
        example = "partial(torch.optim.lr_scheduler.StepLR, step_size=100)"
        _check_factory("lr_scheduler", lr_scheduler, "the optimizer", example)


def _check_factory(name: str, factory: Any, called_with: str, example: str) -> None:
    wanted = f"{name} must be a callable that is given {called_with} and makes one, such as {example}"
    if not callable(factory):
        made = f"the {type(factory).__name__} object itself" if hasattr(factory, "step") else repr(factory)
        raise TypeError(f"{wanted}, got {made}")


def check_loss(loss: Any, model: nn.Module) -> None:
    """A function of outputs and targets, with nothing to train that is not the model's."""
    wanted = "loss must be a function loss(outputs, targets), such as torch.nn.functional.cross_entropy"
    if isinstance(loss, type):
        raise TypeError(f"{wanted}, got the class {loss.__name__}: pass an object, {loss.__name__}()")
    if not callable(loss):
        raise TypeError(f"{wanted}, got {loss!r}")
    of_model = set(map(id, model.parameters()))
    for module in _modules_in(loss):
        named = module.named_parameters()
        trained = [name for name, p in named if p.requires_grad and id(p) not in of_model]
        if trained:
            raise ValueError(
                f"loss must have no parameters of its own, as no stage would train them, got "
                f"{type(module).__name__} with {', '.join(trained)}: make it the model's last layer, or set "
                "requires_grad = False"
            )


def _modules_in(function: Any) -> Iterator[nn.Module]:
    """The modules that a callable holds: itself, the arguments of a partial, its object, its closure."""
    held: list[Any] = []
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, partial):
        held = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(getattr(function, "__self__", None), nn.Module):
        yield function.__self__
    else:
        cells = getattr(function, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty one has none
        held += vars(function).values() if hasattr(function, "__dict__") else []
    for each in held:
        if isinstance(each, nn.Module | partial):
            yield from _modules_in(each)


def check_device(device: torch.device | str | None) -> torch.device | None:
    """A CPU, or a GPU that is there; "cuda" without a number is this rank's own."""
    if device is None:
        return None
    accepted = f"device must be 'cpu', 'cuda' or 'cuda:N', got {str(device)!r}"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(accepted) from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(accepted)
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ValueError(f"{accepted}: no GPU is seen here (torch.cuda.is_available() is False)")
        if (found.index or 0) >= count:
            raise ValueError(f"{accepted}: this rank sees {count} GPUs, 0 to {count - 1}")
    return found


def check_model(model: nn.Module) -> None:
    """Its state consists of dense tensors with numbers in them, each a parameter or a buffer by its name."""
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for key, tensor in own:
        problem = _problem(tensor)
        if problem is not None:
            raise ValueError(f"{key} of the model {problem}")
    known = {id(tensor) for _, tensor in own}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) not in known:
            raise ValueError(
                f"{key} in model.state_dict() must be a parameter or a buffer of the model, got "
                f"{type(value).__name__}: extra state (get_extra_state) and tensors that a state_dict hook "
                "makes are neither sent to other ranks nor saved; keep it as a buffer"
            )


def _problem(tensor: Tensor) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet, as in LazyLinear: run a few samples through the model first"
    if tensor.is_meta:
        return "has no numbers, being on the meta device: initialise the model on the CPU first"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kinds = (tensor.is_nested, "nested"), (tensor.is_quantized, "quantized")
        layout = str(tensor.layout).removeprefix("torch.")
        kind = next((name for is_it, name in kinds if is_it), layout)
        return f"must be a dense tensor, got {kind}: make it dense, or build it in the layer's forward"
    if _overlaps(tensor):
        return "must not overlap itself in memory in this way: register a clone() of it"
    return None


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements share memory, other than along a dimension that `expand` has made."""
    steps = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1 and stride
    )
    reach = 1
    for stride, size in steps:
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def warn_if_in_evaluation_mode(model: nn.Module) -> None:
    """Tell that the model trains as it is, where all of it is in evaluation mode."""
    if not any(module.training for module in model.modules()):
        what = "all of the model is in evaluation mode, and is trained so; model.train() changes that"
        print(f"hybridpipe: {what}", file=sys.stderr, flush=True)
