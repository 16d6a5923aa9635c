"""Parameters that several layers use: counted once in a rank, exchanged between ranks."""

from dataclasses import replace
from itertools import chain

import pytest

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import exchange_seconds, stage_costs
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Place, Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile, SharedParameter
from hybridpipe.planning.schedules.instructions import AllReduce
from hybridpipe.planning.search.search import fits, straight
from hybridpipe.planning.shared_parameters import counted_bytes, exchanged_bytes, may_run, peers_of
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import layer, model, plan, search

BYTES = 6000
NET = Cluster.flat(8, bandwidth=1000.0, latency_seconds=0.5)


def make_plan(name: str, *edges: int, schedule: str = "1f1b", count: int = 4, chunks: int = 1) -> Plan:
    replicas = [int(m) for m in name.split("-")] * chunks
    stages = zip([0, *edges], edges, replicas, strict=False)
    return Plan(tuple(StageSpec(*each) for each in stages), schedule, count, chunks=chunks)


def tied(num_layers: int = 4, *uses: int, num_bytes: int = BYTES, **options) -> ModelProfile:
    """Equal layers; the first and the last, or those in `uses`, share nearly all of their parameters."""
    each = layer(forward=1.0, backward=2.0, parameters=8000, output=0, activation=50, update=0.8)
    shared = SharedParameter("0.weight", uses or (0, num_layers - 1), num_bytes)
    return replace(model(*[each] * num_layers, **options), shared=(shared,))


def untied(profile: ModelProfile) -> ModelProfile:
    return replace(profile, shared=())


def test_each_replica_receives_once_and_none_is_left_out():
    for name in ("1-3", "3-1", "2-3", "3-2", "2-4"):
        plan = make_plan(name, 3, 6)
        for group, other in ((0, 1), (1, 0)):
            peers = [peers_of(plan, Place(group, r), other) for r in range(plan.replicas[group])]
            assert sorted(chain.from_iterable(each.targets for each in peers)) == list(
                plan.stages[other].ranks
            )
            for rank, each in zip(plan.stages[group].ranks, peers, strict=True):
                back = peers_of(plan, Place(other, plan.stages[other].ranks.index(each.source)), group)
                assert rank in back.targets


def test_a_stage_with_both_uses_counts_the_parameter_once():
    profile = tied()
    (one,) = stage_costs(profile, make_plan("2", 4))
    assert sum(bucket.num_bytes for bucket in one.buckets) == 4 * 8000 - BYTES
    assert one.update_seconds == pytest.approx(4 * 0.8 - 0.8 * BYTES / 8000) and not one.exchanged
    assert one.backward_seconds == 8.0
    more = peak_memory_bytes(untied(profile), make_plan("1", 4))[0] - BYTES * 2  # weights and gradients
    assert peak_memory_bytes(profile, make_plan("1", 4)) == (more,)


def test_stages_on_one_rank_count_it_once_and_exchange_nothing():
    profile = tied(4, 0, 2)
    together = make_plan("1-1", 1, 2, 3, 4, schedule="interleaved-1f1b", chunks=2)
    assert [counted_bytes(profile, together, s) for s in range(4)] == [[8000], [8000], [2000], [8000]]
    assert exchanged_bytes(profile, together) == [{}, {}]
    apart = tied(4, 0, 3)
    assert [counted_bytes(apart, together, s) for s in range(4)] == [[8000]] * 4
    assert exchanged_bytes(apart, together) == [{1: BYTES}, {0: BYTES}]
    assert [bool(cost.exchanged) for cost in stage_costs(apart, together)] == [True, True, False, False]


def test_in_a_v_the_first_and_the_last_stage_exchange_nothing():
    both_ends, inside = tied(4, 0, 3), tied(4, 1, 3)
    folded = make_plan("1-1", 1, 2, 3, 4, schedule="zb-v", chunks=2)
    assert exchanged_bytes(both_ends, folded) == [{}, {}]
    assert [counted_bytes(both_ends, folded, s) for s in range(4)] == [[8000], [8000], [8000], [2000]]
    assert exchanged_bytes(inside, folded) == [{1: BYTES}, {0: BYTES}]


def test_each_holder_has_a_copy_and_its_messages():
    profile, apart = tied(state_factor=2.0), make_plan("1-1", 2, 4)
    before = peak_memory_bytes(untied(profile), apart)
    assert peak_memory_bytes(profile, apart) == tuple(each + 2 * BYTES for each in before)
    three = peak_memory_bytes(tied(4, 0, 1, 3, state_factor=2.0), make_plan("1-1-1", 1, 3, 4))
    before = peak_memory_bytes(untied(profile), make_plan("1-1-1", 1, 3, 4))
    assert three == tuple(each + 4 * BYTES for each in before)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_formula_and_simulator_charge_the_exchange_once_an_update(schedule):
    profile, apart = tied(), make_plan("1-1", 2, 4, schedule=schedule)
    exchange = 0.5 + BYTES / 1000
    for seconds in (estimate, lambda *each: predict(*each)[1].minibatch_seconds):
        assert seconds(apart, profile, NET) - seconds(apart, untied(profile), NET) == pytest.approx(exchange)


def test_a_compressed_exchange_takes_half_the_bytes():
    profile, apart, halves = tied(), make_plan("1-1", 2, 4), NET.compressing("fp16", "float32")
    assert exchange_seconds(apart, stage_costs(profile, apart), halves) == pytest.approx(
        [0.5 + BYTES / 2000] * 2
    )
    for seconds in (estimate, lambda *each: predict(*each)[1].minibatch_seconds):
        more = seconds(apart, profile, halves) - seconds(apart, untied(profile), halves)
        assert more == pytest.approx(0.5 + BYTES / 2000)


