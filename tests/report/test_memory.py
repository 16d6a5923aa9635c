"""Memory in words, by ranks whose order in the plan is another."""

from dataclasses import replace

from hybridpipe.environment.memory_limits import RankMemory
from hybridpipe.planning.plan import Plan, Prediction, StageSpec
from hybridpipe.report.memory import beyond_limit, memory_table, misfit, predicted_bytes

TWO = Plan(
    (StageSpec(0, 1, 1, (1,)), StageSpec(1, 2, 1, (0,))),
    predicted=Prediction(1.0, 1.0, 0.0, (2000, 3000)),  # of ranks 1 and 0
)
RAM = RankMemory(1000, 5000, "RAM")
SMALL = RankMemory(1000, 2500, "cgroup")


def test_the_rank_that_lacks_most_is_named():
    assert misfit(TWO, [RAM, RAM]) is None
    assert misfit(TWO, [SMALL, SMALL]) == (
        "plan 1-1 does not fit into memory by prediction: rank 0 has 1 kB and needs 3 kB more, "
        "its limit is 2.5 kB (cgroup)"
    )
    assert "rank 1 has 1 kB and needs 2 kB more" in misfit(TWO, [RAM, SMALL])


def test_ranks_without_a_limit_a_stage_or_a_prediction_lack_nothing():
    assert misfit(TWO, [RankMemory(1000), RankMemory(1000), SMALL]) is None
    assert misfit(Plan((StageSpec(0, 2),)), [SMALL]) is None
    assert [predicted_bytes(TWO, rank) for rank in range(3)] == [3000, 2000, 0]


def test_memory_is_told_by_rank_whatever_the_order_of_the_plan():
    stages = (StageSpec(0, 1, 1, (1,)), StageSpec(1, 2, 1, (0,)))
    plan = Plan(stages, predicted=Prediction(1.0, 1.0, 0.0, (2000, 3000)))
    held = [9000, 8000], [5000, 8500], [10**6, None], ["RAM", "no limit"]
    _, _, *rows = memory_table(plan, *held).splitlines()
    assert [row.split() for row in rows] == [
        ["0", "5", "kB", "3", "kB", "8", "kB", "9", "kB", "1", "MB", "(RAM)"],
        ["1", "8.5", "kB", "2", "kB", "10.5", "kB", "8", "kB", "-"],
    ]
    unknown = memory_table(replace(plan, predicted=None), *held)
    assert unknown.splitlines()[-1].split() == ["1", "8.5", "kB", "-", "-", "8", "kB", "-"]


def test_ranks_beyond_their_limit_are_named():
    had = [9000, 8000, 7000], [0, 0, 0], [9000, None, 6000], ["RAM", "no limit", "given"]
    assert list(beyond_limit(*had)) == ["rank 2 had 7 kB, more than its limit of 6 kB (given)"]
