"""What is asked of a plan: which schedules that leaves, and which plans it fits."""

from dataclasses import replace

import pytest

from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.request import AUTO, PlanRequest
from hybridpipe.planning.schedules.registry import SCHEDULES, SYNCHRONOUS, TRAITS
from tests.planning.helpers import plan

LIMITED = [name for name, traits in TRAITS.items() if traits.takes_max_in_flight]


def test_auto_is_any_schedule_that_can_do_what_is_asked():
    assert PlanRequest("gpipe").schedules == ["gpipe"]
    assert PlanRequest(AUTO).schedules == list(SYNCHRONOUS)
    assert PlanRequest(AUTO, asynchronous=True).schedules == list(SCHEDULES)
    assert PlanRequest(AUTO, max_in_flight=2).schedules == [name for name in LIMITED if name in SYNCHRONOUS]
    assert PlanRequest(AUTO, asynchronous=True, max_in_flight=2).schedules == LIMITED
    assert 0 < len(LIMITED) < len(SCHEDULES)


def test_where_memory_is_not_limited_none_is_spared():
    roomy = PlanRequest(AUTO).compared(is_limited=False)
    assert [name for name in SYNCHRONOUS if name not in roomy] == ["v-half", "v-min"]
    assert PlanRequest(AUTO).compared(is_limited=True) == list(SYNCHRONOUS)
    assert PlanRequest("v-min").compared(is_limited=False) == ["v-min"]


def test_under_a_schedule_what_that_cannot_do_is_left_out():
    asked = PlanRequest(AUTO, asynchronous=True, vertical_sync=True, recompute=True)
    assert asked.under("pipedream") == PlanRequest("pipedream", vertical_sync=True, recompute=True)
    assert asked.under("pipedream-2bw") == PlanRequest("pipedream-2bw", recompute=True)


