"""Stopwatch: how long something took, and for how much of that its thread waited for a processor.

Knows no layers. Where the kernel does not tell how long a thread has waited (Linux's schedstat does), it is
taken to have waited for nothing.
"""

import os
from contextlib import suppress
from typing import NamedTuple

import torch

from hybridpipe.device import clock_of


class Took(NamedTuple):
    """Seconds, and those of them that were spent ready to run, without a processor."""

    seconds: float
    waited_seconds: float = 0.0

    @property
    def running_seconds(self) -> float:
        """What it would have taken with a processor of its own."""
        return self.seconds - self.waited_seconds


class Stopwatch:
    """For the thread that makes it, and a device whose queue it waits for."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._file: int | None = None
        with suppress(OSError):  # no Linux, or no /proc
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            if len(self._read()) != 3:  # a kernel that does not count
                self.close()

    def now(self) -> Took:
        """Since some moment in the past; to begin with."""
        self._clock()  # what was queued before does not count
        waited_seconds = self._waited_seconds()  # first, as looking takes a microsecond
        return Took(self._clock(), waited_seconds)

    def since(self, began: Took) -> Took:
        """Between `began`, from `now`, and now."""
        seconds = self._clock() - began.seconds
        return Took(seconds, min(seconds, self._waited_seconds() - began.waited_seconds))

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _waited_seconds(self) -> float:
        return 0.0 if self._file is None else int(self._read()[1]) * 1e-9

    def _read(self) -> list[bytes]:
        """Nanoseconds on a processor, nanoseconds ready without one, turns."""
        assert self._file is not None
        return os.pread(self._file, 100, 0).split()
