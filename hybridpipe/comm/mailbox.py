"""Mailboxes: device memory that another process of this host reads itself, by CUDA IPC.

Knows slots, their events and the notes about them; not who sends a note, and no transport.
Invariant: a slot is written again only behind its reading, and its memory outlives each use of its handle.
"""

import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybridpipe.comm.messages import Spec, pack
from hybridpipe.device import GpuLanes, Point

# Slots of a mailbox. More messages than these are seldom under way: the reader frees a slot as soon as it has
# given its copy to its GPU.
MOST_SLOTS = 4
# A note is the number of a slot, and a handle: the memory's and its event's, or that of the reader's event.
# It always has the handle, so that neither side needs to know what the other has opened.
NOTE_BYTES = 2048
NO_SLOT = -1
_NOTE = struct.Struct("=qq")


class SentSlot:
    """Memory of a sender, from which one other rank copies message after message.

    Args:
        lanes: the sender's.
    """

    def __init__(self, lanes: GpuLanes) -> None:
        self._lanes, self._written, self._read = lanes, lanes.shared_event(), _Opened(lanes)
        self._memory: Tensor | None = None
        self.handle, self.is_free = b"", True

    def holds(self, num_bytes: int) -> bool:
        """Return True if a message of that size fits."""
        return self._memory is not None and num_bytes <= len(self._memory)

    def write(self, spec: Spec, tensors: Sequence[Tensor | None]) -> None:
        """Give the current stream a message to write, once the one before was read; its head is left open."""
        if self._memory is None or not self.holds(spec.num_bytes):
            self._memory = self._lanes.empty(spec.num_bytes)
            self.handle = self._lanes.handle_of(self._memory, self._written)
        for event in self._read.content:
            self._lanes.wait_for(event)
        pack(self._memory[: spec.num_bytes], spec, tensors)
        self._written.record()
        self.is_free = False

    def free(self, handle: bytes) -> None:
        """Note that the reader has given its GPU the copy, behind which its event comes."""
        self._read.open(handle)
        self.is_free = True

    def close(self) -> None:
        """Let go of the reader's event."""
        self._read = _Opened(self._lanes)


class Mailbox:
    """The slots for one reader; a slot that is too small grows."""

    def __init__(self, lanes: GpuLanes) -> None:
        self._lanes, self.slots = lanes, list[SentSlot]()

    def free_slot(self, num_bytes: int) -> int:
        """Return the number of a free slot, or NO_SLOT: one that holds a message, a new one, or any other."""
        free = [i for i, slot in enumerate(self.slots) if slot.is_free]
        fitting = [i for i in free if self.slots[i].holds(num_bytes)]
        if not fitting and len(self.slots) < MOST_SLOTS:
            self.slots.append(SentSlot(self._lanes))
            return len(self.slots) - 1
        return next(iter(fitting + free), NO_SLOT)


class ReadSlot:
    """A slot of another rank, as its reader has it.

    Args:
        lanes: the reader's.
    """

    def __init__(self, lanes: GpuLanes) -> None:
        self._lanes, self._slot, self._read = lanes, _Opened(lanes), lanes.shared_event()
        self._copied: Point | None = None
        self.handle = lanes.handle_of(self._read)

    def read(self, handle: bytes, num_bytes: int) -> tuple[Tensor, Point]:
        """Start to copy a message, once it is written.

        Returns:
            memory of the inward stream, and the end of the copy.
        """
        if handle != self._slot.handle:
            self.close()
        memory, written = self._slot.open(handle)
        room = self._lanes.room(num_bytes)
        self._copied = self._lanes.copy_from(room, memory[:num_bytes], written, self._read)
        return room, self._copied

    def close(self) -> None:
        """Let go of the memory, once it was read."""
        if self._copied is not None:
            self._copied.event.synchronize()
        self._slot = _Opened(self._lanes)


class _Opened:
    """Memory and events of another process, opened once."""

    def __init__(self, lanes: GpuLanes) -> None:
        self._lanes, self.handle, self.content = lanes, b"", tuple[Any, ...]()

    def open(self, handle: bytes) -> tuple[Any, ...]:
        if handle != self.handle:
            self.handle, self.content = handle, self._lanes.opened(handle)
        return self.content


def write_note(buffer: Tensor, number: int, handle: bytes) -> None:
    """Write a note about a slot into NOTE_BYTES bytes of the host's memory.

    Raises:
        RuntimeError: the handle is too long.
    """
    if _NOTE.size + len(handle) > NOTE_BYTES:
        raise RuntimeError(f"a handle has {len(handle)} bytes, and {NOTE_BYTES - _NOTE.size} fit")
    memory = buffer.numpy().data
    _NOTE.pack_into(memory, 0, number, len(handle))
    memory[_NOTE.size : _NOTE.size + len(handle)] = handle


def read_note(buffer: Tensor) -> tuple[int, bytes]:
    """Return the slot's number and the handle of a note."""
    memory = buffer.numpy().data
    number, length = _NOTE.unpack_from(memory)
    return number, bytes(memory[_NOTE.size : _NOTE.size + length])
