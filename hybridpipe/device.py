"""Devices: a rank's device, its memory, and its lanes, in which a GPU computes and copies beside the host.

Knows torch, no model, and no ranks but those of this one's host.
Invariant: no other module asks whether a device is a GPU to read time, to wait or to copy.
"""

import pickle
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Completion(Protocol):
    """Completion of the work in a lane up to a point."""

    def query(self) -> bool:
        """Return True if the work before the point is done."""


class Lanes:
    """The lanes of a CPU: work is done when a call returns, so nothing is waited for.

    Args:
        device: the rank's device.
    """

    on_host = True  # the host computes, so the host's memory is the device's, and time is the thread's

    def __init__(self, device: torch.device) -> None:
        self.device = device

    mark: Callable[..., Any] = staticmethod(time.perf_counter)  # marks the present point, for `seconds`

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]:
        """Return the time of each mark in seconds of this host's monotonic clock; wait for the last one."""
        return marks

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def enter_thread(self) -> None:
        """Prepare this thread for looks at the lanes' work."""

    def load(self, tensor: Tensor) -> Tensor:
        """Return an input on the device."""
        return tensor.to(self.device)


class GpuLanes(Lanes):
    """The lanes of a GPU: torch's current stream computes, one stream copies out, and one copies in.

    Copies out and copies in have a stream each: a copy out waits until its numbers are computed, and would
    hold up what arrives. Of these methods only `seconds`, `synchronize` and `head` wait for the GPU.

    Args:
        cuda: torch.cuda, or what stands for it.
    """

    on_host = False

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._outward, self._inward = cuda.Stream(device), cuda.Stream(device)
        self._arriving: deque[Point] = deque()  # copies in that still read the host's memory

    def mark(self) -> Any:
        """Return an event behind the work that the current stream has been given so far."""
        event = self._cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]:
        """Return the marks' times, counted back from an event that the host waits for now."""
        if not marks:
            return []
        now = self.mark()
        now.synchronize()
        seconds = time.perf_counter()
        return [seconds - 1e-3 * mark.elapsed_time(now) for mark in marks]

    def synchronize(self) -> None:
        """Wait until the current stream has done its work."""
        self._cuda.current_stream(self.device).synchronize()

    def enter_thread(self) -> None:
        """Make the device this thread's own, else its first look at an event would use the first GPU."""
        self._cuda.set_device(self.device)

    def load(self, tensor: Tensor) -> Tensor:
        """Return an input on the device, without waiting.

        A copy from memory that is not pinned would wait until the GPU has done all that it was given.
        """
        if self.is_here(tensor) or tensor.layout != torch.strided or tensor.requires_grad:
            return tensor.to(self.device)
        return self.copy_in(tensor if tensor.is_pinned() else tensor.pin_memory())

    def empty(self, num_bytes: int) -> Tensor:
        """Return memory on the device with arbitrary content, for the current stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def is_here(self, tensor: Tensor) -> bool:
        """Return True if a tensor is not in the host's memory."""
        return tensor.device.type != "cpu"

    def computed(self, *held: Tensor) -> "Point":
        """Return the present point in the current stream's work; tensors are held with it."""
        return Point(self._recorded(), held)

    def copy_out(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> "list[Point]":
        """Start to copy tensors into pinned memory, once the work that was given so far is done.

        Returns:
            the end of each copy, which holds the tensor.
        """
        self._outward.wait_event(self._recorded())
        with self._cuda.stream(self._outward):
            return [self._copied(host, tensor, tensor) for host, tensor in zip(hosts, tensors, strict=True)]

    def copy_in(self, host: Tensor) -> Tensor:
        """Start to copy pinned memory to the device; work that is given from now on waits for the copy.

        The memory is held until it was read.
        """
        with self._cuda.stream(self._inward):
            tensor = torch.empty_like(host, device=self.device)
        return self.copied_in(tensor, [self.start_copy_in(tensor, host)])

    def start_copy_in(self, tensor: Tensor, host: Tensor) -> "Point":
        """Start to copy pinned memory into memory of the inward stream. Any thread may call it.

        Returns:
            the end of the copy, which holds the pinned memory.
        """
        with self._cuda.stream(self._inward):
            return self._copied(tensor, host, host)

    def copied_in(self, tensor: Tensor, copied: Sequence["Point"]) -> Tensor:
        """Return a tensor that copies in fill; work that is given from now on waits for them."""
        while self._arriving and self._arriving[0].query():
            self._arriving.popleft()
        self._arriving.extend(copied)
        for point in copied:
            self._cuda.current_stream(self.device).wait_event(point.event)
        return self.used(tensor)

    def room(self, num_bytes: int) -> Tensor:
        """Return memory on the device into which MPI may write at once.

        What the current stream has let go of may still be used by work in it. So this memory is the inward
        stream's, which gets it back only when the work that has used it is done.
        """
        with self._cuda.stream(self._inward):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def head(self, room: Tensor, num_bytes: int) -> Tensor:
        """Return the first bytes of what MPI has written into a room, on the host."""
        with self._cuda.stream(self._inward):
            return room[:num_bytes].cpu()

    def reaches(self, device: torch.device) -> bool:
        """Return True if this GPU reads the memory of another one without the host."""
        return device == self.device or bool(self._cuda.can_device_access_peer(self.device, device))

    def shared_event(self) -> Any:
        """Return an event that other processes of this host may wait for, each time that it is recorded."""
        return self._cuda.Event(interprocess=True)

    def handle_of(self, *what: Any) -> bytes:
        """Return what another process opens to use memory and events of this one, while this one has them."""
        return bytes(ForkingPickler.dumps(what))

    def opened(self, handle: bytes) -> tuple[Any, ...]:
        """Return the memory and events behind a handle of another process."""
        opened: tuple[Any, ...] = pickle.loads(handle)
        return opened

    def wait_for(self, event: Any) -> None:
        """Let work that is given to the current stream from now on wait for the event, as recorded last."""
        self._cuda.current_stream(self.device).wait_event(event)

    def copy_from(self, room: Tensor, memory: Tensor, written: Any, read: Any) -> "Point":
        """Start to copy memory of another process, once it is written; `read` comes when it may be again.

        Returns:
            the end of the copy.
        """
        with self._cuda.stream(self._inward):
            self._inward.wait_event(written)
            copied = self._copied(room, memory)
            read.record()
            return copied

    def used(self, tensor: Tensor) -> Tensor:
        """Return memory of the inward stream, which the current stream uses from now on."""
        tensor.record_stream(self._cuda.current_stream(self.device))  # else it could be written too early
        return tensor

    def _copied(self, to: Tensor, source: Tensor, *held: Tensor) -> "Point":
        """Start to copy in the current stream; return the end of it."""
        to.copy_(source, non_blocking=True)
        return Point(self._recorded(), held)

    def _recorded(self) -> Any:
        event = self._cuda.Event(blocking=True)
        event.record()
        return event


class Point(NamedTuple):
    """A point in a lane's work; `held` must not be used otherwise before it is reached."""

    event: Any
    held: tuple[Tensor, ...]

    def query(self) -> bool:
        """Return True if the work before the point is done."""
        return bool(self.event.query())


def visible_gpus() -> tuple[str, ...]:
    """Return the names that are unique to each of the GPUs which this process sees, in torch's order."""
    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))


def device_of_rank(index: int, count: int, num_gpus: int, device: torch.device | str | None) -> torch.device:
    """Choose a rank's device.

    Ranks share GPUs out in blocks, so that ranks which have one together are neighbours.

    Args:
        index, count: of the rank among the ranks of its host that see the same GPUs.
        num_gpus: number of these.
        device: the user's choice; None: a GPU, if there is one. "cuda" without an index is the rank's own.
    """
    if device is None:
        device = "cuda" if num_gpus else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", index * num_gpus // count)
    return device


def lanes_of(device: torch.device) -> Lanes:
    """Return the lanes of a rank's device."""
    return GpuLanes(device) if device.type == "cuda" else Lanes(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of torch's allocator on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
