"""State: a stage's training state as tensors by name and JSON, and back.

Knows one process, no files and no messages; KEY is the one in `model.state_dict()`, so any plan can load it.
Invariant: state comes back bit for bit and type for type; other values than tensors and JSON are refused.

    model.KEY               parameters and buffers
    part.KEY                a rank's part of a parameter (`model.held_part`)
    optimizer.KEY.NAME      the optimizer's state of a parameter, or of a part of it
    version.N.KEY           trained parameters after N updates of the stream, while microbatches use them
    random.*                states of the process's random generators
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import methodcaller
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.errors import UserError, shown
from hybridpipe.model.held_part import HeldPart, held_part
from hybridpipe.stage.parts import Piece

JSON = Any
FORMS = ("foreach", "fused")  # options that choose an implementation and change no formula
# Beside an optimizer's state of a parameter, where groups exchange weights (`optim.centre`).
CENTRE, OUTER_MOMENTUM, TRAVELLING = OF_GROUPS = "centre", "outer_momentum", "travelling"
MEMBER = "optimizer"  # option of a group: the class of its optimizer, one of several (`optim.combined`)
NAMES = "param_names"  # where torch's optimizers keep the names of a group's parameters
AVERAGE = "ema"  # in an optimizer's state of a parameter: the average that `callbacks.EMA` keeps
PARTS = "parts"  # JSON key of `put_parts`
SAMPLES_SEEN, BATCHES_AGREED = "statistics_samples", "statistics_batches"  # JSON keys of `stage.statistics`
_NUMBERS_OF_PART = ("index", "count", "dim", "packs")  # the last fields of `HeldPart`
_TENSOR, _TUPLE, _PAIRS, _COUNTER, _FLOAT = "$tensor", "$tuple", "$pairs", "$counter", "$float"


@dataclass
class StageState:
    """Tensors by name, and the rest as JSON."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, JSON] = field(default_factory=dict)

    def copied(self) -> "StageState":
        """Return a copy with tensors on the CPU, so that training can continue meanwhile."""
        return StageState(
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}, self.meta
        )


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> JSON:
    """Return a value as JSON; tensors in it go into `tensors`, under names that begin with `name`.

    Raises:
        UserError: the value holds an object that is neither tensor, number, text nor a container of these.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value if math.isfinite(value) else {_FLOAT: str(value)}
        case np.bool_() | np.integer() | np.floating():
            return pack(value.item(), name, tensors)  # as torch converts it
        case Tensor():
            tensors[name] = value
            return {_TENSOR: name}
        case list() | tuple() if type(value) in (list, tuple):
            items = [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {_TUPLE: items}
        case dict() if isinstance(value, Counter) or not all(_is_plain(key) for key in value):
            kind = _COUNTER if isinstance(value, Counter) else _PAIRS
            keys = [pack(key, f"{name} (a key)", tensors) for key in value]
            items = [pack(item, f"{name}.{key}", tensors) for key, item in value.items()]
            return {kind: [list(pair) for pair in zip(keys, items, strict=True)]}
        case dict():
            return {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}
    kind = type(value).__name__
    raise UserError(
        f"{name}: a checkpoint holds tensors, numbers and text, got {shown(value)} of type {kind}"
    )


def _is_plain(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("$")


def unpack(document: JSON, tensors: Mapping[str, Tensor], where: str) -> Any:
    """Return the value that `pack` was given.

    Args:
        where: the file's name, for error messages.

    Raises:
        UserError: the document was not written by `pack`, or a tensor is missing.
    """
    match document:
        case {"$tensor": str(name), **rest} if not rest:
            if name not in tensors:
                raise UserError(f"{where}: tensor {shown(name)} is missing")
            return tensors[name]
        case {"$tuple": list(items), **rest} if not rest:
            return tuple(unpack(item, tensors, where) for item in items)
        case {"$float": ("nan" | "inf" | "-inf") as text, **rest} if not rest:
            return float(text)
        case {"$counter": list(pairs), **rest} | {"$pairs": list(pairs), **rest} if not rest:
            if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
                raise UserError(f"{where}: must hold pairs, got {shown(document)}")
            both = {unpack(key, tensors, where): unpack(item, tensors, where) for key, item in pairs}
            return Counter(both) if _COUNTER in document else both
        case dict():
            if not all(_is_plain(key) for key in document):
                raise UserError(f"{where}: cannot be understood: {shown(document)}")
            return {key: unpack(item, tensors, where) for key, item in document.items()}
        case list():
            return [unpack(item, tensors, where) for item in document]
    return document


def shared_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are the same on all ranks: those of `state_dict()` and all other buffers.

    They are the model's own tensors, not copies.
    """
    found: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None:
                found[f"{path}.{name}"] = buffer
    return found


