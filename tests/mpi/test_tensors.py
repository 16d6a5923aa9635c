"""Weights that the shards of a replica have in parts train what one process would, and any plan goes on."""

import re

import pytest

from tests.libraries import skip_without_transformers

OPTIMIZERS, SCHEDULES = 2, 4
WEIGHTS = 16 * 4 * 2 * 64 * 2**15  # bytes of the model of programs/shards.py


def test_parameters_losses_and_evaluation_are_those_of_one_process(job):
    done = job(2, "splitting.py", "recorded_blocks", "4", "1t2", timeout_seconds=200)
    assert done.stdout.count("parameters within") == SCHEDULES * OPTIMIZERS


def test_beside_replicas_and_in_stages_with_as_many_shards_and_others(job):
    plans = ["2t2z1", "1t2-1t2r", "1t2-2"]
    done = job(4, "splitting.py", "--schedules", "zero-bubble", "recorded_blocks", "4", *plans)
    assert done.stdout.count("parameters within") == len(plans)


def test_layers_of_their_own(job):
    done = job(4, "splitting.py", "--schedules", "1f1b", "blocks", "4", "1t2-1t2", "1t2")
    assert done.stdout.count("parameters within") == 2


@pytest.mark.parametrize("model, plan", [("llama", "1t4"), ("tied_llama", "1t2-1t2"), ("qwen3", "2t2")])
def test_models_of_transformers_say_themselves_what_is_split(job, model, plan):
    skip_without_transformers()
    done = job(4, "splitting.py", "--schedules", "1f1b", model, "4", plan, timeout_seconds=300)
    assert done.stdout.count("parameters within") == 1


def test_any_plan_goes_on_with_parts_of_weights(job, tmp_path):
    """Weights equal to the bit under other numbers of shards and replicas; averages follow."""
    plans = ["1t2", "1t4", "2t2z1", "1-1t2", "2", "1t2-1t2"]
    done = job(4, "splitting.py", "--resume", str(tmp_path), "recorded_blocks", *plans, timeout_seconds=200)
    assert done.stdout.count("resumed and saved") == len(plans)
    assert "averages within" in done.stdout


def test_a_tied_weight_in_two_stages_is_joined(job, tmp_path):
    skip_without_transformers()
    plans = ["1t2-1t2", "1t2"]
    done = job(4, "splitting.py", "--resume", str(tmp_path), "tied_llama", *plans, timeout_seconds=200)
    assert done.stdout.count("resumed and saved") == len(plans)


def test_a_rank_makes_only_its_part_of_the_weights(job):
    done = job(3, "splitting.py", "--lazily", "recorded_blocks", "1-1t2", "1t2-1")
    assert done.stdout.count("equal to the bit") == 2 * 2


def test_in_16_bits_weights_move_as_without_a_split(job):
    done = job(2, "splitting.py", "--precision", "recorded_blocks", "1t2")
    assert done.stdout.count("as without a split") == 4


def test_a_model_that_fits_no_rank_trains_in_shards_as_predicted(job):
    """Weights, gradients and Adam's state of the whole model take four times its weights."""
    given = job(2, "shards.py", timeout_seconds=200)
    ranks = [tuple(map(int, each)) for each in re.findall(r"before (\d+) more (\d+)", given.stdout)]
    limit = max(before for before, _ in ranks) + int(3.5 * WEIGHTS)
    limited = job(2, "shards.py", str(limit), timeout_seconds=200)
    predicted = list(map(int, re.search(r"predicted (\d+) (\d+)", limited.stdout).groups()))
    assert all(more <= 1.15 * most for (_, more), most in zip(ranks, predicted, strict=True)), (
        ranks,
        predicted,
    )
