"""How late gradients and losses are, and how much is on its way until then."""

import itertools

import pytest

from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import (
    UNLIMITED,
    delay_of,
    in_flight_per_stage,
    losses_late,
    overflows_late,
    per_update,
    programs,
    resume_points_every,
    until_backward,
    version_of,
)
from hybridpipe.planning.schedules.instructions import Forward, Step
from hybridpipe.planning.schedules.registry import SYNCHRONOUS, TRAITS
from tests.planning.helpers import plan

REPLICAS = [r for stages in (1, 2, 3) for r in itertools.product(range(1, 4), repeat=stages)]


def late_in_the_end(of: Plan, stage: int) -> int:
    """The fewest updates between the weights that a microbatch saw and its own update, in a full pipeline."""
    size = of.replicas[stage] if of.traits.whole_minibatch else of.num_microbatches
    far = 100 * resume_points_every(of) * of.num_microbatches
    a_round = resume_points_every(of) * of.num_microbatches
    return min(m // size - version_of(of, stage, m) for m in range(far, far + a_round, size))


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_pipedreams_gradients_are_as_late_as_microbatches_are_in_flight(replicas):
    of = plan(replicas, 1, "pipedream")
    delays = [delay_of(of, s) for s in range(of.num_stages)]
    assert delays == [held - 1 for held in until_backward(of, UNLIMITED)]
    assert delays == [late_in_the_end(of, s) for s in range(of.num_stages)]


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_under_vertical_sync_every_stage_is_as_late_as_its_versions_are(replicas):
    of = plan(replicas, 1, "pipedream", vertical_sync=True)
    delays = [delay_of(of, s) for s in range(of.num_stages)]
    assert delays == [late_in_the_end(of, s) for s in range(of.num_stages)]
    assert delays[0] == until_backward(of, UNLIMITED)[0] - 1


@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
def test_2bw_is_one_update_late(num_microbatches):
    for replicas in REPLICAS:
        of = plan(replicas, num_microbatches, "pipedream-2bw")
        assert [delay_of(of, s) for s in range(of.num_stages)] == [1] * of.num_stages


def test_a_flush_leaves_nothing_late():
    for schedule in SYNCHRONOUS:
        of = plan([1, 1], 4, schedule, chunks=2 if TRAITS[schedule].interleaves else 1)
        assert delay_of(of, 0) == 0 and losses_late(of) == 1 and resume_points_every(of) == 1


@pytest.mark.parametrize(
    "of, late",
    [
        (plan([1, 1, 1], 1, "pipedream"), 3 + 2),
        (plan([2, 1], 1, "pipedream"), 4 + 4),
        (plan([1, 3], 1, "pipedream"), 4 + 6),
        (plan([1, 1, 1], 4, "pipedream-2bw"), 3 + 2),
    ],
    ids=lambda of: of.name if isinstance(of, Plan) else "",
)
def test_a_loss_is_waited_for_when_no_one_waits_for_who_has_it(of, late):
    assert losses_late(of) == late


@pytest.mark.parametrize("schedule, count", [("pipedream", 1), ("pipedream-2bw", 1), ("pipedream-2bw", 3)])
@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_a_rank_has_told_its_overflows_before_its_scale_depends_on_them(replicas, schedule, count):
    of = plan(replicas, count, schedule)
    lag, least = overflows_late(of), 10**9
    for rank_program in programs(of, 40 * count).values():
        updated = 0
        for instruction in rank_program:
            match instruction:
                case Step(num_minibatches=covered):
                    updated += covered
                case Forward(microbatch=m) if m // count >= lag:
                    least = min(least, updated - (m // count - lag))
    assert least >= 1, "minibatch m - lag is updated with"
    if schedule == "pipedream" and replicas[0] == 1:
        assert least == 1, "no sooner than the first stage can know"


def test_of_2bw_two_minibatches_are_on_their_way_at_most():
    assert until_backward(plan([1] * 6, 2, "pipedream-2bw"), UNLIMITED) == (4, 4, 4, 3, 2, 1)
    assert until_backward(plan([1] * 3, 1, "pipedream-2bw"), UNLIMITED) == (2, 2, 1)
    assert until_backward(plan([2, 1, 1, 1], 3, "pipedream-2bw"), UNLIMITED) == (3, 3, 2, 1)


def test_gpipe_holds_all_there_are_however_many():
    for many in (200, 10**9):
        assert in_flight_per_stage(plan([1, 2], 4, "gpipe"), many) == (many, many // 2)


def test_an_update_is_of_a_replicas_part_of_a_minibatch_or_of_one():
    assert [per_update("1f1b", 7, replicas) for replicas in (1, 2, 7, 8)] == [7, 4, 1, 1]
    assert per_update("pipedream", 7, 2) == 1


def test_unlimited_is_more_than_any_pipeline_holds():
    assert in_flight_per_stage(plan([1] * 130, 200), UNLIMITED)[0] == 130


def test_under_a_limit_a_stage_holds_no_more_than_the_rounds_before_it_let_pass():
    """The first stage's one round has to come back before a second minibatch gets to the next stage."""
    limited = plan([4, 1, 3], 1, "pipedream", max_in_flight=2)
    assert until_backward(limited, UNLIMITED) == (1, 1, 1)
