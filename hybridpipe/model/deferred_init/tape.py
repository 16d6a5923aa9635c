"""Tape: notes what is done to tensors without values, and makes the values of those that are wanted.

Knows tensors only, no model. Invariant: a tensor's values are bit for bit those that the same calls give it
where they are made at once.

New tensors are fake ones in a tape's context (as in torchdistX's deferred_init). Random numbers are drawn at
once, on memory that is dropped, and the generator's state before each draw is kept. To play the tape is to
make the calls again that matter for the tensors that are wanted.
"""

import gc
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
    number_of,
    pytree,
)

_Operator = Any  # torch._ops.OpOverload, which has no public type
_Storage = Any  # torch.UntypedStorage, whose methods have no types


class CannotDefer(RuntimeError):
    """Played, a tape would make other numbers than the calls would have made at once."""


class Ref(NamedTuple):
    """A tensor by its position in a numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def reach(self) -> int:
        """Number of elements up to the end of the last one."""
        if 0 in self.size:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))


@dataclass(slots=True)
class _WritingCall:
    """A call that writes to tensors.

    Args:
        arguments: its arguments, with a `Ref` for each tensor.
        results: one for each tensor that it returns.
        state: of the random generator before it, if it draws.
    """

    operator: _Operator
    arguments: tuple[Any, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    results: list[Ref]
    state: Tensor | None


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is done to fake tensors in its context, where every new tensor is one.

    Tensors that are there already, such as those of a file, are copied when they are used.

    Raises:
        CannotDefer: in the context, where played calls would not make the same numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._calls: list[_WritingCall] = []
        self._numbers: dict[int, int] = {}  # of storages, by their addresses
        self._storages: list[Any] = []  # kept, so that no address is used again
        self._given: dict[int, _Storage] = {}  # copies of those of tensors that were there
        self._views: set[int] = set()  # further storages, whose memory is a given one's that others may read

    def __enter__(self) -> "Tape":
        self._fake.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fake.__exit__(*error)
        for number, copy in self._given.items() if error[0] is None else ():
            if not torch.equal(_bytes(copy), _bytes(self._storages[number])):
                raise CannotDefer("a tensor that was there before the model changes while it is made")

    def __torch_dispatch__(
        self, func: _Operator, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note a call; a number that Python asks for is computed."""
        kwargs = kwargs or {}
        if func is number_of and isinstance(args[0], FakeTensor):
            with disable_current_modes():
                return self.numbers({"": self.ref(args[0])})[""].item()
        arguments = pytree.tree_map_only(Tensor, self._argument, (tuple(args), dict(kwargs)))
        known = len(self._storages)
        made = func(*args, **kwargs)
        results = [self.ref(each) for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]
        written = {each.storage for each in _written(func, arguments)}
        writes = frozenset(written.union(each.storage for each in results if each.storage >= known))
        if writes:
            read = frozenset(leaf.storage for leaf in _refs(arguments))
            self._check(func, arguments, written)
            call = _WritingCall(func, arguments, read, writes, results, None)
            if torch.Tag.nondeterministic_seeded in func.tags:
                with disable_current_modes():
                    self._draw(call, read - written)
            if _returns_views(func) and any(self._is_view(number, func) for number in read):
                self._views |= writes
            self._calls.append(call)
        return made

    def _draw(self, call: _WritingCall, needed: Collection[int]) -> None:
        """Draw for real and forget what was drawn, so that the generator goes on as it would."""
        call.state = torch.get_rng_state()
        with torch.no_grad():
            held = self._play(needed)
            torch.set_rng_state(call.state)
            _make(call, held)

    def _argument(self, tensor: Tensor) -> Ref:
        """Return the position of a call's argument."""
        if isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata not in self._numbers:
            raise CannotDefer("a tensor without numbers is used that was made before")
        return self.ref(tensor)

    def _check(self, operator: _Operator, arguments: tuple[Any, Any], written: Collection[int]) -> None:
        """Raise CannotDefer for a call that would be played with other numbers."""
        if not (self._given.keys() | self._views).isdisjoint(written):
            raise CannotDefer(f"{operator} changes a tensor that was there before the model")
        leaves = pytree.tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, Ref))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise CannotDefer(f"{operator} draws from a random generator of its own")
        for leaf in leaves:
            if isinstance(leaf, torch.device) and leaf.type != "cpu":
                raise CannotDefer(f"{operator} makes a tensor on {leaf}")
        names = [argument.name for argument in operator._schema.arguments]
        undeclared = any(word in operator._schema.name for word in ("rrelu", "quantize"))
        undeclared |= "running_mean" in names
        if undeclared or any(isinstance(leaf, torch.UntypedStorage) for leaf in leaves):
            raise CannotDefer(f"{operator} does more than its signature says")

    def _is_view(self, number: int, operator: _Operator) -> bool:
        """Return True if others may read the memory of what a call returns a view of.

        Nobody holds the tensor from which torch.tensor makes its own. That of an array cannot be resized.
        """
        is_fresh = operator is torch.ops.aten.lift_fresh.default and self._storages[number].resizable()
        return number in self._views or (number in self._given and not is_fresh)

    def ref(self, tensor: Tensor) -> Ref:
        """Return the position of a tensor; one that was there is copied."""
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.layout != torch.strided:
            raise CannotDefer("a tensor is conjugate, negative, quantized or sparse")
        storage: _Storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        if not isinstance(tensor, FakeTensor) and number not in self._given:
            with disable_current_modes():
                self._given[number] = storage.clone()
        size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        return Ref(number, tensor.dtype, size, stride, offset)

    @property
    def num_calls(self) -> int:
        """Number of calls noted so far."""
        return len(self._calls)

    def written(self, begin: int) -> set[int]:
        """Return the storages that calls write to, from the given number of calls on."""
        return set().union(*(call.writes for call in self._calls[begin:]))

    def check_nothing_is_left(self) -> None:
        """Raise CannotDefer if someone still holds a tensor without values: a cache, a hook, a closure."""
        gc.collect()
        left = [
            each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is self._fake
        ]
        if left:
            raise CannotDefer(f"a tensor of shape {tuple(left[0].shape)} is kept outside of the model")

    @property
    def states(self) -> list[Tensor]:
        """States of the random generator before each draw, in order."""
        return [call.state for call in self._calls if call.state is not None]

    @states.setter
    def states(self, states: Sequence[Tensor]) -> None:
        draws = (call for call in self._calls if call.state is not None)
        for call, state in zip(draws, states, strict=True):
            call.state = state

    def digest(self) -> str:
        """Return a text that is the same where the same calls were made; states do not count."""
        found = hashlib.sha256()
        for call in self._calls:
            told = str(call.operator), call.arguments, call.results, call.state is None
            found.update(repr(told).encode())
        for number in sorted(self._given):
            found.update(_bytes(self._given[number]).numpy().tobytes())
        return found.hexdigest()[:16]

    def numbers(self, wanted: Mapping[str, Ref]) -> dict[str, Tensor]:
        """Return tensors with their numbers, by the same names; random states are as before."""
        before = torch.get_rng_state()
        try:
            with torch.no_grad():
                storages = self._play({ref.storage for ref in wanted.values()})
        finally:
            torch.set_rng_state(before)
        return {name: _tensor_at(ref, storages) for name, ref in wanted.items()}

    def _play(self, wanted: Collection[int]) -> dict[int, _Storage]:
        """Make the calls again that matter to these storages, and return what is wanted."""
        needed, matters = set(wanted), []
        for call in reversed(self._calls):
            matters.append(not needed.isdisjoint(call.writes))
            if matters[-1]:
                needed |= call.reads
        last = {s: i for i, call in enumerate(self._calls) for s in call.reads | call.writes}
        held = {number: storage.clone() for number, storage in self._given.items() if number in needed}
        for i, (call, does_matter) in enumerate(zip(self._calls, reversed(matters), strict=True)):
            if not does_matter:
                continue
            if call.state is not None:
                torch.set_rng_state(call.state)
            _make(call, held)
            for number in call.reads | call.writes:
                if last[number] == i and number not in wanted:
                    held.pop(number, None)
        return held


