"""Out of memory: what an error that says so means for a training, in words.

Not known here: how the job ends. Invariant: an error of another kind is not explained.
"""

import errno
import resource

import torch

from hybridpipe.environment.memory_limits import RankMemory
from hybridpipe.planning.quantities import size

REMEDIES = "smaller microbatches, recompute, more ranks or a lower memory limit for the plan may help"
_expected: tuple[RankMemory, int | None] | None = None


def expect(memory: RankMemory, predicted_bytes: int | None) -> None:
    """Note this rank's memory, and what its stage was predicted to take; None without a prediction."""
    global _expected
    _expected = memory, predicted_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that memory could not be allocated, on the host or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def explanation(error: BaseException) -> str:
    """Return what an error means, in figures, and what may help; empty for an error of another kind."""
    if not is_out_of_memory(error):
        return ""
    used = f"the process has had {size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}"
    if isinstance(error, torch.OutOfMemoryError):
        used = f"torch has had {size(torch.cuda.max_memory_allocated())} of the GPU"
    told = [used]
    if _expected is not None:
        memory, predicted = _expected
        if memory.limit_bytes is not None:
            told.append(f"its limit is {size(memory.limit_bytes)} ({memory.origin})")
        if predicted is not None:
            told.append(f"{size(memory.held_bytes + predicted)} were predicted")
    return f"out of memory: {', '.join(told)}; {REMEDIES}"
