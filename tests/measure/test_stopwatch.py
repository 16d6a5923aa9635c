"""The stopwatch against a file and a clock that are given, and against the kernel's own figure."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hybridpipe.device import Lanes
from hybridpipe.measure import stopwatch
from hybridpipe.measure.stopwatch import Stopwatch, Took
from tests.late_cuda import LateLanes

CPU = torch.device("cpu")
SCHEDSTAT = Path("/proc/thread-self/schedstat")
LIMIT_SECONDS = 60  # against hanging


class Given:
    """A clock in seconds and a file of the kernel's nanoseconds, both set by the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tell(0.0, waited_seconds=0.0)

    def tell(self, seconds: float, waited_seconds: float) -> None:
        self.seconds = seconds
        self.path.write_text(f"123 {round(waited_seconds * 1e9)} 4\n")


@pytest.fixture
def given(monkeypatch, tmp_path):
    given = Given(tmp_path / "schedstat")
    descriptor = os.open(given.path, os.O_RDONLY)
    monkeypatch.setattr(os, "open", lambda *_: descriptor)
    monkeypatch.setattr(Lanes, "mark", lambda lanes: given.seconds)
    return given


@pytest.mark.parametrize(
    "waited, told",
    [
        (3.0, 0.0),  # asleep, or running
        (3.5, 0.5),
        (9.0, 2.0),  # the two are read one after the other: no more than all of it
    ],
)
def test_seconds_without_a_processor_are_the_kernels(given, waited, told):
    given.tell(10.0, waited_seconds=3.0)
    watch = Stopwatch(CPU)
    began = watch.now()
    given.tell(12.0, waited_seconds=waited)
    took = watch.read({"it": watch.since(began)})["it"]
    watch.close()
    assert took == (pytest.approx(2.0), pytest.approx(told))


def waited_seconds() -> float:
    return int(SCHEDSTAT.read_text().split()[1]) * 1e-9


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="needs Linux's schedstat")
def test_a_thread_that_shares_a_processor_waits_for_it():
    """Two processes on one core, until the kernel has let this one wait for a while."""
    everywhere = os.sched_getaffinity(0)
    core = min(everywhere)
    other = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE) as neighbour:
        try:
            neighbour.stdout.readline()
            os.sched_setaffinity(0, {core})
            watch = Stopwatch(CPU)
            before = waited_seconds()
            began = watch.now()
            first = waited_seconds()
            end = time.monotonic() + LIMIT_SECONDS
            while waited_seconds() < first + 0.05:
                assert time.monotonic() < end, "the kernel counts no waiting"
            last = waited_seconds()
            took = watch.read({"it": watch.since(began)})["it"]
            after = waited_seconds()
            watch.close()
        finally:
            os.sched_setaffinity(0, everywhere)
            neighbour.kill()
    assert last - first - 1e-6 <= took.waited_seconds <= after - before + 1e-6


def test_without_the_kernels_word_nothing_was_waited_for(monkeypatch):
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    watch = Stopwatch(CPU)
    assert watch.read({0: watch.since(watch.now())})[0].waited_seconds == 0.0
    watch.close()


def test_laps_of_a_gpu_are_read_when_all_are_over(monkeypatch):
    lanes = LateLanes()
    monkeypatch.setattr(stopwatch, "lanes_of", lambda device: lanes)
    watch = Stopwatch(CPU)
    laps = {name: watch.since(watch.now()) for name in ("first", "second")}
    marks = [reading.mark for lap in laps.values() for reading in lap]
    assert not any(mark.reached for mark in marks)
    taken = watch.read(laps)
    assert all(mark.reached for mark in marks)
    assert all(took.seconds >= 0 and took.waited_seconds == 0 for took in taken.values())


def test_running_is_what_is_left():
    assert Took(3.0, 1.0).running_seconds == 2.0
