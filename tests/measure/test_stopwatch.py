import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hybridpipe.measure.stopwatch import Stopwatch, Took

CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_who_sleeps_waits_for_no_processor():
    watch = Stopwatch(CPU)
    began = watch.now()
    time.sleep(0.2)
    took = watch.since(began)
    watch.close()
    assert took.seconds >= 0.2 and took.running_seconds > 0.5 * took.seconds


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="needs Linux's schedstat")
def test_who_shares_a_processor_waits_for_it_half_of_the_time():
    """Two processes on one core, for many time slices."""
    everywhere = os.sched_getaffinity(0)
    core = min(everywhere)
    other = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE) as neighbour:
        try:
            neighbour.stdout.readline()
            os.sched_setaffinity(0, {core})
            watch = Stopwatch(CPU)
            began = watch.now()
            spin(0.5)
            took = watch.since(began)
            watch.close()
        finally:
            os.sched_setaffinity(0, everywhere)
            neighbour.kill()
    assert 0.3 < took.waited_seconds / took.seconds < 0.9


def test_without_the_kernels_word_nothing_was_waited_for(monkeypatch):
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    watch = Stopwatch(CPU)
    assert watch.since(watch.now()).waited_seconds == 0.0
    watch.close()


def test_running_is_what_is_left():
    assert Took(3.0, 1.0).running_seconds == 2.0
