"""Allocator: makes glibc keep freed memory for the next microbatch instead of returning it to the kernel.

Knows the C library only.
"""

import ctypes

from hybridpipe.environment.memory_limits import Held, resident_bytes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = -1  # value of M_TRIM_THRESHOLD


def keep_freed_memory() -> None:
    """Keep freed memory in this process from now on; does nothing where the C library has no mallopt.

    By default glibc returns the end of the heap to the kernel, and every block above a threshold of at most
    32 MiB. Each microbatch's gradients then cause page faults again: the gradient of one dense layer of
    4096 x 4096 (64 MB) cost a VGG-11 a seventh of its time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)  # the main thread allocates every block on the heap
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)


def held_by_process() -> Held:
    """Return what this process has; a C library without mallinfo2 says of nothing that it is reusable."""
    libc, resident = ctypes.CDLL(None), resident_bytes()
    if not hasattr(libc, "mallinfo2"):  # glibc < 2.33
        return Held(resident)
    libc.mallinfo2.restype = _MallInfo
    return Held(resident, min(resident, libc.mallinfo2().fordblks))


_ENTRIES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h; fordblks are the free bytes of all heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in _ENTRIES.split()]
