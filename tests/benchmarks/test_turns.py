"""Which plans are trained by turns, and what their times say."""

from turns import rows, trained, verdict

from hybridpipe.planning.plan import Plan, Prediction, StageSpec
from hybridpipe.planning.search.search import Candidate


def candidate(origin, seconds, *replicas, cut=1, count=2):
    edges = [0, *range(cut, cut + len(replicas) - 1), 9]
    stages = tuple(StageSpec(a, b, n) for a, b, n in zip(edges, edges[1:], replicas, strict=False))
    plan = Plan(stages, num_microbatches=count, predicted=Prediction(seconds, 1.0, 0.0, (0,)))
    return Candidate(origin, plan, 8)


def test_the_choice_is_first_and_each_shape_is_there_once():
    candidates = [
        candidate("exact", 1.0, 1, 1, cut=4),
        candidate("exact", 1.01, 1, 1, cut=5),
        candidate("exact", 1.1, 1, 1, cut=4, count=4),
        candidate("exact", 1.2, 2, 1),
        candidate("exact", 1.3, 1, 2),
        candidate("exact", 1.4, 1, 2, 1),
        candidate("exact", 1.5, 2, 2),
        candidate("straight", 1.6, 1, 1, 1),
        candidate("dp", 1.9, 3),
        candidate("exact", 2.1, 1),
    ]
    kept = [candidates[i] for i in (0, 2, 3, 4, 5, 8, 7)]  # the next best four, then dp and straight
    assert trained(candidates) == kept


def test_the_straight_pipeline_may_have_been_found_by_another_way():
    """Not the one called straight then, but the best of its shape is trained, although it is the sixth."""
    others = [candidate("exact", 1.0 + i / 10, 1, 1, count=2 + i) for i in range(5)]
    exact, straight = candidate("exact", 1.6, 1, 1, 1, cut=2), candidate("straight", 1.7, 1, 1, 1)
    assert trained([*others, exact, straight]) == [*others, exact]
    assert trained([*others, exact]) == others


def test_data_parallelism_that_is_twice_as_slow_is_left_out():
    best, dp = candidate("exact", 1.0, 1, 1), candidate("dp", 2.5, 4)
    assert trained([best, dp]) == [best]


def test_ratios_are_taken_within_a_turn():
    """The machine was twice as slow in the second turn."""
    common = {"model": "mlp", "network": "loopback", "told": "auto", "predicted": 0.1}
    found = [
        [
            {**common, "plan": "1-1, 1f1b, 2", "seconds": [0.10, 0.20, 0.11]},
            {**common, "plan": "2, 1f1b, 2", "seconds": [0.08, 0.16, 0.11]},
        ]
    ]
    chosen, other = rows(found)
    assert chosen["× auto"] == "1.00" and chosen["plan"] == "1-1, 1f1b, 2 (auto)"
    assert (other["× auto"], other["by turn"]) == ("1.25", "1.25, 1.25, 1.00")
    assert verdict(found[0]) == "mlp, loopback, auto: auto is 0.80 times as fast as the best, 2, 1f1b, 2"
