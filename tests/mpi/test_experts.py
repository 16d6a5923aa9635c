"""Experts that a stage's replicas share train what one process would, and any plan goes on with them."""

import pytest

from tests.libraries import skip_without_transformers

OPTIMIZERS, SCHEDULES = 2, 4


def test_parameters_losses_and_evaluation_are_those_of_one_process(job):
    """The last minibatch has three microbatches: a replica joins, and others have tokens of one expert."""
    plans = ["4", "2-2", "1-2"]
    done = job(4, "splitting.py", "sequential", "8", *plans, timeout_seconds=200)
    assert done.stdout.count("parameters within") == len(plans) * SCHEDULES * OPTIMIZERS


def test_a_recorded_model_is_split_as_well(job):
    done = job(4, "splitting.py", "--schedules", "zero-bubble,recompute", "recorded", "4", "2-2")
    assert done.stdout.count("parameters within") == 2


def test_replicas_that_share_the_update_of_the_rest(job):
    done = job(2, "splitting.py", "--schedules", "1f1b,zero-bubble", "sequential", "8", "2z1")
    assert done.stdout.count("parameters within") == 2


def test_replicas_whose_ranks_are_in_another_order(job):
    done = job(4, "splitting.py", "--schedules", "1f1b", "sequential", "8", "2-2r")
    assert done.stdout.count("parameters within") == 1


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_models_of_transformers_say_themselves_what_their_experts_are(job, model):
    skip_without_transformers()
    done = job(3, "splitting.py", "--schedules", "1f1b", model, "4", "1-2", timeout_seconds=300)
    assert done.stdout.count("parameters within") == 1


def test_any_plan_goes_on_with_parts_of_experts(job, tmp_path):
    """Weights equal to the bit under other numbers of replicas, with and without experts; averages follow."""
    plans = ["2", "4", "2w", "1-2", "2z1-2", "4z1"]
    done = job(4, "splitting.py", "--resume", str(tmp_path), "sequential", *plans, timeout_seconds=200)
    assert done.stdout.count("resumed and saved") == len(plans)
    assert "averages within" in done.stdout


def test_a_rank_makes_only_its_part_of_the_experts(job):
    done = job(3, "splitting.py", "--lazily", "recorded", "1-2", "2-1")
    assert done.stdout.count("equal to the bit") == 2 * 2


def test_in_16_bits_losses_are_those_with_whole_experts(job):
    done = job(2, "splitting.py", "--precision", "recorded", "2")
    assert done.stdout.count("as without a split") == 4
