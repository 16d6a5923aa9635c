"""Stopwatch: elapsed seconds, and those of them for which the thread waited for a processor.

Not known here: layers. Invariant: where the kernel has no schedstat (Linux has), no waiting is counted.
"""

import os
from contextlib import suppress
from typing import NamedTuple

import torch

from hybridpipe.device import clock_of


class Took(NamedTuple):
    """Elapsed seconds, and those of them that the thread was ready to run but had no processor."""

    seconds: float
    waited_seconds: float = 0.0

    @property
    def running_seconds(self) -> float:
        """Seconds on a processor or asleep: the time taken with a processor of its own."""
        return self.seconds - self.waited_seconds


class Stopwatch:
    """A stopwatch for the thread that makes it, which reads the clock once the queue of `device` is empty."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._file: int | None = None
        with suppress(OSError):  # no Linux, or no /proc
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            if len(self._read()) != 3:  # a kernel that does not count
                self.close()

    def now(self) -> Took:
        """Return the present reading, for `since`; its zero is arbitrary."""
        self._clock()  # work that was queued before does not count
        waited_seconds = self._waited_seconds()  # before the clock, because reading takes a microsecond
        return Took(self._clock(), waited_seconds)

    def since(self, began: Took) -> Took:
        """Return the seconds since `began`, a reading of `now`."""
        seconds = self._clock() - began.seconds
        return Took(seconds, min(seconds, self._waited_seconds() - began.waited_seconds))

    def close(self) -> None:
        """Close the kernel's file; nothing is counted as waiting from then on."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _waited_seconds(self) -> float:
        return 0.0 if self._file is None else int(self._read()[1]) * 1e-9

    def _read(self) -> list[bytes]:
        """Return schedstat's fields: nanoseconds on a processor, nanoseconds waiting for one, time slices."""
        assert self._file is not None
        return os.pread(self._file, 100, 0).split()
