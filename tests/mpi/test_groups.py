"""Groups that exchange weights now and then are, with their centre, what the papers' formulas say."""

import pytest

RULES = 7  # of programs/groups.py, each for two optimizers


@pytest.mark.parametrize("ranks, plans", [(2, ["1"]), (4, ["2", "1-1"]), (6, ["2-1"])])
def test_groups_and_centre_are_those_of_the_formulas(job, ranks, plans):
    done = job(ranks, "groups.py", *plans)
    found = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "e-" in line]
    assert len(found) == len(plans) * 2 * RULES and max(found) < 1e-12


def test_replicas_that_shard_updates_share_a_centre(job):
    done = job(4, "groups.py", "2:1", "2:2")
    assert done.stdout.count("e-16") == 2 * 2 * (RULES - 2)  # fragments would be others


@pytest.mark.parametrize("plan", ["1-1", "2"])
def test_a_training_of_groups_goes_on_bit_for_bit(job, tmp_path, plan):
    """It is interrupted in the middle of an interval, and while a sum travels."""
    done = job(4, "groups.py", plan, "--resume", str(tmp_path))
    assert done.stdout.count("resumed bit for bit") == 2 * RULES


def test_another_number_of_groups_begins_with_the_centre(job, tmp_path):
    """So does what is exported. It must be asked for, as it trains something else."""
    printed = job(4, "groups.py", "--changed", str(tmp_path)).stdout
    assert "resuming with changed settings: groups: the training has 'none'" in printed
    assert "resumed with the centre; as before" in printed


def test_what_groups_cannot_do_is_refused(job):
    lines = job(4, "groups.py", "--refused").stdout.splitlines()
    told = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert told["ranks"] == "groups.count must divide the number of ranks, 4, got 3"
    assert told["minibatch"] == "minibatch_size must be a multiple of groups.count = 2, got 13"
    assert told["schedule"] == "groups must have a synchronous schedule, got pipedream"
    assert "an IterableDataset, whose samples have no index" in told["iterable"]
    assert told["EMA"] == "EMA averages the weights of one group: leave groups out, or EMA"
    assert told["train_step"] == "samples of a minibatch must be a multiple of groups.count = 2, got 11"
