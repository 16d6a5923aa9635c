"""A stream that is cut: the rest of each program, what it still needs, and that nothing waits for ever."""

import itertools

import pytest

from hybridpipe.planning.cost.formula import StageCost
from hybridpipe.planning.plan import Place
from hybridpipe.planning.schedules.generators import program, resume_points_every, version_of
from hybridpipe.planning.schedules.instructions import Backward, Forward, Step, text
from hybridpipe.planning.schedules.resume_point import (
    ResumePoint,
    num_updates,
    resumed_program,
    versions_in_use,
)
from hybridpipe.planning.simulator.predict import simulate
from tests.planning.helpers import free, plan

ASYNCHRONOUS = {
    "pipedream": {"schedule": "pipedream", "num_microbatches": 1},
    "vertical sync": {"schedule": "pipedream", "num_microbatches": 1, "vertical_sync": True},
    "limited": {"schedule": "pipedream", "num_microbatches": 1, "max_in_flight": 2},
    "2bw of 1": {"schedule": "pipedream-2bw", "num_microbatches": 1},
    "2bw of 3": {"schedule": "pipedream-2bw", "num_microbatches": 3},
    "2bw limited": {"schedule": "pipedream-2bw", "num_microbatches": 4, "max_in_flight": 2},
}
REPLICAS = [r for stages in (1, 2, 3) for r in itertools.product(range(1, 4), repeat=stages)]


def cut_streams(kind: str):
    """(plan, point, microbatches of the stream) for every plan and every resume point of its stream."""
    for replicas in REPLICAS:
        made = plan(replicas, **ASYNCHRONOUS[kind])
        total = 2 * resume_points_every(made) + 3
        short = max(1, made.num_microbatches - 1)  # of the last minibatch
        for done in range(0, total, resume_points_every(made)):
            yield made, ResumePoint(done, total), (total - 1) * made.num_microbatches + short


def places(made):
    return [Place(s, r) for s, stage in enumerate(made.stages) for r in range(stage.replicas)]


@pytest.mark.parametrize("replicas, schedule, every", [
    ((2, 3), "pipedream", 6), ((2, 4), "pipedream", 4), ((2, 3), "pipedream-2bw", 1), ((2, 3), "1f1b", 1),
])  # fmt: skip
def test_a_stream_is_cut_where_every_stage_updates(replicas, schedule, every):
    assert resume_points_every(plan(replicas, 1, schedule)) == every


def test_the_rest_of_a_program():
    made = plan([1, 1], 1, "pipedream")
    whole, rest = (resumed_program(made, Place(0, 0), 5, ResumePoint(done, 5)) for done in (0, 2))
    assert text(whole) == (
        "F0 sa0 F1 sa1 rg0 B0 step F2 sa2 rg1 B1 step F3 sa3 rg2 B2 step F4 sa4 rg3 B3 step rg4 B4 step"
    )
    assert text(rest) == "F2 sa2 F3 sa3 rg2 B2 step F4 sa4 rg3 B3 step rg4 B4 step"


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_at_a_cut_a_rank_has_gone_back_over_what_is_done_and_nothing_else(kind):
    """So its weights are of these minibatches, its gradients are empty, and the rest is all there is."""
    for made, point, count in cut_streams(kind):
        for place in places(made):
            whole, updates = program(made, place, count), num_updates(made, place.stage, point)
            steps = [i for i, instruction in enumerate(whole) if instruction == Step()]
            before = whole[: steps[updates - 1] + 1] if updates else ()
            first = point.done * made.num_microbatches
            mine = range(place.replica, first, made.replicas[place.stage])
            assert [i.microbatch for i in before if isinstance(i, Backward)] == list(mine)
            rest = resumed_program(made, place, count, point)
            in_flight = tuple(i for i in before if getattr(i, "microbatch", -1) >= first)
            assert rest == in_flight + whole[len(before) :]


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_the_rests_of_all_ranks_run_to_their_end(kind):
    """`simulate` raises Deadlock, or waits for a message that nobody sends."""
    for made, point, count in cut_streams(kind):
        rests = {rank: resumed_program(made, made.place(rank), count, point) for rank in made.ranks}
        timeline = simulate(rests, made, [StageCost(1.0, 2.0)] * made.num_stages, free(made.num_ranks))
        assert sum(map(len, timeline.events.values())) == sum(map(len, rests.values()))


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_the_versions_that_are_kept_are_those_that_the_rest_asks_for(kind):
    for made, point, count in cut_streams(kind):
        for place in places(made):
            newest = num_updates(made, place.stage, point)
            rest = resumed_program(made, place, count, point)
            asked = {version_of(made, place.stage, i.microbatch) for i in rest if isinstance(i, Forward)}
            kept, wanted = versions_in_use(made, place, point), sorted(n for n in asked if n < newest)
            if point.done and point.done < point.total - 1:
                assert kept == wanted
            elif point.done:  # a replica may have nothing to do with the last minibatch, which is short
                assert kept in ([], wanted) or not wanted


@pytest.mark.parametrize("schedule, size", [("pipedream", 1), ("pipedream-2bw", 4)])
@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1], [1, 3]])
def test_weights_that_were_predicted_are_kept_by_the_update_that_they_are_for(schedule, size, replicas):
    made = plan(replicas, size, schedule, prediction="spectrain")
    point = ResumePoint(2 * resume_points_every(made), 30)
    for place in places(made):
        newest, mine = num_updates(made, place.stage, point), made.microbatches_of(place, 30 * size)
        behind = [m for m in mine if m >= point.done * size and version_of(made, place.stage, m) < newest]
        per_update = made.replicas[place.stage] if size == 1 else size
        assert versions_in_use(made, place, point) == sorted({m // per_update for m in behind})
        assert all(number >= newest for number in versions_in_use(made, place, point))


def test_replicas_may_see_versions_that_the_first_one_does_not():
    """Under vertical sync; so what the first one writes is not enough for all."""
    made = plan([2, 2, 3], 1, "pipedream", vertical_sync=True)
    first, second = (versions_in_use(made, Place(2, replica), ResumePoint(6, 100)) for replica in (0, 1))
    assert (first, second) == ([0], [0, 1])


def test_at_the_end_of_a_stream_nothing_is_left():
    made = plan([2, 1], 1, "pipedream")
    assert resumed_program(made, Place(0, 1), 5, ResumePoint(5, 5)) == ()
    assert (
        num_updates(made, 0, ResumePoint(5, 5)) == 3
        and versions_in_use(made, Place(0, 1), ResumePoint(5, 5)) == []
    )
