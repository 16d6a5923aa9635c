"""Allocator: lets glibc keep memory that was freed, for the next microbatch.

By default it returns the end of the heap to the kernel, and every block above a threshold, which cannot be
raised beyond 32 MiB. A stage of one dense layer (4 MB of weights, so 4 MB of gradients for each microbatch)
then faulted in 2071 pages in every minibatch; the gradient of a dense layer of 4096 on 4096 (64 MB) cost a
VGG-11 a seventh of its time.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = -1  # of M_TRIM_THRESHOLD


def keep_freed_memory() -> None:
    """For this process, from now on. Does nothing where the C library knows no mallopt."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)  # no block apart from the heap, in the main thread
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
