"""What is told where no plan fits into memory: how far the closest is, and what each remedy gives."""

import re
from dataclasses import replace

import pytest

from hybridpipe.planning.request import AUTO
from hybridpipe.planning.search.search import NoPlanFits
from tests.planning.helpers import free, layer, model, search

FOUR = model(*[layer(1, 2, parameters=100, output=10)] * 4)


def refusal(profile, cluster, num_microbatches, **asked):
    with pytest.raises(NoPlanFits) as caught:
        search(profile, cluster, num_microbatches, **asked)
    return str(caught.value)


def refused(profile, ranks, memory, num_microbatches, **asked):
    """Return the first line of a refusal."""
    cluster = replace(free(ranks), memory_bytes=memory)
    return refusal(profile, cluster, num_microbatches, **asked).splitlines()[0]


def test_no_plan_fits():
    """One layer a rank: weights and gradients 200, messages at most 60, in flight what comes in and out."""
    told = refusal(FOUR, replace(free(4), memory_bytes=299), 8)
    closest = re.match(
        r"no plan fits into memory: (\S+) comes closest and needs (\d+) B on rank (\d), ", told
    )
    assert closest and 299 < int(closest[2]) <= 320
    assert "which has 299 B; none of these would help\n" in told
    assert search(FOUR, replace(free(4), memory_bytes=int(closest[2])), 8)


def test_what_would_help_is_computed():
    weights = model(*[layer(1, 2, parameters=100)] * 4)
    assert refused(weights, 2, 250, 2).endswith("; 4 ranks would help")
    outputs = model(layer(1, 2, output=8, activation=80), samples=8)
    assert refused(outputs, 1, 50, 2).endswith("microbatches of 4 sample(s) would help")
    assert refused(outputs, 1, 30, 2).endswith("microbatches of 2 sample(s) would help")
    chain = model(*[layer(1, 2, parameters=10, output=2)] * 2)
    gpipe = refused(chain, 2, 35, 8, schedule="gpipe", recompute=True)
    assert gpipe.endswith("the schedule 1f1b would help")


def test_sharded_state_would_help():
    """Weights and gradients take 200 bytes, an all-reduce 200, and the state 600 or a half of that."""
    one = model(layer(1, 2, parameters=100), state_factor=6.0)
    assert refused(one, 2, 750, 2).endswith("zero = 1 would help")
    for zero in (1, AUTO):
        found = search(one, replace(free(2), memory_bytes=750), 2, zero=zero)
        assert [(each.plan.name, each.plan.zero_of(0)) for each in found] == [("2", 1)]


def test_chunks_that_fit_with_sharded_state_alone_are_found():
    """Two of four layers have 2000 bytes on a rank, of which 1600 are state, or 1600 with a half of it."""
    profile = model(*[layer(1, 2, parameters=100)] * 4, state_factor=8.0)
    limited = replace(free(4), memory_bytes=1700)
    with pytest.raises(NoPlanFits):
        search(profile, limited, 4, schedule="interleaved-1f1b")
    best = search(profile, limited, 4, schedule="interleaved-1f1b", zero=AUTO)[0].plan
    assert best.name == "2-2x2" and [stage.zero for stage in best.stages] == [1] * 4


def test_what_each_remedy_gives_is_told_in_aligned_lines():
    """Weights and gradients have 200; the layer is one, and its microbatch has 176 a sample."""
    outputs = model(layer(1, 2, parameters=100, output=64, activation=640), samples=4)
    told = refusal(outputs, replace(free(1), memory_bytes=400), 2)
    assert told.splitlines() == [
        "no plan fits into memory: 1 comes closest and needs 904 B on rank 0, which has 400 B; "
        "microbatches of 1 sample(s) would help",
        "  with                         plan  rank  needs  has",
        "  as it is                     1     0     904 B  400 B  2.26 times as much",
        "  recomputation                1     0     904 B  400 B  2.26 times as much",
        "  microbatches of 2 sample(s)  1     0     552 B  400 B  1.38 times as much",
        "  microbatches of 1 sample(s)  1     0     376 B  400 B  fits",
        "  2 ranks                      1     0     904 B  400 B  2.26 times as much",
    ]


def test_where_no_remedy_helps_all_of_them_are_tried_together():
    outputs = model(*[layer(1, 2, parameters=100, output=64, activation=640)] * 2, samples=4)
    told = refusal(outputs, replace(free(1), memory_bytes=460), 2)
    assert "; all of them, 2 ranks would help\n" in told
    assert [line.split("  ")[1] for line in told.splitlines()[-2:]] == ["all of them", "all of them, 2 ranks"]


def test_more_ranks_than_one_machine_has_are_told_as_machines():
    """Ranks of a machine that are added share its memory, so that they do not help."""
    weights = model(*[layer(1, 2, parameters=100)] * 4)
    told = refusal(weights, replace(free(2), memory_bytes=250, node_ranks=2), 2)
    assert "; 4 ranks on 2 such machines would help\n" in told


def test_of_a_large_problem_it_is_said_that_little_was_looked_at(monkeypatch):
    """Once the best of plans for unlimited memory was called the closest, with no remedy beside it."""
    monkeypatch.setattr("hybridpipe.planning.search.advice.MAX_ADVISED", 1)
    told = refusal(FOUR, replace(free(4), memory_bytes=299), 8, schedule="gpipe")
    assert re.search(
        r": (\S+) comes closest of the few that were tried and needs \d+ B on rank \d, which", told
    )
    unlooked = "recomputation, zero = 1, zero = 2, the schedule 1f1b, 8 ranks, 16 ranks"
    assert told.endswith(f"these may help: {unlooked}")
    again = refusal(FOUR, replace(free(4), memory_bytes=100), 8, schedule="gpipe", recompute=True)
    assert "with recomputation comes closest of" in again and "zero = 2, the schedule 1f1b, 8" in again


def test_memory_that_differs_is_told_of_the_right_rank():
    told = refusal(model(layer(1, 2, parameters=100)), replace(free(2), memory_bytes=(50, 150)), 1)
    assert "1 comes closest and needs 200 B on rank 1, which has 150 B;" in told
