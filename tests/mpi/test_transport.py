"""Bytes move while Python computes."""

import re

import pytest


@pytest.mark.parametrize("work", ["torch", "python"])
def test_a_large_message_does_not_wait_for_the_senders_computation(job, work):
    """Over TCP an `Isend` of 16 MB came 500 to 1100 ms late: nobody called MPI while the sender computed."""
    done = job(2, "progress.py", work, env={"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"})
    arrivals = [float(found) for found in re.findall(r"arrived after ([\d.]+) ms", done.stdout)]
    assert len(arrivals) == 5
    assert sorted(arrivals)[2] < 100


def test_messages_of_one_pair_keep_their_order_and_their_bits(job):
    job(2, "order.py")


WITHOUT_SINGLE_COPY = {  # as in a container that may not read another process's memory
    "OMPI_MCA_smsc": "^cma,xpmem,knem",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_btl_sm_single_copy_mechanism": "none",
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "env", [WITHOUT_SINGLE_COPY, {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}], ids=["copied", "tcp"]
)
def test_where_messages_wait_for_their_sender_there_is_a_thread(job, ranks, env):
    assert told(job(ranks, "single_copy.py", "64", env=env)) == ["False"] * ranks


def test_no_thread_where_messages_arrive_by_themselves_and_all_cores_compute(job):
    """Whether they do hangs on the machine; all ranks say the same."""
    assert told(job(3, "single_copy.py", "64")) in (["True"] * 3, ["False"] * 3)


@pytest.mark.parametrize(
    "program, arguments, compared",
    [("exactness.py", ["4", "2-1", "1-1-1"], 16), ("asynchronous.py", ["1-1-1", "2-1"], 12)],
)
def test_with_a_communication_thread_training_is_the_same(job, program, arguments, compared):
    """Elsewhere ranks that fill this machine's cores have none."""
    done = job(3, program, *arguments, env=WITHOUT_SINGLE_COPY)
    assert done.stdout.count("parameters within") == compared


def test_one_rank_sends_nothing(job):
    assert told(job(1, "single_copy.py", "64")) == ["False"]


def told(done):
    """What each rank says."""
    found = re.search(r"needs no thread: (.*)", done.stdout)
    return found[1].split() if found else []