def test_a_rank_that_serves_several_replicas_sends_to_each():
    profile, apart = tied(), make_plan("1-3", 2, 4)
    seconds = exchange_seconds(apart, stage_costs(profile, apart), NET)
    assert seconds == pytest.approx([0.5 + 3 * BYTES / 1000, 0.5 + BYTES / 1000])
    events = predict(apart, profile, NET)[0].events[0]
    (took,) = [
        each.end_seconds - each.start_seconds for each in events if isinstance(each.instruction, AllReduce)
    ]
    assert took >= seconds[0]


def test_messages_of_an_exchange_take_processor_time():
    busy = replace(NET, message_seconds=0.25)
    profile, apart = tied(), make_plan("1-1", 2, 4)
    more = predict(apart, profile, busy)[1].minibatch_seconds
    more -= predict(apart, untied(profile), busy)[1].minibatch_seconds
    assert more == pytest.approx(0.5 + BYTES / 1000 + 2 * 0.25)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_asynchronous_plans_never_separate_the_holders(schedule):
    profile = tied(8, 1, 3)
    count = 1 if schedule == "pipedream" else 8
    found = search(profile, NET, count, num_ranks=4, schedule=schedule)
    assert any(each.plan.num_stages > 1 for each in found)
    assert all(may_run(profile, each.plan) for each in found)
    assert all(not {2, 3} & {stage.stop for stage in each.plan.stages} for each in found)
    free = search(untied(profile), NET, count, num_ranks=4, schedule=schedule)
    assert any({2, 3} & {stage.stop for stage in each.plan.stages} for each in free)
    line = straight(profile, NET, 4, count, schedule)
    assert line is not None and line.num_stages > 1 and may_run(profile, line)


def test_what_is_not_separable_stays_in_one_stage_under_every_schedule():
    profile = tied(8, 1, 3)
    profile = replace(profile, shared=(replace(profile.shared[0], separable=False),))
    for schedule in ("1f1b", "interleaved-1f1b", "zero-bubble"):
        found = search(profile, NET, 8, num_ranks=3, schedule=schedule)
        assert any(each.plan.num_stages > 1 for each in found)
        assert all(not {2, 3} & {stage.stop for stage in each.plan.stages} for each in found)


def test_a_frozen_shared_parameter_costs_nothing_and_is_not_separated_either():
    profile, apart = tied(num_bytes=0), make_plan("1-1", 2, 4)
    assert stage_costs(profile, apart) == stage_costs(untied(profile), apart)
    assert not may_run(profile, make_plan("1-1", 2, 4, schedule="pipedream", count=1))


def test_a_plan_that_separates_them_under_an_asynchronous_schedule_does_not_fit():
    profile = tied()
    assert fits(plan([1] * 4, 1), profile, NET)
    assert not fits(plan([1] * 4, 1, "pipedream"), profile, NET)
    assert fits(make_plan("2", 4, schedule="pipedream", count=1), profile, NET)


def test_the_search_avoids_an_exchange_that_costs_more_than_it_gains():
    """Four equal layers in two stages: an even cut, unless the exchange takes longer than uneven work."""
    small = replace(tied(4, 0, 1, num_bytes=100), layers=(layer(parameters=100, output=1),) * 4)
    first = replace(small, layers=tuple(replace(each, parameter_bytes=10**6) for each in small.layers))
    heavy = replace(first, shared=(SharedParameter("w", (1, 2), 10**6),))
    best = search(heavy, NET, 8, num_ranks=2)[0].plan
    assert all(stage.stop != 2 for stage in best.stages)
    assert 2 in {stage.stop for stage in search(untied(heavy), NET, 8, num_ranks=2)[0].plan.stages}


@pytest.mark.parametrize(
    "layers, num_bytes, told",
    [
        ((0,), 1, "layers must be several in ascending order, got \\[0\\]"),
        ((1, 0), 1, "layers must be several in ascending order, got \\[1, 0\\]"),
        ((0, 7), 1, "shared\\[0\\].layers must be < 4, got 7"),
        ((0, 1), 9000, "shared\\[0\\].parameter_bytes must be a part of .* = 8000, got 9000"),
        ((0, 1), -1, "parameter_bytes must be an integer >= 0, got -1"),
    ],
)
def test_wrong_values_are_told(layers, num_bytes, told):
    with pytest.raises(ValueError, match=told):
        tied(4, *layers, num_bytes=num_bytes)


@pytest.mark.parametrize(
    "here, there", [((1, 2), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (1, 2)), ((2, 2), (3, 2))], ids=str
)
def test_shards_exchange_a_whole_parameter_with_whoever_expects_it(here, there):
    """One waited for a rank that sent to another."""
    specs = [StageSpec(s, s + 1, m, tensor=t) for s, (m, t) in enumerate((here, there))]
    plan = Plan(tuple(specs))
    for one, other in ((0, 1), (1, 0)):
        sources = {rank: peers_of(plan, plan.place(rank), other).source for rank in plan.stages[one].ranks}
        for rank in plan.stages[other].ranks:
            targets = peers_of(plan, plan.place(rank), one).targets
            assert set(targets) == {each for each, source in sources.items() if source == rank}
