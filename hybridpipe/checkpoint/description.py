"""Description of a folder of torch.distributed.checkpoint (DCP): its pickle, read as data.

Files are not known here. Invariant: nothing that the pickle names is imported, made, called, hashed or shown
before its type is known, so that no code runs, and memory is in proportion to the pickle's bytes.
"""

import math
import pickletools
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hybridpipe.checkpoint.header import are_counts
from hybridpipe.errors import UserError, shown

_DTYPES = {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    **{each: {"getattr"} for each in ("builtins", "__builtin__")},  # of an enum's member, in Python 3.11.2
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
}
# What an operation takes from the stack: so many objects, or all above the last mark.
_TAKES = {
    **dict.fromkeys(("TUPLE1", "APPEND", "BUILD"), 1),
    **dict.fromkeys(("TUPLE2", "SETITEM", "STACK_GLOBAL", "REDUCE", "NEWOBJ"), 2),
    "TUPLE3": 3,
}
_TAKES_ALL = {"TUPLE", "APPENDS", "SETITEMS"}
_MOST_FIELDS = 16  # of one object; torch's have up to five
_PRIME = 2**61 - 1  # weights are counted modulo this: parts that overlap pass once in so many files

T = TypeVar("T")


class _Name(str):
    """Name of a class or a function, which is not looked up."""


class _Pairs(list[tuple[Any, Any]]):
    """A dict's keys and values: a hostile key could take forever to hash."""


@dataclass(slots=True)
class _Object:
    """An object that torch would make by calling what is named."""

    kind: _Name
    arguments: Any
    state: Any = None


def read_description(pickle: bytes, source: str) -> Metadata:
    """Return the tensors that a folder's `.metadata` describes, and where their parts are.

    Args:
        source: the file's name, for errors.

    Raises:
        UserError: it is no such pickle, names code, or does not describe each element of a tensor once.
    """
    try:
        fields = _fields(_parsed(pickle), "Metadata")
        tensors: dict[str, STORAGE_TYPES] = {
            name: _tensor(name, each)
            for name, each in _pairs(fields["state_dict_metadata"])
            if _is(each, "TensorStorageMetadata")
        }
        return Metadata(tensors, storage_data=dict(map(_place, _typed(fields["storage_data"], _Pairs))))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except Exception as error:  # of pickletools too, for any bytes
        what = shown(f"{type(error).__name__}: {error}")
        raise UserError(f"{source}: must be torch's description of tensors: {what}") from None


def _parsed(pickle: bytes) -> object:
    """Return a pickle's object in lists, `_Pairs`, tuples, `_Object`s, names, numbers and strings."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickle):
        name = opcode.name
        start = marks.pop() if name in _TAKES_ALL else len(stack) - _TAKES.get(name, 0)
        taken = stack[start:]
        del stack[start:]
        match name:
            case _ if name in _LITERALS:
                stack.append(argument)
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case _ if name.startswith("TUPLE"):
                stack.append(tuple(taken))
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append(_Pairs())
            case "SETITEM" | "SETITEMS":
                _typed(stack[-1], _Pairs).extend(zip(taken[::2], taken[1::2], strict=True))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND" | "APPENDS":
                _typed(stack[-1], list).extend(taken)
            case "GLOBAL":
                stack.append(_known(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_known(*taken))
            case "NEWOBJ" | "REDUCE":
                stack.append(_Object(_typed(taken[0], _Name), taken[1]))
            case "BUILD":
                _typed(stack[-1], _Object).state = taken[0]
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise UserError(f"has the operation {name}, which no description of tensors needs")
    (found,) = stack
    return found


def _known(module: object, name: object) -> _Name:
    """Return the name of one of torch's descriptions; UserError for any other."""
    module, name = _typed(module, str), _typed(name, str)
    if name not in _KNOWN.get(module, ()):
        what = f"names {shown(f'{module}.{name}')}, which may run code"
        raise UserError(f"{what}; must name torch's descriptions of tensors only")
    return _Name(name)