def _make(call: _WritingCall, held: dict[int, _Storage]) -> None:
    """Make a call with numbers; add the storages that it makes. What it lacks it only writes to."""

    def real(leaf: Any) -> Any:
        return _tensor_at(leaf, held) if isinstance(leaf, Ref) else leaf

    args, kwargs = pytree.tree_map(real, call.arguments, is_leaf=lambda leaf: isinstance(leaf, Ref))
    made = call.operator(*args, **kwargs)
    tensors = [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]
    for ref, tensor in zip(call.results, tensors, strict=True):
        if ref.storage not in held:
            if (tensor.stride(), tensor.storage_offset()) != (ref.stride, ref.offset):
                _tensor_at(ref, held).copy_(tensor)
            else:
                held[ref.storage] = tensor.untyped_storage()


def _tensor_at(ref: Ref, held: dict[int, _Storage]) -> Tensor:
    """Return the tensor at a position; a storage that is missing is made."""
    if ref.storage not in held:
        held[ref.storage] = torch.empty(ref.reach, dtype=ref.dtype).untyped_storage()
    made: Tensor = torch.empty(0, dtype=ref.dtype).set_(held[ref.storage], ref.offset, ref.size, ref.stride)
    return made


def _bytes(storage: _Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _refs(tree: Any) -> Iterator[Ref]:
    leaves = pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Ref))
    return (leaf for leaf in leaves if isinstance(leaf, Ref))


def _returns_views(operator: _Operator) -> bool:
    """Return True if what a call returns has the memory of an argument that it does not write to."""
    aliases = (value.alias_info for value in operator._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def _written(operator: _Operator, arguments: tuple[Any, Any]) -> Iterator[Ref]:
    """Yield the tensors that a call writes to."""
    args, kwargs = arguments
    for i, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _refs(value)
