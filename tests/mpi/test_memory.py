"""Memory in the long run."""

import re

import pytest

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(("ranks", "schedule", "plan"), [(2, "1f1b", "1-1"), (2, "pipedream", "1-1")])
def test_nothing_grows_over_a_thousand_minibatches(job, ranks, schedule, plan):
    """A leak of one message for each microbatch would be 16 MB, of one tensor a thousand tensors."""
    done = job(ranks, "growing.py", schedule, plan, "1000")
    found = re.findall(r"(-?\d+) tensors, (-?[\d.]+) MB more", done.stdout)
    assert len(found) == ranks
    assert all(int(tensors) < 50 and float(megabytes) < 8 for tensors, megabytes in found), done.stdout


WEIGHTS = 24 * 4 * 1024**2
ROOM = str(5 * WEIGHTS // 2)


def test_a_plan_is_taken_that_the_kernel_allows(job):
    """Weights, gradients and momentum on one rank take three times the weights, and half of that on two."""
    assert "plan 1-1 under RLIMIT_DATA, RLIMIT_DATA" in job(2, "limited_memory.py", "auto", ROOM).stdout


def test_running_out_of_memory_is_told_with_figures(job):
    told = job(2, "limited_memory.py", "whole", ROOM, fails=True).stdout
    assert re.search(r"hybridpipe: plan 1 does not fit .*: rank 0 has .* [MG]B \(RLIMIT_DATA\)", told)
    [line] = re.findall(r"hybridpipe: rank 0 on host .*; ending the job", told)
    assert "can't allocate memory: you tried" in line
    limit = r"its limit is .* [MG]B \(RLIMIT_DATA\), "
    assert re.search(rf"; out of memory: the process has had .*, {limit}", line)
    assert re.search(r" [MG]B were predicted; smaller microbatches", line)