def test_asynchronous_schedules_alone_predict_weights():
    asked = PlanRequest(AUTO, asynchronous=True, prediction="xpipe")
    assert asked.under("pipedream-2bw") == PlanRequest("pipedream-2bw", prediction="xpipe")
    assert asked.under("1f1b") == PlanRequest("1f1b")
    assert PlanRequest(AUTO, asynchronous=True, prediction="xpipe", zero=1).schedules == [
        name for name in PlanRequest(AUTO, zero=1).schedules if name in SYNCHRONOUS
    ]
    assert {way.zero for way in PlanRequest("pipedream", zero=AUTO, prediction="xpipe").variants} == {0}
    made = plan([1, 1], 1, "pipedream", prediction="xpipe")
    assert PlanRequest.of(made) == PlanRequest("pipedream", prediction="xpipe")
    assert PlanRequest.of(made).plan(made.stages, 1) == made
    assert asked.applied_to(plan([1, 1], 1, "pipedream")) == made == PlanRequest("pipedream").applied_to(made)
    with pytest.raises(ValueError, match=r"^prediction = off is requested$"):
        PlanRequest("pipedream").check_found(made)
    with pytest.raises(ValueError, match=r"^prediction = 'spectrain' disagrees with the plan, .* 'xpipe'$"):
        PlanRequest("pipedream", prediction="spectrain").check_given(made)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"prediction": "on"}, "prediction must be one of off, spectrain, xpipe, got 'on'"),
        ({"prediction": "xpipe"}, "prediction must be off under 1f1b, whose gradients are never late"),
        ({"schedule": AUTO, "prediction": "xpipe"}, "prediction must be off unless asynchronous schedules "),
        (
            {"schedule": AUTO, "asynchronous": True, "vertical_sync": True, "prediction": "xpipe"},
            "vertical_sync must be false with prediction = 'xpipe', got true: predicted weights are of one ",
        ),
        (
            {"schedule": "pipedream", "prediction": "xpipe", "zero": 1},
            "zero must be at most 0 under pipedream with prediction, got 1",
        ),
    ],
)
def test_a_prediction_that_cannot_be_is_refused(options, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        PlanRequest(**options)


def test_replicas_share_out_what_the_schedule_can():
    every = [Variant(), *(Variant(False, zero, scatter) for zero in (1, 2) for scatter in (False, True))]
    assert PlanRequest("1f1b", zero=AUTO).variants == tuple(every)
    assert PlanRequest("1f1b", zero=AUTO, max_in_flight=2).variants == tuple(every[:3])
    assert PlanRequest("interleaved-1f1b", zero=AUTO).variants == tuple(every[:3])
    asked = PlanRequest("1f1b", recompute=True, zero=2)
    assert {way.zero for way in asked.variants} == {2} and asked.leanest == Variant(True, 2)
    assert PlanRequest(AUTO, zero=2).schedules == ["1f1b", "gpipe", "zero-bubble"]
    with pytest.raises(ValueError, match="zero must be at most 1 under interleaved-1f1b, got 2"):
        PlanRequest("interleaved-1f1b", zero=2)
    with pytest.raises(ValueError, match="zero must be at most 1 under auto with max_in_flight, got 2"):
        PlanRequest(AUTO, zero=2, max_in_flight=4)
    for wrong, told in (
        (3, "one of 0, 1, 2, got 3"),
        ("2", "one of 0, 1, 2, auto, got '2'"),
        (-1, "an integer"),
    ):
        with pytest.raises(ValueError, match=f"zero must be {told}"):
            PlanRequest(zero=wrong)


def test_the_request_of_a_plan_asks_for_what_its_replicas_share_out():
    mixed = plan([2, 1, 2], 4).running([Variant(zero=1), Variant(), Variant(zero=2)])
    assert PlanRequest.of(mixed).zero == AUTO
    assert PlanRequest.of(plan([2, 1], 4, zero=2)).zero == 2
    assert PlanRequest.of(plan([1, 1], 4, zero=2)).zero == 0, "there are no replicas"


def test_a_plan_is_made_as_asked():
    made = PlanRequest("pipedream", False, True, True, 3).plan([StageSpec(0, 2)], 1)
    options = {"vertical_sync": True, "max_in_flight": 3}  # stages say themselves whether they recompute
    assert made == Plan((StageSpec(0, 2),), "pipedream", 1, **options)


@pytest.mark.parametrize(
    "asked, found, told",
    [
        (PlanRequest("1f1b"), plan([1, 1], 4), None),
        (PlanRequest(AUTO), plan([1, 1], 4, "gpipe"), None),
        (PlanRequest(AUTO), plan([1, 1], 1, "pipedream"), "schedule = auto is requested"),
        (PlanRequest("1f1b"), plan([1, 1], 4, max_in_flight=2), "max_in_flight = None is requested"),
        (PlanRequest("1f1b", max_in_flight=2), plan([1, 1], 4), "max_in_flight = 2 is requested"),
        (PlanRequest("pipedream"), plan([1, 1], 1, "pipedream", vertical_sync=True), "vertical_sync = False"),
        (PlanRequest("1f1b"), plan([1, 1], 4, recompute=True), "recompute = False is requested"),
        (PlanRequest("1f1b", recompute=True), plan([1, 1], 4), None),
        (PlanRequest("1f1b", zero=1), plan([2, 1], 4, zero=1), None),
        (PlanRequest("1f1b", zero=1), plan([1, 1], 4), None),  # there are no replicas
        (PlanRequest("1f1b", zero=AUTO), plan([2, 1], 4, zero=2), None),
        (PlanRequest("1f1b", zero=1), plan([2, 1], 4), "zero = 1 is requested"),
        (PlanRequest("1f1b"), plan([2, 1], 4, zero=1), "zero = 0 is requested"),
    ],
)
def test_a_search_comes_to_what_was_requested_only(asked, found, told):
    if told is None:
        asked.check_found(found)
    else:
        with pytest.raises(ValueError, match=told):
            asked.check_found(found)


def test_options_are_applied_where_the_schedule_takes_them():
    made = plan([1, 1], 1, "pipedream")
    synced = PlanRequest(AUTO, asynchronous=True, vertical_sync=True).applied_to(made)
    assert synced == replace(made, vertical_sync=True)
    assert PlanRequest().applied_to(synced) == synced
    other = plan([1], 4, "pipedream-2bw")
    assert PlanRequest(AUTO, asynchronous=True, vertical_sync=True).applied_to(other) == other
    assert PlanRequest(max_in_flight=2).applied_to(plan([1, 1], 4)).max_in_flight == 2
    assert PlanRequest().applied_to(plan([1, 1], 4, max_in_flight=3)).max_in_flight == 3
    assert not PlanRequest(recompute=True).applied_to(plan([1, 1], 4)).recompute, "the search says where"
    assert PlanRequest().applied_to(plan([1, 1], 4, recompute=True)).recompute


def test_what_is_asked_of_a_given_plan_must_be_what_it_says():
    given = plan([1, 1], 4, "gpipe", recompute=True)
    PlanRequest().check_given(given)
    PlanRequest("gpipe", recompute=True).check_given(given)
    with pytest.raises(ValueError, match=r"schedule = 'zero-bubble' disagrees .* which says 'gpipe'"):
        PlanRequest("zero-bubble").check_given(given)
    with pytest.raises(ValueError, match="max_in_flight = 2 disagrees with the plan, which says None"):
        PlanRequest(max_in_flight=2).check_given(plan([1, 1], 4))
    PlanRequest(zero=1).check_given(plan([2, 1], 4).running([Variant(zero=1), Variant()]))
    with pytest.raises(ValueError, match="zero = 1 disagrees with the plan, which says 0"):
        PlanRequest(zero=1).check_given(plan([2, 1], 4))
