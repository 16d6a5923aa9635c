"""State: what training has made of a stage, as tensors by name and JSON, and back.

One process, no files, no messages. Names are those of `model.state_dict()`, so that any plan of the model
finds its own. Invariant: what is restored equals what was taken, bit for bit and type for type; what is
neither tensor nor JSON is refused, never pickled.

    model.KEY               parameters and buffers
    optimizer.KEY.NAME      what the optimizer keeps for a parameter
    version.N.KEY           trained parameters after N updates of the stream, while microbatches see them
    random.*                the process's generators
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.errors import UserError, shown

JSON = Any
FORMS = ("foreach", "fused")  # options that say how a step is computed, and are not of what was trained
SAMPLES_SEEN, BATCHES_AGREED = "statistics_samples", "statistics_batches"  # of `stage.statistics`, as JSON
_TENSOR, _TUPLE, _PAIRS, _COUNTER, _FLOAT = "$tensor", "$tuple", "$pairs", "$counter", "$float"


@dataclass
class State:
    """Tensors by name, and what else there is to know."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, JSON] = field(default_factory=dict)

    def copied(self) -> "State":
        """With tensors of its own on the CPU: training may go on."""
        return State(
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}, self.meta
        )


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> JSON:
    """The value as JSON; tensors in it go into `tensors`, under names that begin with `name`.

    Raises:
        UserError: it holds what is neither.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value if math.isfinite(value) else {_FLOAT: str(value)}
        case np.bool_() | np.integer() | np.floating():
            return pack(value.item(), name, tensors)  # what torch makes of it, too
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
    """What `pack` was given. Raises UserError for what it never wrote; `where` names the file."""
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
    """All that ranks have alike: what `state_dict()` holds, the tensors themselves, and the other buffers."""
    found: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None:
                found[f"{path}.{name}"] = buffer
    return found


def name_of(thing: object) -> str:
    """The class of an optimizer or a scheduler."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def take_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    into: State,
    given: Sequence[Mapping[str, Any]] = (),
) -> None:
    """What an optimizer keeps for the parameters that `names` has.

    By parameter, its group's options included: another plan groups parameters by other ranks.

    Args:
        given: the options of each group as it was made with.

    Raises:
        UserError: a part of it is neither tensor nor JSON, or belongs to no parameter.
    """
    foreign = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if foreign:
        raise UserError(f"{name_of(optimizer)} keeps state of no parameter: {shown(foreign[0])}")
    into.meta["optimizer"] = name_of(optimizer)
    into.meta["num_groups"] = len(optimizer.param_groups)  # those without parameters of this stage, too
    into.meta["groups"], into.meta["given"], into.meta["parameters"] = [], [], {}
    for i, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        mine = [p for p in group["params"] if p in names]
        if not mine:
            continue
        at = len(into.meta["groups"])
        into.meta["groups"].append(pack(options, f"group.{at}", into.tensors))
        if given:
            into.meta["given"].append(pack(dict(given[i]), f"given.{at}", into.tensors))
        for p in mine:
            state = pack(dict(optimizer.state.get(p, {})), f"optimizer.{names[p]}", into.tensors)
            into.meta["parameters"][names[p]] = {"group": at, "state": state}


@dataclass(frozen=True)
class OfParameter:
    """What an optimizer had for one parameter: its group's options, its own state.

    Args:
        given: the options that the group was made with; None in older checkpoints.
    """

    options: dict[str, Any]
    state: dict[str, Any]
    given: dict[str, Any] | None = None


