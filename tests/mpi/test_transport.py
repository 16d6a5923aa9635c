"""Bytes move while Python computes."""

import re

import pytest

from hybridpipe.comm.mpi import MPI
from tests.mpi.single_copy import WITHOUT_SINGLE_COPY, may_read_memory_of_others

OVER_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}
WAYS = pytest.mark.parametrize("env", [WITHOUT_SINGLE_COPY, OVER_TCP], ids=["copied", "tcp"])


@pytest.mark.alone
@WAYS
@pytest.mark.parametrize("work", ["torch", "python"])
def test_a_large_message_does_not_wait_for_the_senders_computation(job, work, env):
    """An `Isend` of 16 MB came 500 to 1100 ms late over TCP: nobody called MPI while the sender computed.

    With a progress thread it still came 130 ms late where it was copied twice, in small fragments.
    """
    done = job(2, "progress.py", work, env=env)
    arrivals = [float(found) for found in re.findall(r"arrived after ([\d.]+) ms", done.stdout)]
    assert len(arrivals) == 5
    assert sorted(arrivals)[2] < 100


def test_messages_of_one_pair_keep_their_order_and_their_bits(job):
    job(2, "order.py")


@pytest.mark.parametrize("ranks", [2, 3])
@WAYS
def test_where_messages_wait_for_their_sender_there_is_a_thread(job, ranks, env):
    assert told(job(ranks, "progress_thread.py", "64", env=env)) == ["True"] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_thread_where_messages_arrive_by_themselves_and_all_cores_compute(job, ranks):
    """Three times at most: on a machine that is busy with others a receiver may come to run too late."""
    if "Open MPI" not in MPI.Get_library_version() or not may_read_memory_of_others():
        pytest.skip("no single copy between processes here")
    assert any(told(job(ranks, "progress_thread.py", "64")) == ["False"] * ranks for _ in range(3))


@pytest.mark.parametrize(
    "arguments", [["exactness.py", "4", "2-1", "1-1-1"], ["asynchronous.py", "1-1-1", "2-1"]]
)
def test_with_a_progress_thread_training_is_the_same(job, arguments):
    """Elsewhere ranks that fill this machine's cores have none."""
    done = job(3, *arguments, env=WITHOUT_SINGLE_COPY)
    assert "parameters within" in done.stdout  # the program ends with an error where they differ


def test_one_rank_sends_nothing(job):
    assert told(job(1, "progress_thread.py", "64")) == ["True"]


def told(done):
    """What each rank says."""
    found = re.search(r"needs a thread: (.*)", done.stdout)
    return found[1].split() if found else []


@pytest.mark.large
def test_a_message_of_3_gib_crosses(job):
    done = job(2, "large_message.py")
    assert f"begins with {3071 * 2**18} and {3 * 2**30 + 64 + 64} bytes were sent" in done.stdout
