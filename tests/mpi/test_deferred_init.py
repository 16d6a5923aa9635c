"""A function as a model: ranks make the numbers of their own stages only, and train what the module would."""

import re

import pytest


def test_a_function_trains_what_its_module_does(job):
    printed = job(3, "deferred_init.py", "same").stdout
    assert printed.count(": the same") == 4 and "rank 0's weights" in printed, printed


def test_checkpoints_and_files_of_weights_give_each_rank_its_part(job, tmp_path):
    printed = job(3, "deferred_init.py", "moved", str(tmp_path)).stdout
    assert printed.count(": the same") == 3, printed


def test_ranks_whose_functions_differ_make_whole_models(job):
    printed = job(2, "deferred_init.py", "differing").stdout
    assert printed.count("whole: True") == 2, printed
    assert printed.count("weight of the model must be the same on all ranks") == 2, printed


def test_a_model_on_the_meta_device_starts_alike_under_every_plan(job, tmp_path):
    printed = job(3, "deferred_init.py", "meta", str(tmp_path)).stdout
    assert printed.count(": the same") == 5, printed


def test_a_model_of_three_times_what_a_rank_may_hold_trains(job, tmp_path):
    """On the meta device, 288 MiB of weights, mostly frozen; a limit of 96 beside what a process has."""
    printed = job(4, "limited.py", "folder", "last", "72", "1024", "+96", str(tmp_path / "weights")).stdout
    grown = [int(number) for number in re.findall(r"(\d+) more", printed)]
    assert len(grown) == 4 and max(grown) < 96, printed


@pytest.mark.large
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "ranks, source, trained", [(4, "function", "last"), (4, "meta", "last"), (8, "folder", "all")]
)
def test_6_gib_of_weights_train_under_2_gib_a_rank(job, tmp_path, ranks, source, trained):
    """With gradients of all weights, four ranks would need 3 GiB each."""
    arguments = source, trained, "96", "4096", "2048", str(tmp_path / "weights")
    printed = job(ranks, "limited.py", *arguments, timeout_seconds=900.0).stdout
    peaks = [int(number) for number in re.findall(r"peak (\d+) MiB", printed)]
    assert len(peaks) == ranks and max(peaks) < 2048, printed
