"""Devices: a rank's device, its clock and its peak memory.

Knows torch, no model, and of the ranks only this one's index on its host.
Invariant: no other module reads time differently on a CPU and on a GPU.
"""

import resource
import time
from collections.abc import Callable

import torch


def device_of_rank(local_rank: int, device: torch.device | str | None) -> torch.device:
    """Choose a rank's device: the GPU of its index on the host, modulo their number, or else the CPU.

    Args:
        local_rank: index of the rank on its host.
        device: the user's choice; None chooses, and "cuda" without an index is that GPU.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if num_gpus else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank % num_gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # pinned memory and layers that use "cuda" take the current device
    return device


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that first waits until the device has finished all queued work."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)  # otherwise an event would end when its kernels are queued
        return time.perf_counter()

    return clock


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of torch's allocator on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
