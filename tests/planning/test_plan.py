import re
import time
from dataclasses import replace

import pytest

from hybridpipe.errors import UserError
from hybridpipe.files import read_plan, write_json
from hybridpipe.planning.checks import MAX_RANKS
from hybridpipe.planning.plan import Place, Plan, Prediction, StageSpec, Variant
from tests.planning.helpers import plan


def stages(*edges_and_replicas: tuple[int, int, int]) -> tuple[StageSpec, ...]:
    return tuple(StageSpec(*stage) for stage in edges_and_replicas)


def splitting(replicas, num_microbatches, schedule="1f1b", **options) -> Plan:
    """All stages split their experts, one layer each."""
    each = (StageSpec(s, s + 1, count, experts=True) for s, count in enumerate(replicas))
    return Plan(tuple(each), schedule, num_microbatches, **options)


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
            "schedule must be one of 1f1b, gpipe, interleaved-1f1b, zero-bubble, zb-v, v-half, v-min, "
            "pipedream, pipedream-2bw, got '2f2b'",
        ),
        (
            lambda: Plan(stages((0, 2, 1)), "pipedream", 2),
            "num_microbatches must be 1 under pipedream, where a minibatch travels whole, got 2",
        ),
        (
            lambda: plan([1], 2, prediction="xpipe"),
            "prediction must be off under 1f1b, whose gradients are never late, got 'xpipe'",
        ),
        (
            lambda: plan([2], 1, "pipedream", prediction="xpipe", zero=1),
            "zero must be 0 with prediction = 'xpipe', got 1: each replica would have its share only ",
        ),
        (
            lambda: plan([1], 1, "pipedream", prediction="xpipe", vertical_sync=True),
            "vertical_sync must be false with prediction = 'xpipe', got true",
        ),
        (
            lambda: plan([1], 2, "pipedream-2bw", vertical_sync=True),
            "vertical_sync must be false under pipedream-2bw, got true",
        ),
        (lambda: plan([1], 2, max_in_flight=0), "max_in_flight must be an integer >= 1, got 0"),
        (lambda: plan([1], 2, "gpipe", max_in_flight=3), "max_in_flight must not be given under gpipe"),
        (lambda: plan([1], 2, "zero-bubble", in_flight=0), "in_flight must be an integer >= 1, got 0"),
        (lambda: plan([1], 2, "zero-bubble", weight_lag=-1), "weight_lag must be an integer >= 0, got -1"),
        (
            lambda: plan([1], 2, weight_lag=3),
            "weight_lag must not be given under 1f1b, got 3: it goes with zero-bubble",
        ),
        (
            lambda: plan([1], 2, "zero-bubble", max_in_flight=3),
            "max_in_flight must not be given under zero-bubble",
        ),
        (lambda: Plan(stages((0, 2, 1)), chunks=0), "chunks must be an integer >= 1, got 0"),
        (lambda: plan([1, 1], 2, chunks=2), "chunks must be 1 under 1f1b, got 2"),
        (lambda: plan([1, 1], 2, placement="loop"), "placement must not be given under 1f1b, got loop"),
        (
            lambda: plan([1] * 4, 4, "interleaved-1f1b", chunks=2, placement="v"),
            "placement must be loop under interleaved-1f1b, got v",
        ),
        (lambda: plan([1, 1], 4, "zb-v", chunks=3), "chunks must be 2 under zb-v, got 3"),
        (
            lambda: plan([1, 2], 4, "v-half", chunks=2),
            "replicas must be the same in all stages under v-half, got [1, 2, 1, 2]",
        ),
        (
            lambda: Plan(tuple(StageSpec(i, i + 1, 1, (i % 2,)) for i in range(4)), "v-min", 4, chunks=2),
            "stages[2].ranks must be those of stages[1], [1], got [0]",
        ),
        (
            lambda: plan([1, 1], 4, "zb-v", chunks=2, weight_lag=3),
            "weight_lag must not be given under zb-v, got 3: it goes with zero-bubble",
        ),
        (
            lambda: plan([1, 1], 4, in_flight=3),
            "in_flight must not be given under 1f1b, got 3: it goes with zero-bubble, zb-v, v-half, v-min",
        ),
        (
            lambda: plan([1] * 4, 4, "v-half", chunks=2, in_flight=5),
            "in_flight must be at least 6 under v-half, got 5",
        ),
        (
            lambda: plan([1], 4, "zero-bubble", pass_times=((1, 1, 1, 0),)),
            "pass_times must not be given under zero-bubble: they go with zb-v, v-half, v-min",
        ),
        (
            lambda: plan([1, 1], 4, "zb-v", chunks=2, pass_times=((1, 1, 1, 0),)),
            "pass_times must be 4, one a stage, got 1",
        ),
        (
            lambda: plan([1, 1], 4, "zb-v", chunks=2, pass_times=((1, 1, 1, 0),) * 3 + ((1, 1, -1, 0),)),
            "pass_times[3].backward_weight must be an integer >= 0, got -1",
        ),
        (
            lambda: plan([1, 1], 2, "interleaved-1f1b"),
            "chunks must be at least 2 and divide the stages into at least 2 groups, got 1 with 2 stages",
        ),
        (
            lambda: plan([1], 2, "interleaved-1f1b", chunks=2),
            "chunks must be at least 2 and divide the stages into at least 2 groups, got 2 with 2 stages",
        ),
        (
            lambda: plan([1, 2], 2, "interleaved-1f1b", chunks=2),
            "replicas must be the same in all stages under interleaved-1f1b, got [1, 2, 1, 2]",
        ),
        (
            lambda: Plan(
                tuple(StageSpec(i, i + 1, 1, (rank,)) for i, rank in enumerate([0, 1, 1, 0])),
                "interleaved-1f1b",
                chunks=2,
            ),
            "stages[2].ranks must be those of stages[0], [0], got [1]",
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
        (lambda: StageSpec(0, 3, zero=3), "zero must be one of 0, 1, 2, got 3"),
        (lambda: StageSpec(0, 3, zero=True), "zero must be an integer >= 0, got True"),
        (lambda: plan([2], 2, zero=-1), "zero must be an integer >= 0, got -1"),
        (lambda: plan([2], 1, "pipedream", zero=2), "zero must be at most 1 under pipedream, got 2"),
        (
            lambda: plan([2], 2, zero=2, max_in_flight=3),
            "max_in_flight must not be given where zero is 2, got 3: replicas wait for each other",
        ),
        (
            lambda: plan([2, 2], 1, "interleaved-1f1b", chunks=2, zero=2),
            "zero must be at most 1 under interleaved-1f1b, got 2",
        ),
        (
            lambda: Plan((StageSpec(0, 1, 2, scatter=True),)),
            "stages[0].scatter must be false where zero is 0, got true",
        ),
        (
            lambda: Plan(
                tuple(StageSpec(i, i + 1, 2, zero=int(i == 2)) for i in range(4)),
                "interleaved-1f1b",
                chunks=2,
            ),
            "stages[2].zero must be that of stages[0], which the same ranks hold, 0, got 1",
        ),
        (
            lambda: splitting([1, 2], 1, "pipedream"),
            "stages[1].experts must be false under pipedream, got true: it goes with 1f1b, gpipe, ",
        ),
        (lambda: splitting([2], 4, "pipedream-2bw"), "stages[0].experts must be false under pipedream-2bw"),
        (
            lambda: splitting([2] * 4, 4, "interleaved-1f1b", chunks=2),
            "stages[0].experts must be false under interleaved-1f1b, got true",
        ),
        (lambda: splitting([2] * 4, 4, "zb-v", chunks=2), "stages[0].experts must be false under zb-v"),
        (lambda: splitting([2] * 4, 4, "v-half", chunks=2), "stages[0].experts must be false under v-half"),
        (lambda: splitting([2] * 4, 4, "v-min", chunks=2), "stages[0].experts must be false under v-min"),
        (
            lambda: splitting([1, 2], 4, zero=2),
            "stages[1].experts must be false where zero is 2, got true: set zero = 1",
        ),
        (
            lambda: Plan((StageSpec(0, 1, 2, zero=2, experts=True),)),
            "stages[0].experts must be false where zero is 2, got true: set zero = 1",
        ),
        (
            lambda: splitting([1, 2], 4, max_in_flight=3),
            "max_in_flight must not be given where stages split experts, got 3: replicas wait for each other",
        ),
        (lambda: plan([2, 1], 4).check_world(2), "plan needs 2 + 1 = 3 ranks, got 2"),
        (
            lambda: Plan((StageSpec(0, 1, 2, tensor=2), StageSpec(1, 2))).check_world(4),
            "plan needs 4 + 1 = 5 ranks, got 4",
        ),
        (
            lambda: StageSpec(0, 1, 2, (0, 1), tensor=2),
            "ranks must name replicas = 2 times tensor = 2 ranks, got 2: [0, 1]",
        ),
        (lambda: StageSpec(0, 1, tensor=2**40), "tensor must be an integer <= "),
        (
            lambda: Plan((StageSpec(0, 1), StageSpec(1, 2, tensor=2)), "pipedream"),
            "stages[1].tensor must be 1 under pipedream, got 2: take a synchronous schedule",
        ),
        (
            lambda: Plan((StageSpec(0, 1, 2, experts=True, tensor=2),)),
            "stages[0].experts must be false where tensor is 2, got true",
        ),
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


def test_with_chunks_each_rank_holds_several_stages():
    interleaved = plan([2, 2, 2], 4, "interleaved-1f1b", chunks=2)
    assert [stage.ranks for stage in interleaved.stages] == [(0, 1), (2, 3), (4, 5)] * 2
    assert (interleaved.name, interleaved.num_stages, interleaved.num_ranks) == ("2-2-2x2", 6, 6)
    assert interleaved.ranks == tuple(range(6)) and interleaved.num_groups == 3
    assert interleaved.place(3) == Place(1, 1)
    assert list(interleaved.held_stages(Place(1, 1))) == [1, 4]
    assert interleaved.rank_of(4, 3) == 3
    interleaved.check_world(6)


def test_in_a_v_the_last_group_holds_neighbours_and_the_first_both_ends():
    folded = plan([2, 2, 2], 4, "zb-v", chunks=2)
    assert [stage.ranks for stage in folded.stages] == [(0, 1), (2, 3), (4, 5), (4, 5), (2, 3), (0, 1)]
    assert folded.placement == "v" and folded.groups == (0, 1, 2, 2, 1, 0)
    assert [folded.held_stages(Place(group, 0)) for group in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert folded.place(3) == Place(1, 1) and folded.ranks == tuple(range(6))
    assert [folded.hands_over(s) for s in range(6)] == [False, False, True, False, False, False]
    assert [folded.sends(s) for s in range(-1, 6)] == [False, True, True, False, True, True, False]


def test_recomputation_is_of_the_plan_or_of_a_stage():
    some = Plan((StageSpec(0, 1), StageSpec(1, 2, recompute=True)))
    assert [some.recomputes(s) for s in (0, 1)] == [False, True]
    assert all(plan([1, 1], 1, recompute=True).recomputes(s) for s in (0, 1))


def test_the_update_is_sharded_by_the_plan_or_by_a_stage_with_replicas():
    some = Plan((StageSpec(0, 1, 2, zero=2, scatter=True), StageSpec(1, 2, 1, zero=2), StageSpec(2, 3, 2)))
    assert [some.zero_of(s) for s in (0, 1, 2)] == [2, 0, 0]
    assert [some.scatters(s) for s in (0, 1, 2)] == [True, False, False]
    assert [replace(some, zero=1).zero_of(s) for s in (0, 1, 2)] == [2, 0, 1]
    whole = Plan((StageSpec(0, 1, 2, scatter=True),), zero=1)
    assert whole.scatters(0) and whole.running([Variant()]).zero_of(0) == 0


def test_experts_are_split_over_replicas_and_one_has_them_whole():
    some = Plan((StageSpec(0, 1, 1, experts=True), StageSpec(1, 2, 2, experts=True), StageSpec(2, 3, 2)))
    assert [some.splits_experts(s) for s in (0, 1, 2)] == [False, True, False]
    zero = splitting([1, 2], 4, zero=1)
    assert zero.zero_of(1) == 1 and zero.splits_experts(1)


@pytest.mark.parametrize(
    "schedule, options",
    [("pipedream", {}), ("interleaved-1f1b", {"chunks": 2}), ("1f1b", {"max_in_flight": 1})],
)
def test_one_replica_may_say_that_it_splits_experts_under_any_schedule(schedule, options):
    made = splitting([1] * 4, 1, schedule, **options)
    assert not any(map(made.splits_experts, range(4)))
    assert not splitting([1, 1], 1, zero=2).splits_experts(1)


def test_the_way_to_run_a_stage_says_if_it_splits_experts():
    split = Variant(recompute=True, zero=1, experts=True)
    made = splitting([2, 2], 4).running([split, Variant()])
    assert [stage.experts for stage in made.stages] == [True, False]
    assert made.recomputes(0) and made.zero_of(0) == 1 and made.splits_experts(0)
    assert [*map(Variant.of, made.stages)] == [split, Variant()]


def test_split_experts_are_in_a_plans_file(tmp_path):
    path, some = tmp_path / "plan.json", Plan((StageSpec(0, 1, 2, experts=True), StageSpec(1, 2, 2)))
    write_json(path, some)
    assert read_plan(path) == some != replace(some, stages=stages((0, 1, 2), (1, 2, 2)))
    text = path.read_text()
    assert [text.count(f'"experts": {value}') for value in ("true", "false")] == [1, 1]
    path.write_text(text.replace('"experts": true', '"experts": 1'))
    with pytest.raises(UserError, match=r"plan.json: stages\[0\].experts: must be"):
        read_plan(path)


def test_shards_of_a_replica_are_ranks_of_their_own():
    some = Plan((StageSpec(0, 1, 2, tensor=2), StageSpec(1, 2), StageSpec(2, 3, tensor=3)))
    assert some.name == "2t2-1-1t3" and some.num_ranks == 8 and some.ranks == tuple(range(8))
    assert [stage.leaders for stage in some.stages] == [(0, 2), (4,), (5,)]
    places = [Place(0, 0, 0), Place(0, 0, 1), Place(0, 1, 0), Place(0, 1, 1)]
    assert [some.place(rank) for rank in range(4)] == places
    assert some.place(4) == Place(1, 0, 0) and some.place(7) == Place(2, 0, 2) and some.place(8) is None
    assert all(some.rank_at(some.place(rank)) == rank for rank in some.ranks)
    assert [some.rank_of(0, m, 1) for m in range(3)] == [1, 3, 1]
    assert [some.splits(s) for s in range(3)] == [True, False, True]
    first = some.stages[0]
    assert [first.holders_along(axis) for axis in (None, "replica", "shard")] == [(0,), (0, 2), (0, 1)]


def test_the_plan_of_leaders_has_no_shards():
    some = Plan((StageSpec(0, 1, 2, tensor=2), StageSpec(1, 2)))
    assert some.of_leaders() == Plan((StageSpec(0, 1, 2, (0, 2)), StageSpec(1, 2, 1, (4,))))
    assert (whole := Plan((StageSpec(0, 1, 2),))).of_leaders() is whole


@pytest.mark.parametrize(
    "place, but_for, is_first",
    [
        (Place(1, 0, 0), (), True),
        (Place(0, 1, 0), (), False),
        (Place(0, 1, 0), ("replica",), True),
        (Place(0, 0, 1), ("replica",), False),
        (Place(0, 1, 1), ("replica", "shard"), True),
    ],
)
def test_the_first_of_those_that_hold_the_same(place, but_for, is_first):
    assert place.is_first(but_for) == is_first


def test_shards_are_in_a_plans_file(tmp_path):
    path, some = tmp_path / "plan.json", Plan((StageSpec(0, 1, tensor=2), StageSpec(1, 2)))
    write_json(path, some)
    assert read_plan(path) == some
    path.write_text(path.read_text().replace('"tensor": 2', '"tensor": 0'))
    with pytest.raises(UserError, match=r"plan.json: stages\[0\].tensor: must be an integer >= 1"):
        read_plan(path)


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


def test_a_plan_of_a_million_ranks_is_checked_at_once():
    """Counting each rank among all took 0.8 s for ten thousand, hours for the number that is allowed."""
    began = time.perf_counter()
    assert Plan((StageSpec(0, 1, MAX_RANKS),)).num_ranks == MAX_RANKS
    assert time.perf_counter() - began < 20  # generous: a limit against hanging


def test_products_wait_where_a_stage_before_waits_and_no_all_reduce_does():
    made = plan([1, 1, 2, 1], 4)
    assert [made.defers_wgrad(s) for s in range(4)] == [False, True, False, True]


def test_a_world_as_large_as_the_plan_is_enough():
    plan([2, 1], 4).check_world(3)
    with pytest.raises(ValueError, match=r"plan needs 2 \+ 1 = 3 ranks, got 2"):
        plan([2, 1], 4).check_world(2)
    named = Plan((StageSpec(0, 1, 1, (0,)), StageSpec(1, 2, 1, (3,))))
    named.check_world(4)
    with pytest.raises(ValueError, match="plan names rank 3, the world has ranks 0 to 2"):
        named.check_world(3)


def test_samples_of_a_microbatch_are_known_from_the_prediction():
    made = plan([1, 1], 4)
    assert made.microbatch_samples is None
    assert replace(made, predicted=Prediction(0.5, 64.0, 0.0, (1, 1))).microbatch_samples == 8
    assert replace(made, predicted=Prediction(0.0, 0.0, 0.0, (1, 1))).microbatch_samples is None
    assert replace(made, predicted=Prediction(0.5, 1.0, 0.0, (1, 1))).microbatch_samples is None
