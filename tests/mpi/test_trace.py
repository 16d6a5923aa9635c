"""Where each rank's time goes, from what it recorded of itself."""

import json

import pytest

pytestmark = pytest.mark.alone


def test_the_parts_of_every_rank_add_up_to_its_time(job):
    """Two clocks: the trainer's, around updates, and the executor's, around instructions."""
    lines = job(3, "sleeping.py", "traced").stdout.splitlines()
    runs = {run["plan"]: run for run in map(json.loads, lines)}
    assert {name: len(run["parts"]) for name, run in runs.items()} == {
        "pipeline": 2,
        "replicated": 3,
        "asynchronous": 3,
    }
    for run in runs.values():
        for rank, parts in run["parts"].items():
            seconds = parts.pop("seconds")
            assert sum(parts.values()) == pytest.approx(seconds, rel=0.02)
            assert parts["other_seconds"] < 0.5 * seconds  # it is what nothing else accounts for
            assert run["means"][rank] == pytest.approx(run["spans"][rank], rel=0.02)
            assert min(parts["forward_seconds"], parts["backward_seconds"], parts["optimizer_seconds"]) > 0
    # 2 layers, each 5 ms forward and 10 ms backward, for 4 microbatches; a sleep is never too short
    parts = runs["pipeline"]["parts"]["0"]
    assert parts["forward_seconds"] >= 0.04
    assert parts["backward_seconds"] >= 0.08
    assert parts["loading_seconds"] > 0 and parts["copying_seconds"] > 0
    assert parts["idle_seconds"] > 0  # it waits while the last microbatch is at the other stage
    assert parts["allreduce_seconds"] < 0.01  # nothing is reduced
    assert runs["replicated"]["parts"]["0"]["allreduce_seconds"] > 0
