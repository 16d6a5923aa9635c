import pytest

from hybridpipe.measure.allreduce import clearly_fastest
from hybridpipe.measure.links import HANDLED_BYTES, LARGE_BYTES, _handled_bytes
from hybridpipe.measure.probe import _equal_units


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
        (0.02, 0.01, "mpi"),
        (0.0101, 0.01, "horovod"),  # within what measurements of one backend differ by
        (0.01, 0.02, "horovod"),
    ],
)
def test_the_default_stays_unless_another_backend_is_clearly_faster(horovod, mpi, expected):
    assert clearly_fastest({"horovod": horovod, "mpi": mpi}) == expected
