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
