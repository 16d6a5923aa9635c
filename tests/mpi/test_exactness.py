"""Any plan trains what one process would: the claim that everything else rests on."""

import pytest


@pytest.mark.parametrize(
    "ranks, updates, plans",
    [
        (4, 20, ["4", "2-2", "3-1", "1-3", "1-2-1", "1-1-1-1"]),
        (3, 20, ["2-1", "1-2"]),
        (8, 20, ["3-4-1"]),
        (4, 4, ["2-1", "1"]),  # ranks that the plan leaves unused
    ],
)
def test_parameters_and_losses_are_those_of_one_process(job, ranks, updates, plans):
    done = job(ranks, "exactness.py", str(updates), *plans)
    assert done.stdout.count("parameters within") == len(plans) * 2 * 2  # schedules, optimizers
