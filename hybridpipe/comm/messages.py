"""Messages: a tuple of tensors as one run of bytes, and back.

A message is a header of eight int64 (what it is, from where, how long), then each tensor's bytes in C
order, each at a multiple of 64 bytes so that the receiver can compute on them in place. The receiver
knows what it expects and compares the header before it looks at the rest.
"""

import json
import math
import struct
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
# Read and written without torch, whose calls take tens of µs each where caches are cold, as after a forward.
_HEADER = struct.Struct("=8q")
HEADER_BYTES = _HEADER.size
MAGIC = 0x6879627270697065  # "hybrpipe"
SPEC_BYTES = 4096


class ProtocolError(RuntimeError):
    """A message is not the one that the plan expects."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """What the tensor's elements weigh."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Spec:
    """Everything about what crosses a cut but its numbers. `single`: a bare tensor, not a tuple of one."""

    tensors: tuple[TensorSpec, ...]
    single: bool = False

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor starts; one more for the end, which is the size of the message."""
        offsets = [HEADER_BYTES]
        for tensor in self.tensors:
            offsets.append(offsets[-1] + _aligned(tensor.num_bytes))
        return offsets

    @property
    def num_bytes(self) -> int:
        """Size of the whole message."""
        return self.offsets[-1]

    @cached_property
    def gradients(self) -> "Spec":
        """The message that comes back: a byte for each gradient, 0 where there is none, then they."""
        wanted = tuple(tensor for tensor in self.tensors if tensor.requires_grad)
        return Spec((TensorSpec((len(wanted),), torch.uint8, False), *wanted))


def spec_of(tensors: Sequence[Tensor], single: bool = False) -> Spec:
    """The spec of these tensors."""
    return Spec(tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), single)


def encode_spec(spec: Spec) -> Tensor:
    """A spec as SPEC_BYTES bytes of JSON, padded with spaces."""
    text = json.dumps(
        {
            "single": spec.single,
            "tensors": [
                [list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad] for t in spec.tensors
            ],
        }
    ).encode()
    if len(text) > SPEC_BYTES:
        raise ValueError(
            f"what crosses a cut must be described in {SPEC_BYTES} bytes, got {len(text)} bytes "
            f"for {len(spec.tensors)} tensors"
        )
    return torch.frombuffer(bytearray(text.ljust(SPEC_BYTES)), dtype=torch.uint8)


def decode_spec(buffer: Tensor) -> Spec:
    """The inverse of `encode_spec`."""
    fields = json.loads(buffer.numpy().tobytes())
    tensors = (
        TensorSpec(tuple(shape), getattr(torch, dtype), requires_grad)
        for shape, dtype, requires_grad in fields["tensors"]
    )
    return Spec(tuple(tensors), fields["single"])


def pack(buffer: Tensor, spec: Spec, tensors: Sequence[Tensor | None], header: Sequence[int]) -> None:
    """Write header and tensors into `buffer`, from any device and memory layout; for None nothing."""
    _HEADER.pack_into(buffer.numpy().data, 0, MAGIC, spec.num_bytes, *header, *[0] * (6 - len(header)))
    for view, tensor in zip(views(buffer, spec), tensors, strict=True):
        if tensor is not None:
            view.copy_(tensor.detach())


def check_header(buffer: Tensor, spec: Spec, header: Sequence[int], names: Sequence[str]) -> None:
    """Raises ProtocolError, naming each field that differs, unless the message is the expected one."""
    fields = _fields(buffer)
    if fields[: 1 + len(header)] != (spec.num_bytes, *header):
        expected = dict(zip(("num_bytes", *names), (spec.num_bytes, *header), strict=True))
        received = dict(zip(expected, fields, strict=False))
        differences = ", ".join(
            f"{name} {received[name]} instead of {value}"
            for name, value in expected.items()
            if received[name] != value
        )
        raise ProtocolError(f"a message is not the one the plan expects: {differences}")


def views(buffer: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    """The message's tensors, sharing the buffer's memory."""
    return tuple(
        buffer[start : start + tensor.num_bytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(spec.offsets, spec.tensors, strict=False)
    )


def header_of(buffer: Tensor, count: int) -> list[int]:
    """What the sender says that the message is. Raises ProtocolError if it is not one of ours."""
    return list(_fields(buffer)[1 : 1 + count])


def _fields(buffer: Tensor) -> tuple[int, ...]:
    if len(buffer) >= HEADER_BYTES:
        fields: tuple[int, ...] = _HEADER.unpack_from(buffer.numpy().data)
        if fields[0] == MAGIC:
            return fields[1:]
    raise ProtocolError("a message does not start as one of ours; who else uses this communicator?")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Buffers:
    """Byte buffers that are used again: fresh memory costs a page fault every 4 KiB.

    A buffer comes back by itself once no tensor looks at its memory any more. No one could give it back
    by hand in time: autograd may keep a view of a received gradient as a parameter's `.grad`.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._pinned = pinned

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of that many bytes, with anything in it."""
        free = self._free[num_bytes]
        if free:
            memory = free.pop()
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        alias = memory.view()  # the tensor's storage holds the alias; its end is the end of the last tensor
        weakref.finalize(alias, free.append, memory).atexit = False
        return torch.from_numpy(alias)
