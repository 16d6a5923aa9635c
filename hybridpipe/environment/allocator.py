"""Allocator: what glibc does with freed memory: it keeps it in training where there is room, or returns it.

Knows the C library only. Where that has no mallopt, nothing happens.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from hybridpipe.environment.memory_limits import own_limits, resident_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
NEVER = -1  # value of M_TRIM_THRESHOLD
LARGE_BYTES, MOST_BLOCKS = 2**17, 2**16
# A heap that keeps freed memory was up to 1.6 times as large as what was in use (docs/results/memory.md).
ROOM_TO_KEEP = 2

_keeps = False  # glibc does not tell its present settings


def keep_freed_memory() -> None:
    """Keep freed memory in this process from now on.

    By default glibc returns the end of the heap to the kernel, and every block above a threshold of at most
    32 MiB. Each microbatch's gradients then cause page faults again: the gradient of one dense layer of
    4096 x 4096 (64 MB) cost a VGG-11 a seventh of its time.
    """
    global _keeps
    _keeps = True
    _set(M_MMAP_MAX, 0)  # the main thread allocates every block on the heap
    _set(M_TRIM_THRESHOLD, NEVER)


def return_freed_memory() -> None:
    """Return large blocks to the kernel as soon as they are freed from now on, and what is free already.

    A process then has what is in use and little more, but gets new pages for each large block.
    """
    global _keeps
    _keeps = False
    _set(M_MMAP_THRESHOLD, LARGE_BYTES)  # each larger block has a mapping of its own
    _set(M_MMAP_MAX, MOST_BLOCKS)
    _trim()


def suit(needed: int | None, left: int | None) -> None:
    """Return freed memory from now on where keeping it might not fit.

    Args:
        needed: bytes that will be in use at most; None: not known.
        left: bytes that there are for them; None: not limited.
    """
    if needed is not None and left is not None and left < ROOM_TO_KEEP * needed:
        return_freed_memory()


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Return large blocks to the kernel as soon as they are freed, in this context; then as before.

    On the heap, small blocks that stay would be put where a large one was freed, and the next large one
    would not fit there: weights that are made and dropped one by one took the memory of all together.
    """
    kept = _keeps
    return_freed_memory()
    try:
        yield
    finally:
        if kept:
            keep_freed_memory()


def _set(parameter: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(parameter, value)


def _trim() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def held_by_process() -> int:
    """Return the bytes that this process has, once it has returned what is free.

    What stays mapped of that lies between blocks in use, and may fit no other block.
    """
    _trim()
    return resident_bytes()


def room_left(limit_bytes: int | None) -> int | None:
    """Return the bytes that this process may still take; None: not limited."""
    if limit_bytes is None:
        return None
    resident = resident_bytes()
    left = min([limit_bytes - resident, *(room.num_bytes for room in own_limits())])
    return max(0, left + min(resident, _freed_bytes()))


def _freed_bytes() -> int:
    """Return the bytes that the heaps have free; 0 where the C library does not tell."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # glibc < 2.33
        return 0
    libc.mallinfo2.restype = _MallInfo
    return int(libc.mallinfo2().fordblks)


_ENTRIES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h; fordblks are the free bytes of all heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in _ENTRIES.split()]
