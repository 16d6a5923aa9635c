"""Allocated: the most bytes that torch has at a time while something runs, beyond those from before.

Knows torch's allocators; no layers. Invariant: nothing is printed, and a user's profiler is left alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridpipe.torch_private import autograd, profiler


@dataclass
class Allocated:
    """Bytes that were allocated in a block and not freed before it.

    Args:
        most: at a time; None where it could not be seen.
        kept: at the block's end.
    """

    most: int | None = None
    kept: int = 0

    @property
    def passing(self) -> int | None:
        """Bytes that were there for a moment only; None where they could not be seen."""
        return None if self.most is None else self.most - max(0, self.kept)


@contextmanager
def allocated(device: torch.device) -> Iterator[Allocated]:
    """Count what torch allocates on the device inside this context, oneDNN's needs included."""
    seen = Allocated()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield seen
        seen.most = torch.cuda.max_memory_allocated(device) - before
        seen.kept = torch.cuda.memory_allocated(device) - before
    elif autograd._profiler_enabled():
        yield seen
    else:
        changes: list[int] = []
        with _recorded(changes):
            yield seen
        seen.most = 0
        for change in changes:
            seen.kept += change
            seen.most = max(seen.most, seen.kept)


@contextmanager
def _recorded(changes: list[int]) -> Iterator[None]:
    """Record the bytes of each allocation on the CPU, below 0 where memory is freed.

    Torch's present profiler prints a line at each start, and a dispatch mode does not see what a kernel
    allocates and frees.
    """
    shapes, memory, stack, flops, modules = False, True, False, False, False
    cpu, more = profiler.ProfilerState.CPU, profiler._ExperimentalConfig()
    config = profiler.ProfilerConfig(cpu, shapes, memory, stack, flops, modules, more)
    autograd._enable_profiler_legacy(config)
    try:
        yield
    finally:
        for thread in autograd._disable_profiler_legacy():
            changes += [e.cpu_memory_usage() for e in thread if e.kind() == "memory_alloc"]
