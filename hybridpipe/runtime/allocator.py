"""Allocator: lets glibc keep memory that was freed, for the next microbatch.

By default it returns the end of the heap to the kernel, and large blocks always. A stage of one dense layer
(4 MB of weights, so 4 MB of gradients for each microbatch) then faulted in 2071 pages in every minibatch.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # that glibc accepts


def keep_freed_memory() -> None:
    """For this process, from now on. Does nothing where the C library knows no mallopt."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
