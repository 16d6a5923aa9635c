"""Device of a rank: its choice, its clock and its memory. Models and other ranks are not known here.

Invariant: no other module distinguishes CPU and GPU to measure time.
"""

import resource
import time
from collections.abc import Callable

import torch


def device_of_rank(local_rank: int, device: torch.device | str | None) -> torch.device:
    """Choose a rank's device: by default the GPU of its number on this host if there is one, else the CPU.

    Args:
        local_rank: index of the rank among those of its host.
        device: the user's choice; "cuda" without a number is the rank's own.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if num_gpus else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank % num_gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for pinned memory, and tensors that layers make on "cuda"
    return device


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that waits for the device's queue before each reading."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)  # else an event would end when its kernels are queued
        return time.perf_counter()

    return clock


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of a GPU's allocator or, on a CPU, of the process, libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
