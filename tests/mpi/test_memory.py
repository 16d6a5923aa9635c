"""Memory in the long run."""

import re

import pytest


@pytest.mark.parametrize(("ranks", "schedule", "plan"), [(2, "1f1b", "1-1"), (2, "pipedream", "1-1")])
def test_nothing_grows_over_a_thousand_minibatches(job, ranks, schedule, plan):
    """A leak of one message for each microbatch would be 16 MB, of one tensor a thousand tensors."""
    done = job(ranks, "growing.py", schedule, plan, "1000")
    found = re.findall(r"(-?\d+) tensors, (-?[\d.]+) MB more", done.stdout)
    assert len(found) == ranks
    assert all(int(tensors) < 50 and float(megabytes) < 8 for tensors, megabytes in found), done.stdout
