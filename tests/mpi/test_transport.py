"""Bytes move while Python computes, and a rank that waits for them leaves the processor alone."""

import re

import pytest

TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}


@pytest.mark.parametrize("work", ["torch", "python"])
def test_a_large_message_does_not_wait_for_the_senders_computation(job, work):
    """Over TCP an `Isend` of 16 MB came 500 to 1100 ms late: nobody called MPI while the sender computed."""
    done = job(2, "progress.py", work, env=TCP)
    arrivals = [float(found) for found in re.findall(r"arrived after ([\d.]+) ms", done.stdout)]
    assert len(arrivals) == 5
    assert sorted(arrivals)[2] < 100


def test_messages_of_one_pair_keep_their_order_and_their_bits(job):
    job(2, "order.py")


def test_ranks_of_a_host_ring_each_other(job):
    assert re.search(r"^[03] ring$", job(3, "doorbell.py").stdout, re.M)  # none without single copy


def test_no_one_rings_where_a_large_message_needs_its_sender(job):
    """Who sleeps until a ring, and computes then, would leave the rest of the message where it is."""
    assert "0 ring\n" in job(3, "doorbell.py", env=TCP).stdout


def test_a_rank_that_waits_for_a_ring_hardly_looks(job):
    """Four ranks on two cores spent a tenth of them in looking for messages that were not there yet."""
    found = re.findall(r"(\d+) looks, rung: (\w+)", job(2, "rung.py").stdout)
    assert len(found) == 2
    if found[0][1] == "False":
        pytest.skip("no single copy between the ranks of this host")
    assert all(int(looks) < 600 for looks, _ in found)  # some 130, and 1800 without a ring


def test_without_rings_messages_come_all_the_same(job):
    assert "rung: False" in job(2, "rung.py", env=TCP).stdout
