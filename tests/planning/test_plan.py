import re
import time

import pytest

from hybridpipe.planning.plan import MAX_REPLICAS, Place, Plan, StageSpec, microbatch_sizes

from .helpers import plan


def stages(*edges_and_replicas: tuple[int, int, int]) -> tuple[StageSpec, ...]:
    return tuple(StageSpec(*stage) for stage in edges_and_replicas)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: StageSpec(3, 3), "stop must be > start = 3, got 3: a stage holds at least one layer"),
        (lambda: StageSpec(-1, 3), "start must be an integer >= 0, got -1"),
        (lambda: StageSpec(0, 3, 0), "replicas must be an integer >= 1, got 0"),
        (lambda: StageSpec(0, 3, True), "replicas must be an integer >= 1, got True"),
        (lambda: StageSpec(0, 3, 2, (4,)), "ranks must name replicas = 2 ranks, got 1: [4]"),
        (lambda: StageSpec(0, 3, 1, (-4,)), "ranks must be an integer >= 0, got -4"),
        (lambda: Plan(()), "stages must hold at least one stage, got none"),
        (lambda: Plan(stages((1, 2, 1))), "stages[0].start must be 0, where the stage before ends, got 1"),
        (lambda: Plan(stages((0, 2, 1), (3, 4, 1))), "stages[1].start must be 2, where the stage before"),
        (lambda: Plan(stages((0, 2, 1), (1, 4, 1))), "stages[1].start must be 2, where the stage before"),
        (lambda: Plan(stages((0, 2, 1)), num_layers=3), "must stop at num_layers = 3, got 2"),
        (
            lambda: Plan(stages((0, 2, 1)), "2f2b"),
            "schedule must be one of 1f1b, gpipe, pipedream, got '2f2b'",
        ),
        (
            lambda: Plan(stages((0, 2, 1)), "pipedream", 2),
            "num_microbatches must be 1 under pipedream, where a minibatch travels whole, got 2",
        ),
        (
            lambda: Plan(stages((0, 2, 1)), num_microbatches=0),
            "num_microbatches must be an integer >= 1, got 0",
        ),
        (
            lambda: Plan(stages((0, 2, 1)), format="plan/9"),
            "format must be 'hybridpipe-plan/1', got 'plan/9'",
        ),
        (
            lambda: Plan((StageSpec(0, 1, 2, (0, 3)), StageSpec(1, 2, 1, (3,)))),
            "ranks must hold one place each, got rank 3 in more than one",
        ),
        (
            lambda: Plan((StageSpec(0, 1, 1, (0,)), StageSpec(1, 2))),
            "named for every stage or for none, got some",
        ),
        (lambda: plan([2, 1], 4).check_world(2), "plan needs 2 + 1 = 3 ranks, got 2"),
        (
            lambda: Plan((StageSpec(0, 1, 2, (0, 7)),)).check_world(4),
            "plan names rank 7, the world has ranks 0 to 3",
        ),
    ],
)
def test_a_mistake_is_named_with_its_figures(make, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_ranks_are_numbered_in_stage_order():
    hybrid = plan([2, 1, 3], 4)
    assert [stage.ranks for stage in hybrid.stages] == [(0, 1), (2,), (3, 4, 5)]
    assert (hybrid.name, hybrid.num_layers, hybrid.num_stages, hybrid.num_ranks) == ("2-1-3", 3, 3, 6)


def test_named_ranks_stay():
    placed = Plan((StageSpec(0, 1, 2, (5, 0)), StageSpec(1, 2, 1, (3,))), num_microbatches=4)
    assert placed.ranks == (5, 0, 3)
    assert [placed.place(rank) for rank in (0, 3, 5, 1)] == [Place(0, 1), Place(1, 0), Place(0, 0), None]
    assert [placed.rank_of(0, microbatch) for microbatch in range(3)] == [5, 0, 5]
    placed.check_world(6)


def test_data_parallelism_is_the_plan_with_one_stage():
    assert Plan.data_parallel(7, 4, 8) == Plan((StageSpec(0, 7, 4),), "1f1b", 8)
    assert Plan.data_parallel(7, 4, 8).name == "4"


@pytest.mark.parametrize("replicas", [(1,), (3,), (15, 1), (1, 3), (3, 2), (2, 1, 4)])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_routing_is_round_robin(replicas, num_microbatches):
    """`rank_of` and `microbatches_of` agree, and each stage handles each microbatch once."""
    routed = plan(replicas, num_microbatches)
    handled = [
        (place.stage, b, rank)
        for rank in routed.ranks
        for place in [routed.place(rank)]
        for b in routed.microbatches_of(place, num_microbatches)
    ]
    assert sorted(handled) == [
        (s, b, sum(replicas[:s]) + b % m) for s, m in enumerate(replicas) for b in range(num_microbatches)
    ]


@pytest.mark.parametrize(
    "num_samples, size, expected", [(8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 4, [3]), (0, 4, [])]
)
def test_microbatch_sizes(num_samples, size, expected):
    assert microbatch_sizes(num_samples, size) == expected


def test_a_plan_of_a_million_ranks_is_checked_at_once():
    """Counting each rank among all took 0.8 s for ten thousand, hours for the number that is allowed."""
    began = time.perf_counter()
    assert Plan((StageSpec(0, 1, MAX_REPLICAS),)).num_ranks == MAX_REPLICAS
    assert time.perf_counter() - began < 20  # generous: a limit against hanging