def name_of(thing: object) -> str:
    """Return the qualified name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group. Names are none: another plan's groups would differ by them."""
    return {name: value for name, value in group.items() if name not in ("params", NAMES)}


def take_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    into: StageState,
    given: Sequence[Mapping[str, Any]] = (),
    ranges: Mapping[Tensor, range] = MappingProxyType({}),
    held_parts: Mapping[Tensor, HeldPart] = MappingProxyType({}),
    beside: Mapping[Tensor, Mapping[str, Tensor]] = MappingProxyType({}),
) -> None:
    """Add an optimizer's state of the parameters in `names` to a `StageState`.

    Each parameter refers to its group's options, since another plan has other groups on a rank.

    Args:
        names: the key of each parameter.
        given: the options that each group was made with.
        ranges: the elements of what is held of the named parameter that a tensor stands for, where these are
            not all (`stage.parts`).
        held_parts: what is held of the named parameter, where it is a part.
        beside: more state of each parameter, under names that the optimizer's own has not.

    Raises:
        UserError: a part of the state is neither tensor nor JSON, or belongs to no parameter.
    """
    foreign = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if foreign:
        raise UserError(f"{name_of(optimizer)} keeps state of no parameter: {shown(foreign[0])}")
    into.meta["optimizer"] = name_of(optimizer)
    into.meta["num_groups"] = len(optimizer.param_groups)  # including groups without parameters of this stage
    into.meta["groups"], into.meta["given"], into.meta["parameters"] = [], [], {}
    for i, group in enumerate(optimizer.param_groups):
        options = options_of(group)
        mine = [p for p in group["params"] if p in names]
        if not mine:
            continue
        at = len(into.meta["groups"])
        into.meta["groups"].append(pack(options, f"group.{at}", into.tensors))
        if given:
            into.meta["given"].append(pack(dict(given[i]), f"given.{at}", into.tensors))
        for p in mine:
            own = {**optimizer.state.get(p, {}), **beside.get(p, {})}
            state = pack(own, f"optimizer.{names[p]}", into.tensors)
            part = {"part": [ranges[p].start, ranges[p].stop]} if p in ranges else {}
            held = {"held": _as_json(held_parts[p])} if p in held_parts else {}
            into.meta["parameters"][names[p]] = {"group": at, "state": state, **part, **held}


@dataclass(frozen=True)
class OfParameter:
    """An optimizer's state of one parameter.

    Args:
        options: the options of its group.
        state: its own state.
        given: the options that the group was made with; None in older checkpoints.
        part: the elements whose state it is (`stage.parts`), of what is held; None: all.
        held: what is held of the parameter; None: all.
    """

    options: dict[str, Any]
    state: dict[str, Any]
    given: dict[str, Any] | None = None
    part: range | None = None
    held: HeldPart | None = None

    @property
    def piece(self) -> Piece:
        """The state as a piece of the parameter's."""
        return Piece(self.state, self.part, self.held)


def read_optimizer(state: StageState, where: str) -> dict[str, OfParameter]:
    """Return the state that `take_optimizer` took, by the parameters' keys.

    Args:
        where: the file's name, for error messages.

    Raises:
        UserError: the state was not written by `take_optimizer`.
    """
    unpacked = (unpack(group, state.tensors, where) for group in state.meta.get("groups", []))
    groups = {i: options_of(group) for i, group in enumerate(unpacked) if isinstance(group, dict)}
    given = [unpack(group, state.tensors, where) for group in state.meta.get("given", [])]
    found = {}
    for key, entry in state.meta.get("parameters", {}).items():
        match entry:
            case {"group": int(at), "state": dict(own), **more} if at in groups:
                own, first = unpack(own, state.tensors, where), given[at] if at < len(given) else None
                part = _part(more.get("part"), f"{where}: {key}")
                held = _held(more["held"], f"{where}: {key}: held") if "held" in more else None
                found[key] = OfParameter(groups[at], own, first, part, held)
            case _:
                raise UserError(f"{where}: parameter {key}: cannot be understood: {shown(entry)}")
    return found


