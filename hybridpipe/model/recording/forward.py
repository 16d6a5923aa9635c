"""Forward: records a user's forward until two recordings agree, and leaves the model as it was.

Knows the model and the recorder; a record that it returns knows neither.
Invariant: attributes, buffers, hooks, modes, gradient flags, random states are as before, also if it fails.
"""

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.recording.births import Births
from hybridpipe.model.recording.carried import Name, refuse_carried
from hybridpipe.model.recording.compute import random_like
from hybridpipe.model.recording.events import Diverged, Event, Unsplittable, call_arguments, line_of
from hybridpipe.model.recording.leaf_modules import has_hooks, leaf_modules_of
from hybridpipe.model.recording.reads import LossReads
from hybridpipe.model.recording.record import Record
from hybridpipe.model.recording.recorder import Recorder
from hybridpipe.model.recording.refusals import hooked_and_opened, random_path
from hybridpipe.model.recording.slices import ModelLookup, Slice
from hybridpipe.model.recording.surroundings import Surroundings
from hybridpipe.model.recording.watch import Watch
from hybridpipe.model.tensors import map_tensors, tensors_in
from hybridpipe.torch_private import FakeTensorMode, pytree
from hybridpipe.types import Loss

MOST_RECORDINGS = 16  # each opens leaf modules, or is compared with the one before
MOST_THAT_DIFFER = 4  # lazily made attributes let the second differ from the first
DRAWS_TRIED = 64  # of guards that follow from random numbers
ANOTHER_DRAW = 0x9E3779B97F4A7C15


class _Task(NamedTuple):
    """A recording to make; `hooked` are the modules that have hooks before the forward registers any."""

    model: nn.Module
    args: Any
    kwargs: Any
    loss: Loss | None
    targets: Any
    share: float
    closed: Collection[str]
    watch: Watch
    hooked: Mapping[str, nn.Module]
    precision: Precision


def record(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool,
    loss: Loss | None = None,
    targets: Any = None,
    share: float = 1.0,
    closed: Collection[str] = (),
    precision: Precision = FP32,
) -> Record:
    """Record a model's forward.

    Leaf modules compute shapes only, glue that follows from the inputs alone computes for real. A leaf module
    without known shapes runs on random numbers. A forward whose glue fake tensors cannot run is recorded for
    real. Parameters and buffers on the meta device need no values. A loss gets random numbers in place of
    what the model returns; where it fails on them, all is recorded for real.

    Args:
        inputs: a dict goes by keyword, a tuple or list by position, anything else alone.
        training: record with gradients and in the modules' own modes; otherwise under `eval()` and `no_grad`.
        loss: takes what the model returns, and `targets`; it is checked to read nothing else of the forward.
        share: modules with more than this part of the parameters are opened, in (0, 1], but for the `closed`.
        precision: in which the slices will run.

    Raises:
        Unsplittable: the forward, or the loss, cannot be run in slices.
    """
    args, kwargs = call_arguments(inputs)
    own = [model, loss] if isinstance(loss, nn.Module) else [model]
    watch = Watch(tensor for each in own for tensor in (*each.parameters(), *each.buffers()))
    hooked = {path: module for path, module in model.named_modules() if has_hooks(module)}
    task = _Task(model, args, kwargs, loss, targets, share, closed, watch, hooked, precision)
    with _untouched(*own), torch.set_grad_enabled(training):
        if not training:
            model.eval()
        try:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                with _standing_in(model, fake, _device_of((args, kwargs))):
                    made = _checked(task, fake)
            except Unsplittable:
                raise
            except Exception:  # glue that does not know its shapes, or a loss that is not for any numbers
                with _standing_in(model, None, _device_of((args, kwargs))):
                    made = _checked(task, None)
            with precision.recording():
                _refuse_random_path(made, model, pytree.tree_leaves((args, kwargs)))
            return made
        except Unsplittable:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise Unsplittable(f"{line_of(error)}: recording fails: {what}") from error
        finally:
            watch.restore()


def _checked(task: _Task, fake: FakeTensorMode | None) -> Record:
    """Record, and refuse a loss that reads what the forward made but did not return."""
    before = Surroundings([task.model, task.loss])
    try:
        made, recorder = _agreeing(task, fake, before)
        if task.loss is not None:
            # not fake: a loss may pick tokens by a mask
            outputs = recorder.outputs if fake is None else random_like(recorder.outputs)
            outputs = map_tensors(task.precision.raised, outputs)
            with task.watch, LossReads(recorder.made, outputs):
                task.loss(outputs, task.targets)
        return made
    finally:
        before.restore()


