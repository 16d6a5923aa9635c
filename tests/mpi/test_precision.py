"""bf16 and fp16 under every kind of plan, beside one process with the same autocast."""

import pytest


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "precision, within, left_out", [("bf16", 13, 0), ("bf16-params", 13, 0), ("fp16", 13, 2)]
)
def test_low_precision_under_plans(job, precision, within, left_out):
    done = job(4, "precision.py", precision, timeout_seconds=280)
    assert done.stdout.count(": within") == within, done.stdout
    assert done.stdout.count("one update was left out") == left_out, done.stdout
    assert done.stdout.count("and the loss scale falls to 32768") == left_out, done.stdout
