"""bf16 and fp16 over MPI and Horovod, beside one process with the same autocast."""

import pytest


@pytest.mark.timeout(300)
def test_low_precision_under_plans(job):
    done = job(4, "precision.py", timeout_seconds=280)
    assert done.stdout.count(": within") == 3 * 7, done.stdout
    assert done.stdout.count("overflow 1-2-1 1f1b: one update was left out") == 1, done.stdout
    assert done.stdout.count("overflow 1-2-1 pipedream: each stage left its update out") == 1, done.stdout
    assert done.stdout.count("and the loss scale falls to 32768") == 1 + 3, done.stdout
