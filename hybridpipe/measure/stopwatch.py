"""Stopwatch: elapsed seconds, and those of them for which the thread waited for a processor.

Not known here: layers. Invariant: where the kernel has no schedstat (Linux has), no waiting is counted.
"""

import os
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch

from hybridpipe.device import lanes_of

Key = TypeVar("Key", bound=Hashable)


class Took(NamedTuple):
    """Elapsed seconds, and those of them that the thread was ready to run but had no processor."""

    seconds: float
    waited_seconds: float = 0.0

    @property
    def running_seconds(self) -> float:
        """Seconds on a processor or asleep: the time taken with a processor of its own."""
        return self.seconds - self.waited_seconds


class Reading(NamedTuple):
    """A point in a device's work, and the seconds that the thread had waited for a processor by then."""

    mark: Any
    waited_seconds: float


class Lap(NamedTuple):
    """The time between two readings."""

    began: Reading
    ended: Reading


class Stopwatch:
    """A stopwatch for the work that the thread which makes it gives to a device.

    A GPU's times are read when all laps are over, so that it is never kept waiting in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._lanes = lanes_of(device)
        self._file: int | None = None
        if not self._lanes.on_host:  # its work does not wait for the thread's processor
            return
        with suppress(OSError):  # no Linux, or no /proc
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            if len(self._read()) != 3:  # a kernel that does not count
                self.close()

    def now(self) -> Reading:
        """Return the present reading, for `since`."""
        waited_seconds = self._waited_seconds()  # before the clock, because reading takes a microsecond
        return Reading(self._lanes.mark(), waited_seconds)

    def since(self, began: Reading) -> Lap:
        """Return the time since `began`, a reading of `now`."""
        mark = self._lanes.mark()
        return Lap(began, Reading(mark, self._waited_seconds()))

    def read(self, laps: Mapping[Key, Lap]) -> dict[Key, Took]:
        """Return the seconds of each lap, once the device has done its work."""
        marks = [reading.mark for lap in laps.values() for reading in lap]
        times = iter(self._lanes.seconds(marks))
        taken = {}
        for key, (began, ended) in laps.items():
            began_at, ended_at = next(times), next(times)
            seconds = ended_at - began_at
            taken[key] = Took(seconds, min(seconds, ended.waited_seconds - began.waited_seconds))
        return taken

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
