"""A stand-in for torch.cuda between processes: memory is shared, and streams for copies are late threads.

The stream that computes does its work at once, and waits where a GPU would. An event counts how often it was
recorded and reached, in shared memory, so that processes wait for each other's. Handles are torch's own.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from torch import Tensor

from hybridpipe.device import GpuLanes, Point

MOST_LATE_SECONDS = 2e-3
PAUSE_SECONDS = 1e-4


class Present:
    """The stream that computes."""

    def give(self, work: Callable[[], None]) -> None:
        work()

    def wait_event(self, event: "Event") -> None:
        recorded = int(event.counts[0])  # as recorded last
        self.give(lambda: event.wait(recorded))

    def synchronize(self) -> None:
        """Its work is done."""


class Late(Present):
    """A stream for copies: a thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def _work(self) -> None:
        while True:
            self._queue.get()()


class Event:
    """A point in a stream's work, where it was recorded last."""

    def __init__(self, cuda: "ProcessCuda", counts: Tensor | None = None) -> None:
        self.cuda, self.counts = cuda, torch.zeros(2, dtype=torch.int64) if counts is None else counts

    def __reduce__(self):
        return opened_event, (self.counts,)

    def record(self) -> None:
        recorded = int(self.counts[0]) + 1
        self.counts[0] = recorded
        self.cuda.current_stream().give(lambda: self._reach(recorded))

    def _reach(self, recorded: int) -> None:
        self.seconds = time.perf_counter()
        self.counts[1] = recorded

    def wait(self, recorded: int) -> None:
        while self.counts[1] < recorded:
            time.sleep(PAUSE_SECONDS)

    def query(self) -> bool:
        return bool(self.counts[1] >= self.counts[0])

    def synchronize(self) -> None:
        self.wait(int(self.counts[0]))

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.seconds - self.seconds)


class ProcessCuda:
    """What stands for torch.cuda."""

    def __init__(self) -> None:
        self._computing, self._thread = Present(), threading.local()

    def Stream(self, device: torch.device) -> Late:
        return Late()

    def Event(self, **_: bool) -> Event:
        return Event(self)

    def set_device(self, device: torch.device) -> None:
        """There is one."""

    def current_stream(self, device: torch.device | None = None) -> Present:
        return getattr(self._thread, "stream", self._computing)

    @contextmanager
    def stream(self, stream: Present) -> Iterator[None]:
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before


CUDA = ProcessCuda()


def opened_event(counts: Tensor) -> Event:
    """Return another process's event."""
    return Event(CUDA, counts)


class ProcessLanes(GpuLanes):
    """The lanes of a GPU that is a CPU, as other processes of this host see it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), CUDA)

    def load(self, tensor: Tensor) -> Tensor:
        return tensor

    def used(self, tensor: Tensor) -> Tensor:
        return tensor

    def _copied(self, to: Tensor, source: Tensor, *held: Tensor) -> Point:
        def copy() -> None:
            time.sleep(random.uniform(0, MOST_LATE_SECONDS))
            to.copy_(source)

        CUDA.current_stream().give(copy)
        return Point(self._recorded(), held)
