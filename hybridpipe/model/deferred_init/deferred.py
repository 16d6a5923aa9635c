"""Deferred: a model whose parameters and buffers have no values yet, and those that a rank is to have.

Knows no ranks and no plan. Invariant: a tensor that a module holds twice, or two modules hold, stays one; all
that is filled is what the factory would have made at once.
"""

import logging
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.environment import allocator
from hybridpipe.model.deferred_init.initialise import initialisers, is_on_meta
from hybridpipe.model.deferred_init.tape import CannotDefer, Ref, Tape
from hybridpipe.model.tensors import map_tensors
from hybridpipe.notices import notices
from hybridpipe.torch_private import FAKE_TENSOR_LOG, FakeTensor, FakeTensorMode, pytree

if TYPE_CHECKING:
    from mpi4py import MPI

Factory = Callable[[], nn.Module]
_REMEDY = "pass the function that makes the model, in place of the model"


@dataclass
class Numbers:
    """The source of the numbers of a model's tensors.

    Args:
        refs: its parameters and buffers on the tape, by each of their names.
        given: functions that return tensors from elsewhere, such as a file, by name; they go first.
        unset: names of those that have numbers if they are given only, and the kinds of their modules.
    """

    tape: Tape
    refs: Mapping[str, Ref]
    given: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    unset: dict[str, str] = field(default_factory=dict)

    @property
    def lacks(self) -> str:
        """Name a tensor that has no values yet, and its module's class; "" if all have."""
        return next(
            (f"{name} of a {kind}" for name, kind in self.unset.items() if name not in self.given), ""
        )

    def of(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors with their numbers, by name; ValueError if they have none."""
        if self.lacks:
            what = f"{self.lacks} is on the meta device, and no reset_parameters sets it"
            raise ValueError(f"{what}: resume from a file of weights first, or {_REMEDY}")
        given = {name: self.given[name]() for name in names if name in self.given}
        on_tape = {name: self.refs[name] for name in names if name not in given}
        given_storages = {self.refs[name].storage for name in self.given if name in self.refs}
        for name, ref in on_tape.items():
            if ref.storage in given_storages:
                raise ValueError(f"{name} of the model is a view of a tensor whose numbers a file gives")
        return self.tape.numbers(on_tape) | given

    def fill(self, model: nn.Module, *parts: nn.Module) -> None:
        """Put numbers into those of the model's tensors on the meta device that the parts hold; default: all.

        Each is replaced, wherever one of the model's modules holds it, by one with the same attributes.
        """
        wanted = {id(each) for part in parts or (model,) for _, each in _held(part)}
        self._fill(model, wanted)

    def _fill(self, model: nn.Module, wanted: Collection[int]) -> None:
        held = {name: each for name, each in _held(model) if each.is_meta}
        names = {id(each): name for name, each in held.items() if id(each) in wanted}
        for name in names.values():
            if _has_hooks(held[name]):
                raise ValueError(f"{name} of the model has got a hook before its numbers: register it later")
        made = self.of(names.values())
        _replace(model, {key: _like(held[name], made[name]) for key, name in names.items()})

    def fill_for_measuring(self, model: nn.Module) -> None:
        """Put buffers into a model's copy, and parameters that all begin at one address.

        A time does not depend on a parameter's values, and a model that is larger than a rank can be
        measured.
        """
        held = [each for _, each in _held(model) if each.is_meta]
        parameters = [each for each in held if isinstance(each, nn.Parameter)]
        self._fill(model, {id(each) for each in held}.difference(map(id, parameters)))
        most: dict[torch.dtype, int] = {}
        for each in parameters:
            most[each.dtype] = max(most.get(each.dtype, 0), each.numel())
        pools = {dtype: torch.empty(count, dtype=dtype).fill_(0.02) for dtype, count in most.items()}
        alike = {
            id(each): _like(each, pools[each.dtype][: each.numel()].view(each.size())) for each in parameters
        }
        _replace(model, alike)


class Built(NamedTuple):
    """A model from a factory.

    Args:
        model: its parameters and buffers are on the meta device, or all have their numbers.
        numbers: None where they have.
        why_whole: the reason for that.
    """

    model: nn.Module
    numbers: Numbers | None
    why_whole: str = ""


def build(factory: Factory) -> Built:
    """Call a factory without making numbers; where it needs some, call it once more and make all.

    Raises:
        TypeError: it returns no module. Its own errors are raised as they are.
        ValueError: it has kept a tensor without values from the first call.
    """
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    tape = Tape()
    try:
        with _quiet(), _converting_in_place(), tape:
            model = factory()
        built = Built(_checked(model, factory), _taken_out(model, tape))
        tape.check_nothing_is_left()
        return built
    except Exception as error:  # whatever it is that fake tensors do not do
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    model = _checked(factory(), factory)
    if is_on_meta(model):
        return build_from_meta(model)
    for name, tensor in _held(model):
        if isinstance(tensor, FakeTensor):
            raise ValueError(
                f"{name} of the model has no numbers, as its function keeps tensors from call to call: "
                "pass the model itself"
            )
    return Built(model, None, why)


def build_from_meta(model: nn.Module) -> Built:
    """Let the modules of a model on the meta device set their tensors, without making numbers.

    Raises:
        ValueError: they cannot; or they do not set a tensor, and no file of weights has it.
    """
    absent = {name: tensor for name, tensor in _held(model) if tensor.is_meta}
    calls, tape = initialisers(model), Tape()
    try:
        _check_attributes(model, absent.values())
        with _quiet(), tape:
            _replace(model, {id(each): _like(each, _zeros(each)) for each in absent.values()})
            begin = tape.num_calls
            for call in calls:
                call()
        numbers = _taken_out(model, tape)
    except Exception as error:  # whatever it is that fake tensors, or those on the meta device, do not do
        raise ValueError(f"a model on the meta device cannot be made here: {error}: {_REMEDY}") from error
    written, kept = tape.written(begin), model.state_dict()
    for name in (name for name in absent if numbers.refs[name].storage not in written):
        if name not in kept:
            raise ValueError(f"{name} of the model is on the meta device, and no file has it: {_REMEDY}")
        numbers.unset[name] = type(model.get_submodule(name.rpartition(".")[0])).__name__
    return Built(model, numbers)


def _check_attributes(model: nn.Module, absent: Collection[Tensor]) -> None:
    """Raise CannotDefer for a tensor on the meta device that is neither a parameter nor a buffer."""
    known = {id(each) for each in absent}
    for module, name, value in _attributes(model):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_meta and id(leaf) not in known:
                raise CannotDefer(f"{name} of a {type(module).__name__} has no numbers")


def _checked(model: Any, factory: Factory) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    name = getattr(factory, "__name__", type(factory).__name__)
    raise TypeError(f"model must be a module or a function that returns one; {name} returns {model!r}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what torch prints about fake tensors; `Built` reports unsupported operations."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.setLevel(level)


@contextmanager
def _converting_in_place() -> Iterator[None]:
    """Let `half()` and `to()` of a module give its parameters new data, as they do where there are numbers.

    For fake parameters torch swaps tensors instead, which it refuses for those that anything else refers to.
    """
    swap, options = torch.utils.swap_tensors, torch.__future__

    def convert(tensor: Tensor, values: Tensor) -> None:
        of_module = sys._getframe(1).f_code is nn.Module._apply.__code__
        if not of_module or options.get_swap_module_params_on_conversion():
            swap(tensor, values)  # type: ignore[no-untyped-call]
        elif options.get_overwrite_module_params_on_conversion():
            raise CannotDefer("a conversion of a module replaces its parameters")
        else:
            tensor.data = values

    torch.utils.swap_tensors = convert
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def _taken_out(model: nn.Module, tape: Tape) -> Numbers:
    """Replace the fake tensors of a model by ones on the meta device; others that it has get numbers."""
    fake = {name: tensor for name, tensor in _held(model) if isinstance(tensor, FakeTensor)}
    for name, tensor in fake.items():
        if problem := _problem(tensor):
            raise CannotDefer(f"{name} {problem}")
    refs = {name: tape.ref(tensor) for name, tensor in fake.items()}
    with FakeTensorMode():
        of_fakes = set(vars(nn.Parameter(torch.empty(0))))
    _replace(model, {id(tensor): _like(tensor, _on_meta(tensor), of_fakes) for tensor in fake.values()})
    storages = {ref.storage for ref in refs.values()}
    for module, name, value in _attributes(model):
        if any(tape.ref(leaf).storage in storages for leaf in _fakes_in(value)):
            raise CannotDefer(f"{name} of a {type(module).__name__} has the memory of a parameter or buffer")
        if _fakes_in(value):
            vars(module)[name] = map_tensors(partial(_real, tape=tape), value)
    return Numbers(tape, refs)


def _problem(tensor: Tensor) -> str:
    """Return why a parameter or buffer cannot be made later as it is; "" if it can."""
    if _has_hooks(tensor):
        return "has a hook"
    if tensor.device.type != "cpu":
        return f"is made on {tensor.device}"
    if tensor.grad is not None:
        return "has a gradient"
    is_parameter = isinstance(tensor, nn.Parameter)
    if type(tensor) is not FakeTensor or (tensor.requires_grad and not is_parameter):
        return "is more than a parameter or a buffer"
    return ""


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield what modules hold beside parameters, buffers and modules, with its name."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                yield module, name, value


def _fakes_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, FakeTensor)]


def _real(tensor: Tensor, tape: Tape) -> Tensor:
    return tape.numbers({"": tape.ref(tensor)})[""] if isinstance(tensor, FakeTensor) else tensor


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _zeros(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()


def _like(tensor: Tensor, values: Tensor, without: Collection[str] = ()) -> Tensor:
    """Return values with the tensor's attributes, as a parameter where the tensor is one."""
    made = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    vars(made).update({name: value for name, value in vars(tensor).items() if name not in without})
    return made


def _replace(model: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Replace tensors by those made for their ids, wherever a module has them."""
    for table in (table for module in model.modules() for table in (module._parameters, module._buffers)):
        for name, tensor in table.items():
            if tensor is not None and id(tensor) in made:
                table[name] = made[id(tensor)]  # type: ignore[assignment]
    for module, name, value in _attributes(model):  # such as the flat weights of an LSTM
        if any(id(leaf) in made for leaf in pytree.tree_leaves(value)):
            vars(module)[name] = map_tensors(lambda tensor: made.get(id(tensor), tensor), value)


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def build_alike(model: nn.Module | Factory, world: "MPI.Comm") -> Built:
    """Return a module as it is, or what a function makes, without values where that is possible. Collective.

    A module on the meta device is as one that a function makes. Where the ranks' functions do not do the
    same, each makes its whole model, and rank 0's weights count.

    Raises:
        ValueError: a module on the meta device cannot set its tensors (`build_from_meta`).
    """
    if not callable(model) or (isinstance(model, nn.Module) and not is_on_meta(model)):
        return Built(model, None)
    with allocator.returning_freed_memory():
        built = build_from_meta(model) if isinstance(model, nn.Module) else build(model)
    digests = world.allgather("" if built.numbers is None else built.numbers.tape.digest())
    if built.numbers is not None and len(set(digests)) == 1:
        built.numbers.tape.states = world.bcast(built.numbers.tape.states)
        return built
    if built.numbers is not None:
        built.numbers.fill(built.model)
    whys = filter(None, world.allgather(built.why_whole))
    if world.rank == 0:
        why = next(whys, "its function does not do the same on all ranks")
        notices.tell(f"every rank makes the whole model: {why}")
    return Built(built.model, None)