def _tensor(name: str, value: object) -> TensorStorageMetadata:
    fields = _fields(value, "TensorStorageMetadata")
    properties = _typed(fields["properties"], _Object)
    dtype, size = _typed(properties.state[0], _Name), _size(fields["size"])
    if properties.kind != "TensorProperties" or dtype not in _DTYPES:
        raise ValueError("a tensor without a type")
    every = _typed(fields["chunks"], list)
    parts = [_part(_fields(each, "ChunkStorageMetadata")) for each in every]
    every.clear()  # a list that a million tensors share would be read a million times
    parts = [part for part in parts if math.prod(part.sizes)]
    _check_parts(parts, size, f"tensor {shown(name)}")
    return TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), size, parts)


def _part(fields: Mapping[str, Any]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _check_parts(parts: Sequence[ChunkStorageMetadata], size: Sequence[int], where: str) -> None:
    """Raise UserError unless each element is in one part: torch would leave the others' memory unset."""
    count, needed = sum(math.prod(part.sizes) for part in parts), math.prod(size)
    if count != needed:
        raise UserError(f"{where}: its parts must have {needed} elements together, got {count}")
    for part in parts:
        ends = [start + length for start, length in zip(part.offsets, part.sizes, strict=True)]
        if any(end > most for end, most in zip(ends, size, strict=True)):
            raise UserError(f"{where}: its parts must be inside {[*size]}, got one that ends at {ends}")
    # To compare parts with each other may take hours. Each position along an axis has a weight at random, and
    # an element the product of its own: parts weigh what the tensor does only if each element is in one.
    before = [defaultdict[int, int](partial(secrets.randbelow, _PRIME)) for _ in size]
    found = sum(_weight(part.offsets, part.sizes, before) for part in parts)
    if (found - _weight([0] * len(size), size, before)) % _PRIME:
        raise UserError(f"{where}: its parts must not overlap, and some do")


def _weight(offsets: Sequence[int], sizes: Sequence[int], before: Sequence[Mapping[int, int]]) -> int:
    """Return the weight of a part, by that of all positions before each one along each axis."""
    weight = 1
    for start, length, of_axis in zip(offsets, sizes, before, strict=True):
        weight = weight * (of_axis[start + length] - of_axis[start]) % _PRIME
    return weight


def _place(pair: tuple[object, object]) -> tuple[MetadataIndex, _StorageInfo]:
    """Return the index of a tensor's part, or of another object, and its place."""
    index, place = _fields(pair[0], "MetadataIndex"), _fields(pair[1], "_StorageInfo")
    if place.get("transform_descriptors"):  # such as compression, which hides how much memory it takes
        raise UserError("must have parts that no extension of torch has transformed")
    start, length = _counts((place["offset"], place["length"]))
    offset = index.get("offset")
    key = MetadataIndex(_typed(index["fqn"], str), None if offset is None else _size(offset))
    return key, _StorageInfo(_typed(place["relative_path"], str), start, length)


def _size(value: object) -> torch.Size:
    if not _is(value, "Size"):
        raise ValueError("Size is missing")
    return torch.Size(_counts(value.arguments[0]))


def _counts(value: Any) -> tuple[int, ...]:
    if not are_counts(value):
        raise ValueError("integers >= 0 are missing")
    return tuple(value)


def _fields(value: object, kind: str) -> dict[str, Any]:
    """Return an object's attributes, by name."""
    if not _is(value, kind) or len(value.state) > _MOST_FIELDS:
        raise ValueError(f"{kind} is missing")
    return dict(_pairs(value.state))


def _pairs(value: object) -> Iterator[tuple[str, Any]]:
    return ((_typed(key, str), each) for key, each in _typed(value, _Pairs))


def _is(value: object, kind: str) -> TypeGuard[_Object]:
    return type(value) is _Object and value.kind == kind


def _typed(value: object, kind: type[T]) -> T:
    """Return a value of exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__} is missing")
    return value