def read_optimizer(state: State, where: str) -> dict[str, OfParameter]:
    """What `take_optimizer` took, by the parameters' keys; UserError if it never took that."""
    groups = [unpack(group, state.tensors, where) for group in state.meta.get("groups", [])]
    given = [unpack(group, state.tensors, where) for group in state.meta.get("given", [])]
    found = {}
    for key, entry in state.meta.get("parameters", {}).items():
        match entry:
            case {"group": int(at), "state": dict(own)} if 0 <= at < len(groups):
                found[key] = OfParameter(
                    groups[at], unpack(own, state.tensors, where), given[at] if at < len(given) else None
                )
            case _:
                raise UserError(f"{where}: parameter {key}: cannot be understood: {shown(entry)}")
    return found


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    found: Mapping[str, OfParameter],
    where: str,
) -> None:
    """Raises UserError unless `put_optimizer` can do it."""
    for group in optimizer.param_groups:
        first: OfParameter | None = None
        for p in group["params"]:
            key = names[p]
            if key not in found and not p.requires_grad:
                continue  # older checkpoints have trained parameters only
            if key not in found:
                raise UserError(f"{where}: has no optimizer state of {key}, which is trained now")
            first = first or found[key]
            if not _equal(first.options, found[key].options):
                raise UserError(
                    f"{where}: {names[group['params'][0]]} and {key}, which are in one parameter group now, "
                    f"had other options: {shown(first.options)}, {shown(found[key].options)}"
                )


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The names under which two mappings hold other values, with both.

    Names that only one has are left out: another version of torch has other options.
    """
    names = [name for name in now if name in then and name not in FORMS]
    return [(name, now[name], then[name]) for name in names if not _equal(now[name], then[name])]


def put_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    found: Mapping[str, OfParameter],
    options_too: bool = True,
) -> None:
    """Let the optimizer go on with what was taken.

    Not by its `load_state_dict`, which casts the state of a half-precision parameter to that precision.

    Args:
        options_too: its options come from there, as a learning rate does, but for FORMS, which change no
            formula. Else they stay as they are.
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
                optimizer.state[p] = {
                    name: _to(value, torch.device("cpu") if name == "step" and on_host else p.device)
                    for name, value in own.state.items()
                }


def _to(value: Any, device: torch.device) -> Any:
    match value:
        case Tensor():
            return value.to(device)
        case list() | tuple():
            return type(value)(_to(item, device) for item in value)
        case dict():
            return {name: _to(item, device) for name, item in value.items()}
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    return bool(type(one) is type(other) and one == other)


class Generators(NamedTuple):
    """Where a process's generators stand: torch's on the CPU and its GPU, NumPy's legacy one, Python's.

    As they themselves tell it, which is quick; `state` makes tensors and JSON of it.
    """

    cpu: Tensor
    cuda: Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def now(cls, device: torch.device) -> "Generators":
        """This process's, which computes on `device`."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, np.random.get_state(legacy=True), random.getstate())

    def state(self) -> State:
        """For a checkpoint."""
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
        return State(tensors, {"random": numbers})

    @classmethod
    def of(cls, state: State, where: str) -> "Generators":
        """From a checkpoint. Raises UserError for what `state` never made."""
        try:
            (at, has_gauss, gauss), (version, next_gauss) = (
                state.meta["random"][n] for n in ("numpy", "python")
            )
            key = state.tensors["random.numpy"].numpy().astype(np.uint32)
            words = tuple(state.tensors["random.python"].tolist())
            cpu, cuda = state.tensors["random.cpu"], state.tensors.get("random.cuda")
            found = cls(cpu, cuda, ("MT19937", key, at, has_gauss, gauss), (version, words, next_gauss))
            torch.Generator().set_state(found.cpu)  # each tried on a generator of nobody's
            np.random.RandomState().set_state(found.numpy)
            random.Random().setstate(found.python)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{where}: random states cannot be understood: {error!r}") from None
        return found

    def put(self, device: torch.device) -> None:
        """Let this process go on from there."""
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def samples_seen(meta: JSON, where: str) -> int:
    """The samples that a rank's statistics have seen; where no one says, all ranks count alike."""
    found = meta.get(SAMPLES_SEEN, 1) if isinstance(meta, dict) else 1
    if type(found) is not int or found < 0:
        raise UserError(f"{where}: {SAMPLES_SEEN}: must be an integer >= 0, got {shown(found)}")
    return found


def batches_agreed(meta: JSON, where: str) -> dict[str, int]:
    """The numbers of batches that a stage's replicas last agreed on, by key."""
    match meta.get(BATCHES_AGREED, {}) if isinstance(meta, dict) else {}:
        case dict() as found if all(type(number) is int for number in found.values()):
            return found
        case found:
            raise UserError(f"{where}: {BATCHES_AGREED}: must hold integers, got {shown(found)}")


def described(tensors: Mapping[str, Tensor]) -> dict[str, JSON]:
    """Their types and shapes: "float32[3, 4]"."""
    return {key: _described(tensor) for key, tensor in tensors.items()}


def check_fits(found: Mapping[str, JSON], model: Mapping[str, Tensor], where: str) -> None:
    """Raises UserError, with the first name that differs, unless those are the tensors of this model.

    Args:
        found: as `described` says.
    """
    wanted = described(model)
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            got, want = found.get(key, "none"), wanted.get(key, "none")
            raise UserError(f"{where}: {key}: the model has {want}, the file {got}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With names under a prefix: "model" makes "model.KEY"."""
    return {f"{prefix}.{key}": tensor for key, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: those of a prefix, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
