"""Replicas that shard the update train what one process would, and any plan goes on with their state."""

import pytest


def test_parameters_are_those_of_one_process(job):
    plans = ["4:2:scatter", "3-1:2", "2-2:1:scatter", "1-3:1"]
    done = job(4, "exactness.py", "4", *plans, timeout_seconds=200)
    assert done.stdout.count("parameters within") == len(plans) * 4 * 2


def test_parameters_of_several_stages_on_a_rank_are_those_of_one_process(job):
    """Under interleaved-1f1b, and in a V two ways each of three schedules."""
    done = job(4, "exactness.py", "4", "2-2x2:1:scatter", timeout_seconds=200)
    assert done.stdout.count("parameters within") == (1 + 3 * 2) * 2


def test_clipping_schedules_and_accumulation(job):
    done = job(3, "updates.py", "2-1:1:scatter", "3:2", timeout_seconds=200)
    assert done.stdout.count("parameters within") == 2 * 3 * 2


def test_a_parameter_that_other_stages_hold(job):
    """Its copies are equal to the bit, whether a stage shards the update or not."""
    done = job(3, "shared_parameters.py", "2-1:1", "1-2:2:scatter", timeout_seconds=200)
    assert done.stdout.count("copies equal") == 2 * 3 * 2


def test_asynchronous_schedules_train_what_their_formulas_say(job):
    done = job(4, "asynchronous.py", "--zero", "2-2", timeout_seconds=200)
    assert done.stdout.count("parameters within") == 3 * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_optimizer_has_its_share_of_the_state(job, ranks):
    """With two replicas, whose sums have one order, parameters are the unsharded run's to the bit."""
    done = job(ranks, "sharded.py", "refused", "sparse", "options", "optimizers", timeout_seconds=200)
    assert done.stdout.count("as each replica alone") == 1 + 1 + 3 + 4
    assert done.stdout.count("refused: zero needs an optimizer that updates each element by itself") == 1
    assert done.stdout.count("refused: several stages need an optimizer that updates each parameter by") == 2


def test_muon_has_whole_matrices(job, tmp_path):
    """Each is one replica's, and any plan goes on with the state."""
    done = job(4, "exactness.py", "4", "--muon", "4:2:scatter", "2-2:1", timeout_seconds=200)
    assert done.stdout.count("parameters within") == 2 * 4
    specs = ["2:1f1b:zero1", "3-1:1f1b", "1-3:gpipe:zero2:scatter"]
    printed = job(4, "resuming.py", "pairs", str(tmp_path), "--muon", *specs, timeout_seconds=200).stdout
    assert "3 x 3 pairs, muon: equal by name" in printed


def test_a_stage_without_an_update_is_resumed_under_any_plan(job):
    done = job(2, "sharded.py", "frozen", timeout_seconds=200)
    assert "a frozen stage: resumed under each plan" in done.stdout


def test_any_plan_goes_on_with_parts(job, tmp_path):
    specs = ["2:1f1b:zero1", "3-1:1f1b", "2-2x2:interleaved-1f1b:zero1", "1-3:gpipe:zero2:scatter"]
    printed = job(4, "resuming.py", "pairs", str(tmp_path), *specs, timeout_seconds=200).stdout
    assert "4 x 4 pairs, adam: equal by name" in printed


def test_resuming_with_parts_is_exact(job, tmp_path):
    specs = ["4:1f1b:zero2", "2-1-1:1f1b:zero1:fp16", "1-3:pipedream:scatter:vertical"]
    printed = job(4, "resuming.py", "exact", str(tmp_path), *specs, timeout_seconds=200).stdout
    assert printed.count(": exact\n") == len(specs)
