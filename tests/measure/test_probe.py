import pytest

from hybridpipe.measure.allreduce import AllReduce
from hybridpipe.measure.links import HANDLED_BYTES, LARGE_BYTES, _handled_bytes
from hybridpipe.measure.probe import _equal_units, fastest
from hybridpipe.planning.cluster import Collective
from hybridpipe.planning.cost.formula import BUCKET_BYTES


@pytest.mark.parametrize(
    "leaders, size",
    [
        ([0, 0, 2, 2], 2),
        ([0, 1, 2], 1),
        ([0, 0, 0], 3),
        ([0, 0, 0, 3, 3], None),  # the probe hung: a rank sent to one that did not receive
        ([0, 1, 0, 1], None),
        ([0, 0, 2], None),
    ],
)
def test_hosts_of_unequal_size_are_refused(leaders, size):
    assert _equal_units(leaders) == size


@pytest.mark.parametrize(
    "bandwidth, sizes",
    [
        (1e10, [HANDLED_BYTES, LARGE_BYTES]),
        (1.25e8, [HANDLED_BYTES, 250_000]),  # 2 ms
        (1.25e7, [HANDLED_BYTES]),  # a large one would still be on its way
    ],
)
def test_messages_that_are_there_in_time(bandwidth, sizes):
    assert _handled_bytes(1 / bandwidth) == sizes


@pytest.mark.parametrize(
    "horovod, mpi, expected",
    [
        (1e9, 2e9, "mpi"),
        (1e9, 1.01e9, "horovod"),  # within what measurements of one backend differ by
        (2e9, 1e9, "horovod"),
    ],
)
def test_the_default_stays_unless_another_backend_is_clearly_faster(horovod, mpi, expected):
    measured = {
        name: AllReduce(Collective(bandwidth, 1e-4), overlap=0.5, speed=1.0)
        for name, bandwidth in (("horovod", horovod), ("mpi", mpi))
    }
    assert fastest(measured, 10**8, 2) == expected


def test_an_all_reduce_of_a_model_is_its_buckets_in_turn():
    one = AllReduce(Collective(1e9, 1e-3, wait_seconds=5e-3), overlap=1.0, speed=1.0)
    buckets = 50 * BUCKET_BYTES
    assert one.seconds(buckets, 4) == pytest.approx(5e-3 + 50 * 1e-3 + 2 * 3 / 4 * buckets / 1e9)
