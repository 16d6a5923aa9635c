"""Data that are drawn at random, and processes that load ahead: what is trained is what one process would."""

import re

import pytest


def test_random_draws_are_the_samples_whoever_loads_them(job):
    """Inputs and target of one sample are loaded on two ranks: they used to be drawn twice."""
    plans = ["1:1f1b", "1-1:1f1b", "2-1:gpipe", "1-2:zero-bubble", "1-1x2:interleaved-1f1b"]
    plans += ["2-1:pipedream", "1-1-1:pipedream-2bw"]
    done = job(3, "loading.py", *plans)
    assert done.stdout.count(": alike") == len(plans)


@pytest.mark.parametrize(
    "fault, told",
    [("damaged", "ValueError: sample 13 is damaged"), ("killed", r"DataLoader worker .* Killed")],
)
def test_a_process_that_fails_to_load_ends_the_job(job, fault, told):
    assert re.search(told, job(2, "loading.py", fault, fails=True).stdout)
