"""Deferred: a model whose parameters and buffers have no numbers yet, and those that a rank is to have.

Knows no ranks and no plan. Invariant: a tensor that a module holds twice, or two modules hold, stays one; all
that is filled is what the factory would have made at once.
"""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from hybridpipe.model.tape import CannotDefer, Ref, Tape
from hybridpipe.model.tensors import map_tensors

Factory = Callable[[], nn.Module]


@dataclass
class Numbers:
    """The source of the numbers of a model's tensors.

    Args:
        places: of its parameters and buffers on the tape, by each of their names.
        given: functions that return tensors from elsewhere, such as a file, by name; they go first.
    """

    tape: Tape
    places: Mapping[str, Ref]
    given: dict[str, Callable[[], Tensor]] = field(default_factory=dict)

    def of(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors with their numbers, by name."""
        on_tape = {name: self.places[name] for name in names if name not in self.given}
        return self.tape.numbers(on_tape) | {name: self.given[name]() for name in names if name in self.given}

    def fill(self, model: nn.Module, *parts: nn.Module) -> None:
        """Put numbers into those of the model's tensors on the meta device that the parts hold; default: all.

        Each is replaced, wherever one of the model's modules holds it, by one with the same attributes.
        """
        wanted = {id(each) for part in parts or (model,) for _, each in _held(part)}
        self._fill(model, wanted)

    def _fill(self, model: nn.Module, wanted: Collection[int]) -> None:
        held = {name: each for name, each in _held(model) if each.is_meta}
        names = {id(each): name for name, each in held.items() if id(each) in wanted}
        made = self.of(names.values())
        _replace(model, {key: _like(held[name], made[name]) for key, name in names.items()})

    def fill_for_measuring(self, model: nn.Module) -> None:
        """Put buffers into a model's copy, and parameters that all begin at one address.

        A time does not depend on a parameter's numbers, and a model that is larger than a rank can be
        measured.
        """
        held = [each for _, each in _held(model) if each.is_meta]
        parameters = [each for each in held if isinstance(each, nn.Parameter)]
        self._fill(model, {id(each) for each in held}.difference(map(id, parameters)))
        most = max((each.numel() * each.itemsize for each in parameters), default=0)
        pool = torch.empty(most // 4 + 1).normal_(std=0.02).untyped_storage()
        _replace(
            model,
            {
                id(each): _like(each, torch.empty(0, dtype=each.dtype).set_(pool, 0, each.size()))  # type: ignore[call-overload]
                for each in parameters
            },
        )


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
    """
    tape = Tape()
    try:
        with _quiet(), tape:
            model = factory()
        return Built(model, _taken_out(_checked(model, factory), tape))
    except Exception as error:  # whatever it is that fake tensors do not do
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Built(_checked(factory(), factory), None, why)


def _checked(model: Any, factory: Factory) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    name = getattr(factory, "__name__", type(factory).__name__)
    raise TypeError(f"model must be a module or a function that returns one; {name} returns {model!r}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what torch prints about fake tensors; what they do not do is told by `Built`."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.setLevel(level)


def _taken_out(model: nn.Module, tape: Tape) -> Numbers:
    """Replace the fake tensors of a model by ones on the meta device; others that it holds get numbers."""
    fake = {name: tensor for name, tensor in _held(model) if isinstance(tensor, FakeTensor)}
    for name, tensor in fake.items():
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise CannotDefer(f"{name} has a hook")
        if tensor.device.type != "cpu":
            raise CannotDefer(f"{name} is made on {tensor.device}")
    for module in model.modules():
        others = vars(module).keys() - {"_parameters", "_buffers", "_modules"}
        for name in others:
            value = vars(module)[name]
            if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)):
                vars(module)[name] = map_tensors(partial(_real, tape=tape), value)
    with FakeTensorMode():
        of_fakes = set(vars(nn.Parameter(torch.empty(0))))
    _replace(model, {id(tensor): _like(tensor, _on_meta(tensor), of_fakes) for tensor in fake.values()})
    return Numbers(tape, {name: tape.ref(tensor) for name, tensor in fake.items()})


def _real(tensor: Tensor, tape: Tape) -> Tensor:
    return tape.numbers({"": tape.ref(tensor)})[""] if isinstance(tensor, FakeTensor) else tensor


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _like(tensor: Tensor, values: Tensor, without: Collection[str] = ()) -> Tensor:
    """Return values with the tensor's attributes, as a parameter where the tensor is one."""
    made = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    vars(made).update({name: value for name, value in vars(tensor).items() if name not in without})
    return made


def _replace(model: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Replace tensors by those made for their ids."""
    for table in (table for module in model.modules() for table in (module._parameters, module._buffers)):
        for name, tensor in table.items():
            if tensor is not None and id(tensor) in made:
                table[name] = made[id(tensor)]  # type: ignore[assignment]


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
