"""A parameter that several stages hold is one parameter: tied embeddings, a block in several places."""

import pytest


@pytest.mark.parametrize(
    "ranks, plans",
    [(3, ["1-1", "2-1", "1-2", "1-1-1", "1-1x2"]), (5, ["2-3", "1-3-1", "2-2x2", "1-1-1x2"])],
)
def test_shared_parameters_train_as_in_one_process_and_stay_equal(job, ranks, plans):
    done = job(ranks, "shared_parameters.py", *plans)
    chunked = sum("x" in plan for plan in plans)
    expected = 2 * (3 * (len(plans) - chunked) + 4 * chunked)  # settings, schedules
    assert done.stdout.count("copies equal") == expected, done.stdout


def test_auto_plans_a_model_with_shared_parameters(job):
    assert job(2, "shared_parameters.py", "auto").stdout.count("copies equal") == 2
