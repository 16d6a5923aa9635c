"""Models and data sets of dicts on several ranks, and data sets that are iterated."""

import pytest


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream"])
def test_replicas_of_a_model_of_dicts_train_as_one_process(job, schedule):
    assert "all as it should be" in job(2, "trees.py", "dicts", schedule).stdout


@pytest.mark.parametrize("plan", ["2", "1-1-1"])
def test_an_iterable_data_set_resumes_exactly_and_only_the_ends_read_it(job, tmp_path, plan):
    ranks = sum(map(int, plan.split("-")))
    assert "all as it should be" in job(ranks, "trees.py", "iterated", str(tmp_path), plan).stdout


def test_ranks_whose_data_sets_end_at_different_samples_are_told(job):
    assert "all as it should be" in job(2, "trees.py", "uneven").stdout