def _part(document: JSON, where: str) -> range | None:
    match document:
        case None:
            return None
        case [int(start), int(stop)] if 0 <= start <= stop:
            return range(start, stop)
    raise UserError(f"{where}: part: must be two numbers of elements, got {shown(document)}")


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    found: Mapping[str, OfParameter],
    where: str,
) -> None:
    """Check that `put_optimizer` can load a state.

    Raises:
        UserError: a trained parameter has no state or one of another optimizer, or parameters of one group
            had different options.
    """
    for group in optimizer.param_groups:
        first: OfParameter | None = None
        for p in group["params"]:
            key = names[p]
            if key not in found and not p.requires_grad:
                continue  # older checkpoints have trained parameters only
            if key not in found:
                raise UserError(f"{where}: has no optimizer state of {key}, which is trained now")
            first = first or found[key]
            now, then = (options.get(MEMBER) for options in (group, found[key].options))
            if now != then:
                raise UserError(f"{where}: {key}: optimizer: the checkpoint has {then}, the training {now}")
            if not _equal(first.options, found[key].options):
                raise UserError(
                    f"{where}: {names[group['params'][0]]} and {key}, which are in one parameter group now, "
                    f"had different options: {shown(first.options)}, {shown(found[key].options)}"
                )


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, value now, value then) wherever two mappings differ.

    Names that only one of them has are left out, since versions of torch differ in their options.
    """
    names = [name for name in now if name in then and name not in FORMS]
    return [(name, now[name], then[name]) for name in names if not _equal(now[name], then[name])]


def put_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    found: Mapping[str, OfParameter],
    options_too: bool = True,
) -> None:
    """Load the state that `take_optimizer` took into an optimizer.

    `Optimizer.load_state_dict` is not used: it casts the state of a half-precision parameter to that dtype.

    Args:
        options_too: load the groups' options as well, such as the learning rate, except FORMS.
    """
    optimizer.state.clear()
    for group in optimizer.param_groups:
        on_host = not (group.get("capturable") or group.get("fused"))
        for p in group["params"]:
            own = found.get(names[p])
            if own is None:
                continue
            if options_too:
                group.update({name: value for name, value in own.options.items() if name not in FORMS})
            if own.state:
                devices = {"step": torch.device("cpu")} if on_host else {}
                optimizer.state[p] = {
                    name: _mapped(value, methodcaller("to", devices.get(name, p.device)))
                    for name, value in own.state.items()
                }


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value in which each tensor is changed."""
    match value:
        case Tensor():
            return change(value)
        case list() | tuple():
            return type(value)(_mapped(item, change) for item in value)
        case dict():
            return {name: _mapped(item, change) for name, item in value.items()}
    return value


def put_parts(state: StageState, tensors: Mapping[str, Tensor]) -> None:
    """Add this replica's parts of parameters to a state.

    Args:
        tensors: by key; all have a `held_part`.
    """
    parts = {key: held_part(tensor) for key, tensor in tensors.items()}
    state.tensors |= {f"part.{key}": tensor.detach() for key, tensor in tensors.items()}
    state.meta[PARTS] = {key: _as_json(part) for key, part in parts.items() if part is not None}


def read_parts(meta: JSON, where: str) -> dict[str, HeldPart]:
    """Return what parts of parameters a file has, by key.

    Args:
        meta: of a state to which `put_parts` has added some.
        where: the file's name, for error messages.

    Raises:
        UserError: the metadata cannot be understood.
    """
    found: dict[str, HeldPart] = {}
    entries = meta.get(PARTS, {}) if isinstance(meta, dict) else {}
    if not isinstance(entries, dict):
        raise UserError(f"{where}: {PARTS}: must be an object, got {shown(entries)}")
    for key, entry in entries.items():
        found[key] = _held(entry, f"{where}: part of {key}")
    return found


def _as_json(part: HeldPart) -> JSON:
    return {**asdict(part), "whole": list(part.whole)}