def _agreeing(task: _Task, fake: FakeTensorMode | None, begin: Surroundings) -> tuple[Record, Recorder]:
    """Record until no tensor escapes from a leaf module, and two recordings agree.

    Args:
        begin: where each series of recordings begins.
    """
    opened: dict[str, str] = {}
    before: list[Any] = []
    differing = 0
    carried: Mapping[Name, str] = {}
    earlier = Births()
    for _ in range(MOST_RECORDINGS):
        leaf_modules = leaf_modules_of(task.model, opened, task.share, task.closed)
        _refuse_hooks(task.hooked, leaf_modules)
        recorder = Recorder(task.model, leaf_modules, task.watch, fake, earlier)
        with task.precision.recording():
            found = recorder.run(task.args, task.kwargs)
        task.watch.restore()
        earlier.include(recorder.born)
        if recorder.escapes:
            opened, before = opened | recorder.escapes, []
            begin.restore()  # else what a leaf module has kept would be there already
            continue
        found.opened = opened
        signature = found.signature()
        if signature == before:
            refuse_carried(carried, recorder.carried.changed)
            return found, recorder
        carried = recorder.carried.changed
        differing += bool(before)
        if differing == MOST_THAT_DIFFER:
            raise Unsplittable(_difference(found, before, signature))
        before = signature
    module, reason = next(reversed(opened.items()))
    raise Unsplittable(f"{reason} ({module}, and {len(opened) - 1} leaf modules before)")


def _refuse_hooks(hooked: Mapping[str, nn.Module], leaf_modules: Mapping[str, nn.Module]) -> None:
    """Refuse the user's hooks on a module that is opened: slices call its parts only."""
    called = {id(part) for module in leaf_modules.values() for part in module.modules()}
    for path, module in hooked.items():
        if id(module) not in called:
            raise hooked_and_opened(path, type(module).__name__)


def _difference(found: Record, before: list[Any], after: list[Any]) -> str:
    """Return one line about the first event that differs."""
    pairs = enumerate(itertools.zip_longest(before[:-1], after[:-1]))
    i = next((i for i, (a, b) in pairs if a != b), len(found.events))
    line = found.events[i].where if i < len(found.events) else "the end of the forward"
    name = found.events[i].name if i < len(found.events) else "the result"
    return f"{line}: {name} is not the same in two calls; does the forward carry state from call to call?"


def _refuse_random_path(record: Record, model: nn.Module, leaves: list[Any]) -> None:
    """Refuse a guard that depends on random numbers: a path would change with the step and the microbatch."""
    guards = Slice(record, 0, 0, ModelLookup(model))
    for n in range(DRAWS_TRIED if guards.draws else 0):

        def seed(event: Event, n: int = n) -> None:
            torch.default_generator.manual_seed(event.key ^ (n * ANOTHER_DRAW & (2**63 - 1)))

        try:
            guards.run((), leaves, seed)
        except Diverged as error:
            raise random_path(str(error)) from None


@contextmanager
def _untouched(*owners: nn.Module) -> Iterator[None]:
    """Restore modules' modes and gradient flags, and the process's random states."""
    modes = [(module, module.training) for owner in owners for module in owner.modules()]
    flags = [(parameter, parameter.requires_grad) for owner in owners for parameter in owner.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        for i, state in enumerate(on_devices):
            torch.cuda.set_rng_state(state, i)


@contextmanager
def _standing_in(model: nn.Module, fake: FakeTensorMode | None, device: torch.device) -> Iterator[None]:
    """Put tensors on `device` in the place of those on another, such as the meta device or a GPU.

    Args:
        fake: the mode of fake tensors to put there; None: copies.
    """
    made: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
    for table in tables:
        for name, tensor in table.items():
            if tensor is None or tensor.device == device:
                continue
            if id(tensor) not in made:
                with nullcontext() if fake is None else fake:
                    new = tensor.detach().to(device) if fake is None else _like(tensor, device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
            replaced.append((table, name, tensor))
    for table, name, tensor in replaced:
        table[name] = made[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device, requires_grad=False)


def _device_of(tree: Any) -> torch.device:
    return next((tensor.device for tensor in tensors_in(tree)), torch.device("cpu"))
