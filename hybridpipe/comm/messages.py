"""Messages: a tuple of tensors packed into one buffer of bytes, and back.

A message is a head, then each tensor's bytes in C order at a multiple of 64 bytes. The head is a header of
eight int64 and, where tensors may be missing, a byte for each, 0 if it is. Hosts read and write it.
Invariant: the receiver checks the header against what the plan expects before it reads the rest.
"""

import json
import math
import struct
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
# The header is read and written without torch, whose calls take tens of µs each with cold caches.
_HEADER = struct.Struct("=8q")
HEADER_BYTES = _HEADER.size
MAGIC = 0x6879627270697065  # "hybrpipe"
SPEC_BYTES = 4096


MOST_SIZES = 256  # of which buffers are kept for reuse


class ProtocolError(RuntimeError):
    """A message is not the one that the plan expects."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor that crosses a cut.

    Args:
        sent: its type on the way.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sent: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's elements on the way, in bytes."""
        return math.prod(self.shape) * self.sent.itemsize


@dataclass(frozen=True)
class Spec:
    """Shapes and types of the tensors that cross a cut.

    Args:
        single: True for a bare tensor, False for a tuple.
        optional: tensors may be missing.
    """

    tensors: tuple[TensorSpec, ...]
    single: bool = False
    optional: bool = False

    @cached_property
    def head_bytes(self) -> int:
        """Size of the message's head in bytes."""
        return HEADER_BYTES + (_aligned(len(self.tensors)) if self.optional else 0)

    @cached_property
    def offsets(self) -> list[int]:
        """Offset of each tensor in bytes, and of the message's end."""
        offsets = [self.head_bytes]
        for tensor in self.tensors:
            offsets.append(offsets[-1] + _aligned(tensor.num_bytes))
        return offsets

    @cached_property
    def num_bytes(self) -> int:
        """Size of the whole message in bytes."""
        return self.offsets[-1]

    @cached_property
    def gradients(self) -> "Spec":
        """Spec of the gradients' message."""
        return Spec(tuple(tensor for tensor in self.tensors if tensor.requires_grad), optional=True)


def as_it_is(tensor: Tensor) -> torch.dtype:
    """Return a tensor's own type."""
    return tensor.dtype


def spec_of(
    tensors: Sequence[Tensor],
    single: bool = False,
    sent: Callable[[Tensor], torch.dtype] = as_it_is,
) -> Spec:
    """Return the spec of tensors.

    Args:
        sent: returns the type in which a tensor is sent.
    """
    specs = (TensorSpec(tuple(t.shape), t.dtype, t.requires_grad, sent(t)) for t in tensors)
    return Spec(tuple(specs), single)


def encode_spec(spec: Spec) -> Tensor:
    """Return a spec as SPEC_BYTES bytes of JSON, padded with spaces.

    Raises:
        ValueError: the spec is too long.
    """
    tensors = [[list(t.shape), _types(t), t.requires_grad] for t in spec.tensors]
    text = json.dumps({"single": spec.single, "tensors": tensors}).encode()
    if len(text) > SPEC_BYTES:
        raise ValueError(
            f"the shapes and types of a stage's outputs must fit in {SPEC_BYTES} bytes, got "
            f"{len(text)} bytes for {len(spec.tensors)} tensors"
        )
    return torch.frombuffer(bytearray(text.ljust(SPEC_BYTES)), dtype=torch.uint8)


def decode_spec(buffer: Tensor) -> Spec:
    """Return the spec that `encode_spec` was given."""
    fields = json.loads(buffer.numpy().tobytes())
    tensors = []
    for shape, types, requires_grad in fields["tensors"]:
        dtype, *sent = [getattr(torch, name) for name in types.split(" ")]
        tensors.append(TensorSpec(tuple(shape), dtype, requires_grad, *sent or [dtype]))
    return Spec(tuple(tensors), fields["single"])


def _types(tensor: TensorSpec) -> str:
    """Return the names of a tensor's type and, if that differs, of the type that is sent."""
    return " ".join(str(each).removeprefix("torch.") for each in dict.fromkeys((tensor.dtype, tensor.sent)))


def write_head(buffer: Tensor, spec: Spec, tensors: Sequence[Tensor | None], header: Sequence[int]) -> None:
    """Write a message's head into the beginning of `buffer`, which is in the host's memory."""
    memory = buffer.numpy().data
    _HEADER.pack_into(memory, 0, MAGIC, spec.num_bytes, *header, *[0] * (6 - len(header)))
    if spec.optional:
        memory[HEADER_BYTES : HEADER_BYTES + len(tensors)] = bytes(tensor is not None for tensor in tensors)


def pack(buffer: Tensor, spec: Spec, tensors: Sequence[Tensor | None]) -> None:
    """Write tensors of any device, type and memory layout into a message's `buffer`; None is skipped."""
    for view, tensor in zip(views(buffer, spec), tensors, strict=True):
        if tensor is not None:
            view.copy_(tensor.detach())


def present(head: Tensor, spec: Spec, header: Sequence[int], names: Sequence[str]) -> list[bool]:
    """Check that a message is the expected one, and return for each tensor whether it has it.

    Args:
        head: the message's head, in the host's memory.
        names: of the header's fields.

    Raises:
        ProtocolError: the header differs; names each field that does.
    """
    fields = _fields(head)
    if fields[: 1 + len(header)] != (spec.num_bytes, *header):
        expected = dict(zip(("num_bytes", *names), (spec.num_bytes, *header), strict=True))
        received = dict(zip(expected, fields, strict=False))
        differences = ", ".join(
            f"{name} {received[name]} instead of {value}"
            for name, value in expected.items()
            if received[name] != value
        )
        raise ProtocolError(f"a message is not the one the plan expects: {differences}")
    count = len(spec.tensors)
    if not spec.optional:
        return [True] * count
    return [flag != 0 for flag in head.numpy()[HEADER_BYTES : HEADER_BYTES + count].tolist()]


def views(buffer: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    """Return the message's tensors as they are sent, which share the buffer's memory."""
    return tuple(
        buffer[start : start + tensor.num_bytes].view(tensor.sent).view(tensor.shape)
        for start, tensor in zip(spec.offsets, spec.tensors, strict=False)
    )


def header_of(buffer: Tensor, count: int) -> list[int]:
    """Return the first `count` fields of a message's header.

    Raises:
        ProtocolError: the message does not start as one of hybridpipe's.
    """
    return list(_fields(buffer)[1 : 1 + count])


def _fields(buffer: Tensor) -> tuple[int, ...]:
    if len(buffer) >= HEADER_BYTES:
        fields: tuple[int, ...] = _HEADER.unpack_from(buffer.numpy().data)
        if fields[0] == MAGIC:
            return fields[1:]
    raise ProtocolError(
        "a message does not start with hybridpipe's header; does other code use this communicator?"
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Buffers:
    """Byte buffers that are reused, since fresh memory costs a page fault every 4 KiB.

    A buffer returns by itself once no tensor uses its memory. An explicit release could come too early:
    autograd may keep a view of a received gradient as a parameter's `.grad`.

    Args:
        pinned: allocate pinned memory, for copies to a GPU.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._pinned = pinned

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer of `num_bytes` bytes with arbitrary content."""
        free = self._free[num_bytes]
        if len(self._free) > MOST_SIZES:
            del self._free[next(iter(self._free))]  # the oldest; buffers in use then end with their tensors
        if free:
            memory = free.pop()
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        alias = memory.view()  # held by the tensor's storage, so it ends with the last tensor on it
        weakref.finalize(alias, free.append, memory).atexit = False
        return torch.from_numpy(alias)
