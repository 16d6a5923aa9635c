"""Groups that exchange weights now and then are, with their centre, what the papers' formulas say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pytest import approx

PROGRAM = Path(__file__).parent / "programs/lost_group.py"
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
    """So does what is exported. It must be asked for, as it trains something else.

    It was refused where an epoch ends, since what had counted were one group's samples.
    """
    printed = job(4, "groups.py", "--changed", str(tmp_path)).stdout
    assert "resuming with changed settings: groups.count: the training has '1', the checkpoint '2'" in printed
    assert all(f"resumed with the centre after {steps}; as before" in printed for steps in (5, 7))


def test_predicted_memory_has_the_centre_its_momentum_and_what_travels(job):
    """Plans that leave no room for them are refused."""
    printed = job(4, "groups.py", "--predicted").stdout
    assert "{'none': 0.0, 'average': 2.0, 'diloco': 3.0}" in printed


def test_what_groups_cannot_do_is_refused(job):
    lines = job(4, "groups.py", "--refused").stdout.splitlines()
    told = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert told["ranks"] == "groups.count must divide the number of ranks, 4, got 3"
    assert told["minibatch"] == "minibatch_size must be a multiple of groups.count = 2, got 13"
    assert told["schedule"] == "groups must have a synchronous schedule, got pipedream"
    assert "an IterableDataset, whose samples have no index" in told["iterable"]
    assert told["EMA"] == "EMA averages the weights of one group: leave groups out, or EMA"
    assert told["train_step"] == "samples of a minibatch must be a multiple of groups.count = 2, got 11"


def test_a_group_that_is_killed_comes_back_and_the_centre_is_the_formulas(tmp_path):
    """The mean is over the groups that are there; the one that returns takes the others' weights."""
    command = [sys.executable, "-m", "hybridpipe", "launch", "--ranks", "4", "--groups", "2"]
    options = ["--min-groups", "1", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, *options, "--", sys.executable, str(PROGRAM), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "hybridpipe: group 1: attempt 0: " in done.stdout
    assert "group 1 is lost; 1 go on" in done.stdout and "group 1 is back" in done.stdout
    for rank in range(2):

        def lines(name: str, rank: int = rank) -> list[dict]:
            return [json.loads(line) for line in (tmp_path / f"{name}-{rank}.jsonl").read_text().splitlines()]

        begun, *first = lines("0-0")
        other, back = lines("1-0")[1:], lines("1-1")
        rejoined, *later = back
        assert begun["kind"] == rejoined["kind"] == "take"
        counts = [each["count"] for each in first]
        alone = counts.index(1)
        returned = counts.index(2, alone)
        assert counts[:alone] == [2] * len(other) and set(counts[returned:]) == {2}
        assert rejoined["after"] == rejoined["centre"] == first[returned - 1]["centre"]
        with_other = [*other, *[None] * (returned - alone), *later]
        for mine, theirs in zip(first, with_other, strict=False):
            both = [mine["before"]] if theirs is None else [mine["before"], theirs["before"]]
            mean = [sum(values) / len(both) for values in zip(*both, strict=True)]
            assert mine["after"] == mine["centre"] == approx(mean, abs=1e-14)
            assert theirs is None or theirs["centre"] == mine["centre"]