def _held(document: JSON, where: str) -> HeldPart:
    """Return the part that `_as_json` has described."""
    match document:
        case {"whole": [*sizes], "axis": str(axis), **rest} if rest.keys() == set(_NUMBERS_OF_PART):
            numbers: list[Any] = [rest[name] for name in _NUMBERS_OF_PART]
            if sizes and all(type(each) is int and each >= 0 for each in (*sizes, *numbers)):
                part = HeldPart(torch.Size(sizes), axis, *numbers)
                if part.is_possible:
                    return part
    raise UserError(f"{where}: cannot be understood: {shown(document)}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    return bool(type(one) is type(other) and one == other)


class Generators(NamedTuple):
    """States of a process's random generators: torch's on CPU and GPU, NumPy's legacy one, Python's.

    They are held as the generators return them, which is fast; `state` converts them to tensors and JSON.
    """

    cpu: Tensor
    cuda: Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def now(cls, device: torch.device) -> "Generators":
        """Return this process's states; `device` chooses the GPU."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, np.random.get_state(legacy=True), random.getstate())

    def state(self) -> StageState:
        """Return the states as tensors and JSON for a checkpoint."""
        _, key, at, has_gauss, gauss = self.numpy
        version, words, next_gauss = self.python
        tensors = {
            "random.cpu": self.cpu,
            "random.numpy": torch.from_numpy(key.astype(np.int64)),
            "random.python": torch.tensor(words, dtype=torch.int64),
        }
        if self.cuda is not None:
            tensors["random.cuda"] = self.cuda
        numbers = {"numpy": [int(at), int(has_gauss), float(gauss)], "python": [version, next_gauss]}
        return StageState(tensors, {"random": numbers})

    @classmethod
    def of(cls, state: StageState, where: str) -> "Generators":
        """Read the states from a checkpoint.

        Args:
            where: the file's name, for error messages.

        Raises:
            UserError: a part is missing, or a generator refuses it.
        """
        try:
            (at, has_gauss, gauss), (version, next_gauss) = (
                state.meta["random"][n] for n in ("numpy", "python")
            )
            key = state.tensors["random.numpy"].numpy().astype(np.uint32)
            words = tuple(state.tensors["random.python"].tolist())
            cpu, cuda = state.tensors["random.cpu"], state.tensors.get("random.cuda")
            found = cls(cpu, cuda, ("MT19937", key, at, has_gauss, gauss), (version, words, next_gauss))
            torch.Generator().set_state(found.cpu)  # each state is tried on a new generator
            np.random.RandomState().set_state(found.numpy)
            random.Random().setstate(found.python)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{where}: random states cannot be understood: {error!r}") from None
        return found

    def put(self, device: torch.device) -> None:
        """Set this process's generators to these states."""
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def samples_seen(meta: JSON, where: str) -> int:
    """Return the number of samples in a rank's statistics; 1 in older checkpoints, so all ranks weigh alike.

    Raises:
        UserError: the entry is not an integer >= 0.
    """
    found = meta.get(SAMPLES_SEEN, 1) if isinstance(meta, dict) else 1
    if type(found) is not int or found < 0:
        raise UserError(f"{where}: {SAMPLES_SEEN}: must be an integer >= 0, got {shown(found)}")
    return found


def batches_agreed(meta: JSON, where: str) -> dict[str, int]:
    """Return the numbers of batches at the last averaging of a stage's statistics, by key.

    Raises:
        UserError: an entry is not an integer.
    """
    match meta.get(BATCHES_AGREED, {}) if isinstance(meta, dict) else {}:
        case dict() as found if all(type(number) is int for number in found.values()):
            return found
        case found:
            raise UserError(f"{where}: {BATCHES_AGREED}: must hold integers, got {shown(found)}")


def described(tensors: Mapping[str, Tensor]) -> dict[str, JSON]:
    """Return each tensor's dtype and shape: "float32[3, 4]"."""
    return {key: _described(tensor) for key, tensor in tensors.items()}


def check_fits(found: Mapping[str, JSON], model: Mapping[str, Tensor], where: str) -> None:
    """Check that a file's tensors are those of a model.

    Args:
        found: dtypes and shapes in the file, as `described` returns them.

    Raises:
        UserError: a tensor differs; names the first one.
    """
    wanted = described(model)
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            got, want = found.get(key, "none"), wanted.get(key, "none")
            raise UserError(f"{where}: {key}: the model has {want}, the file {got}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a prefix before their names: "model" makes "model.KEY"."""
    return {f"{prefix}.{key}": tensor for key, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, without it; the inverse of `prefixed`."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
