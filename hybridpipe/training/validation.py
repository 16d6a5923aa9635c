"""Validation of the arguments of `Trainer`. Ranks and data sets are not known here.

Invariant: every function raises TypeError or ValueError in one line that says what is accepted.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridpipe import environment
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.config.options import GroupOptions, PlanOptions
from hybridpipe.data.source import Source
from hybridpipe.errors import UserError, shown
from hybridpipe.model.held_part import held_part
from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.sequential import num_layers
from hybridpipe.notices import notices
from hybridpipe.planning.checks import integer
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.registry import ASYNCHRONOUS
from hybridpipe.training.callbacks import Callback
from hybridpipe.training.loop import Breaks


def sizes(minibatch_size: Any, microbatch_size: Any) -> tuple[int, int | None]:
    """Both sizes as integers; the microbatch size may be None.

    Raises:
        ValueError: a size is no integer >= 1, or the microbatch is larger than the minibatch.
    """
    minibatch_size = integer("minibatch_size", minibatch_size, least=1)
    if microbatch_size is None:
        return minibatch_size, None
    microbatch_size = integer("microbatch_size", microbatch_size, least=1)
    if microbatch_size > minibatch_size:
        raise ValueError(
            f"microbatch_size must be <= minibatch_size = {minibatch_size}, got {microbatch_size}"
        )
    return minibatch_size, microbatch_size


def check_trainable(
    model: nn.Module,
    loss: Any,
    optimizer: Any,
    lr_scheduler: Any,
    precision: str = FP32.name,
    is_deferred: bool = False,
) -> None:
    """Check the model, its loss, and the factories that each stage calls for its own parameters.

    Args:
        is_deferred: tensors on the meta device get their values later.

    Raises:
        TypeError: an argument has another type, or the model is no `nn.Module`.
        ValueError: as `check_model`, `check_loss` and `check_precision`.
    """
    num_layers(model)
    for name, parameter in model.named_parameters():
        if held_part(parameter) is not None:
            raise ValueError(
                f"model: {name} is a part of a parameter, as an earlier Trainer has split its stage: make "
                "the model again, and resume from a checkpoint"
            )
    check_model(model, is_deferred)
    check_loss(loss, model)
    check_precision(precision, model)
    _check_factory("optimizer", optimizer, "parameters", "partial(torch.optim.SGD, lr=0.1)")
    if lr_scheduler is not None:
        example = "partial(torch.optim.lr_scheduler.StepLR, step_size=100)"
        _check_factory("lr_scheduler", lr_scheduler, "the optimizer", example)


def _check_factory(name: str, factory: Any, called_with: str, example: str) -> None:
    wanted = f"{name} must be a callable that is given {called_with} and makes one, such as {example}"
    if not callable(factory):
        made = f"the {type(factory).__name__} object itself" if hasattr(factory, "step") else repr(factory)
        raise TypeError(f"{wanted}, got {made}")


def check_precision(precision: str, model: nn.Module) -> None:
    """Check that autocast lowers what is trained.

    Raises:
        ValueError: the precision is unknown, or a trained parameter is not in float32.
    """
    if Precision(precision) == FP32:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"precision={precision!r} needs trained parameters in float32, got {name} in {dtype}: call "
                "model.float(), or leave precision at 'fp32', under which a model keeps its own types"
            )


def check_resume(resume: str | None, checkpoint: Checkpointing | None) -> None:
    """Check that `fit` knows where to save, and the folder to resume from.

    Raises:
        TypeError: `checkpoint` is something else, such as a folder's name.
        ValueError: `resume` is no word that is known, or has no folder.
    """
    if not isinstance(checkpoint, Checkpointing | None):
        raise TypeError(f"checkpoint must be a hybridpipe.Checkpointing(folder), got {shown(checkpoint)}")
    if resume not in (None, "auto"):
        raise ValueError(f'resume must be None or "auto", got {shown(resume)}; Trainer.resume takes a path')
    if resume is not None and checkpoint is None:
        raise ValueError('resume="auto" needs a folder: fit(..., checkpoint=Checkpointing(folder))')


def check_validated(callbacks: Iterable[Callback], validation: Any) -> None:
    """Raise UserError for a callback that would never act, as there are no validations."""
    for callback in callbacks:
        if callback.needs_validation and validation is None:
            given = "fit(..., validation=a data set), or validation_args in [data] of a config"
            raise UserError(f"{type(callback).__name__} decides by validations: it needs {given}")


def check_loss(loss: Any, model: nn.Module) -> None:
    """Check that the loss is a function of outputs and targets.

    Raises:
        TypeError: it is a class, or no function.
        ValueError: it has trained parameters that are not the model's.
    """
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
    """Yield the modules in a callable: itself, a partial's arguments, a method's object, a closure."""
    held: list[Any] = []
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, partial):
        held = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(getattr(function, "__self__", None), nn.Module):
        yield function.__self__
    else:
        cells = getattr(function, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty cell has no contents
        held += vars(function).values() if hasattr(function, "__dict__") else []
    for each in held:
        if isinstance(each, nn.Module | partial):
            yield from _modules_in(each)


def check_device(device: torch.device | str | None) -> torch.device | None:
    """Device from a name: a CPU or an existing GPU; "cuda" without a number is this rank's own.

    Raises:
        ValueError: the device is another kind, or does not exist.
    """
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
            raise ValueError(f"{accepted}: there is no GPU (torch.cuda.is_available() is False)")
        if (found.index or 0) >= count:
            raise ValueError(f"{accepted}: this rank sees {count} GPUs, 0 to {count - 1}")
    return found


def check_model(model: nn.Module, is_deferred: bool = False) -> None:
    """Check that the model's state consists of dense tensors, each a parameter or a buffer.

    Raises:
        ValueError: a tensor has no shape or data, is not dense or overlaps itself, or there is extra state.
    """
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for key, tensor in own:
        problem = _problem(tensor, is_deferred)
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


def _problem(tensor: Tensor, is_deferred: bool) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet, as in LazyLinear: run a few samples through the model first"
    if tensor.is_meta and not is_deferred:
        return (
            "has no data, being on the meta device: pass the function that makes the model instead, and each "
            "rank makes its own part of it"
        )
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kinds = (tensor.is_nested, "nested"), (tensor.is_quantized, "quantized")
        layout = str(tensor.layout).removeprefix("torch.")
        kind = next((name for is_it, name in kinds if is_it), layout)
        return f"must be a dense tensor, got {kind}: make it dense, or build it in the layer's forward"
    if _overlaps(tensor):
        return "must not overlap itself in memory in this way: register a clone() of it"
    return None


def _overlaps(tensor: Tensor) -> bool:
    """Return True if two elements share memory, except along a dimension made by `expand`."""
    steps = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1 and stride
    )
    reach = 1
    for stride, size in steps:
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def check_groups(groups: GroupOptions, plan: PlanOptions) -> None:
    """Raise UserError for groups under a schedule that never stops updating."""
    if groups.count > 1 and (plan.asynchronous or plan.schedule in ASYNCHRONOUS):
        got = "asynchronous = True" if plan.asynchronous else plan.schedule
        raise UserError(f"groups must have a synchronous schedule, got {got}")


def check_flushes(schedule: str) -> None:
    """Raise ValueError under a schedule that cannot train on one minibatch alone."""
    if schedule in ASYNCHRONOUS:
        what = f"{schedule}, whose minibatches follow each other without a pause"
        raise ValueError(f"train_step makes no sense under {what}; use fit")


def breaks(max_steps: Any, eval_every: Any, validation: Any) -> Breaks:
    """Breaks of `fit` from its arguments.

    Raises:
        ValueError: one is no integer >= 1, or `eval_every` has nothing to evaluate.
    """
    if eval_every is not None:
        eval_every = integer("eval_every", eval_every, least=1)
        if validation is None:
            raise ValueError(f"eval_every = {eval_every} needs validation, got None")
    steps = math.inf if max_steps is None else integer("max_steps", max_steps, least=1)
    return Breaks(steps, eval_every)


def check_breaks(wanted: Breaks, schedule: str) -> None:
    """Raise ValueError for breaks within an epoch under a schedule that has none."""
    if wanted != Breaks() and schedule in ASYNCHRONOUS:
        name = "max_steps" if wanted.eval_every is None else "eval_every"
        raise ValueError(
            f"{name} must not be given under {schedule}, whose minibatches overlap within an epoch: give "
            "epochs, or a data set with fewer samples, such as a Subset"
        )


def check_length_known(source: Source, plan: Plan) -> None:
    """Raise ValueError if a data set of unknown length meets a schedule that needs the length."""
    if source.is_iterable and plan.is_asynchronous:
        raise ValueError(
            f"{plan.schedule} needs the number of minibatches of an epoch, which an IterableDataset tells at "
            "its end only: use a synchronous schedule, such as 1f1b, or a data set with len() and an index"
        )


def warn_if_apart(num_ranks: int) -> None:
    """Print a warning if the launcher has started more ranks than the world has: each trains for itself."""
    if line := environment.apart(num_ranks):
        notices.tell(f"{line}: each trains alone; srun --mpi=pmix, or the mpirun of this MPI, makes them one")


def warn_if_in_evaluation_mode(model: nn.Module) -> None:
    """Print a warning if the whole model is in evaluation mode."""
    if not any(module.training for module in model.modules()):
        what = "the whole model is in evaluation mode and is trained in it; model.train() changes that"
        notices.tell(what)
