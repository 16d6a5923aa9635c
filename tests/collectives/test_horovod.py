"""Horovod is started as its faults require, and waited for without a core."""

import os
import sys
from types import ModuleType

import pytest

from hybridpipe.collectives import horovod as module
from hybridpipe.collectives.horovod import HorovodCollectives
from hybridpipe.errors import UserError


class Horovod:
    """`horovod.torch` whose collectives end at the second poll."""

    Sum = "sum"

    def __init__(self):
        self.looks, self.ended = 0, False

    def grouped_allreduce_async_(self, tensors, name, op):
        assert (name, op) == ("bucket0", self.Sum)
        return tensors

    def poll(self, handle):
        self.looks += 1
        return self.looks > 1

    def synchronize(self, handle):
        assert self.looks > 1, "it would spin in here"
        return handle

    def shutdown(self):
        self.ended = True


def test_a_wait_sleeps_between_polls(monkeypatch):
    hvd = Horovod()
    monkeypatch.setattr(module, "horovod", lambda _: hvd)
    collectives = HorovodCollectives("the stage's ranks", None)
    assert collectives.all_reduce(["a", "b"], "bucket0").wait() == ["a", "b"] and hvd.looks == 2
    collectives.close()
    assert hvd.ended


def test_without_horovod_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(UserError, match=r"^Horovod is missing \(.*\): hybridpipe setup$"):
        module.horovod(None)


class Starting:
    """`horovod.torch`, as far as starting it goes."""

    def __init__(self, running=False):
        self.running, self.calls = running, []

    def is_initialized(self):
        return self.running

    def init(self, comm):
        self.running = True
        self.calls.append((comm, os.environ.get(module.FUSION_THRESHOLD)))

    def shutdown(self):
        self.running = False
        self.calls.append("shutdown")


@pytest.fixture
def start(monkeypatch):
    """Starts a Horovod with a cycle time and a threshold in the environment, and tells what it saw."""

    def begin(running=False, cycle=None, threshold=None):
        for name, value in (("HOROVOD_CYCLE_TIME", cycle), ("HOROVOD_FUSION_THRESHOLD", threshold)):
            monkeypatch.setenv(name, value or "")
            if value is None:
                monkeypatch.delenv(name)
        hvd = Starting(running)
        package = ModuleType("horovod")
        package.torch = hvd
        monkeypatch.setitem(sys.modules, "horovod", package)
        monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
        module._start_once.cache_clear()
        assert module.horovod("the stage's ranks") is hvd
        module.horovod("others")
        return hvd.calls

    return begin


def test_horovod_reduces_large_tensors_where_they_lie(start):
    bucket = str(module.BUCKET_BYTES)
    assert start() == [("the stage's ranks", bucket), "shutdown", ("others", bucket)]
    assert start(running=True)[0] == "shutdown"
    assert start(threshold="7")[0] == ("the stage's ranks", "7")


def test_horovod_starts_once_for_nothing_where_a_cycle_time_is_set(start):
    from hybridpipe.comm.mpi import MPI

    once = [(MPI.COMM_SELF, None), "shutdown"]
    assert start(cycle="10") == [*once, ("the stage's ranks", None), "shutdown", ("others", None)]
    assert start(cycle="10", threshold="7") == [("the stage's ranks", "7"), "shutdown", ("others", "7")]
