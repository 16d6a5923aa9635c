"""How much of a plan is simulated: enough to fill the pipeline and deal microbatches out, and no more."""

import math
from dataclasses import replace

import pytest

from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.simulator import predict as module
from hybridpipe.planning.simulator.predict import is_simulated, predict
from tests.planning.helpers import free, layer, model, plan


def num_instructions(of: Plan, num_microbatches: int) -> int:
    return sum(map(len, programs(of, num_microbatches).values()))


@pytest.mark.parametrize(
    "of",
    [
        plan([1], 8),
        plan([1, 1], 8),
        plan([1, 1, 1, 1], 8, "gpipe"),
        plan([2, 1, 2], 8),
        plan([1, 1, 1], 8, "zero-bubble"),
        plan([1, 1], 8, "interleaved-1f1b", chunks=3),
        plan([2, 2, 2], 1, "pipedream"),
        plan([1, 1, 1], 6, "pipedream-2bw"),
        plan([1, 1], 2, "pipedream-2bw"),
    ],
    ids=lambda of: f"{of.name} {of.schedule}",
)
def test_instructions_are_counted_as_programs_have_them(of):
    """Of so many microbatches more, as an update at the end is in no count."""
    many = 24 * of.num_microbatches
    more = (num_instructions(of, 2 * many) - num_instructions(of, many)) / many
    assert math.floor(more) == module._instructions_per_microbatch(of)


@pytest.mark.parametrize(
    "of, expected",
    [
        (plan([1], 1, "pipedream"), (2, 32, 1)),
        (plan([1, 1, 1], 1, "pipedream"), (6, 32, 3)),
        (plan([1, 1, 1], 4, "pipedream-2bw"), (2, 8, 1)),
        (plan([1] * 40, 1, "pipedream"), (80, 40, 40)),  # as many as are in flight, at least
        (plan([2, 3], 1, "pipedream"), (12, 36, 6)),  # whole rounds of six
        (plan([9, 8, 7], 1, "pipedream"), (54, 261, 27)),  # whole rounds, of 504, would be too many
    ],
    ids=lambda of: of.name if isinstance(of, Plan) else "",
)
def test_an_asynchronous_pipeline_fills_is_measured_and_kept_full(of, expected):
    """Minibatches for each; measured are whole rounds, or a part that is long beside what it lacks."""
    assert module._window(of) == expected


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2)])
@pytest.mark.parametrize("total", [121, 122, 126, 250])
def test_two_short_minibatches_deal_out_as_the_long_one_does(schedule, chunks, total, monkeypatch):
    replicas = [2, 2] if chunks > 1 else [2, 3]
    of = plan(replicas, total, schedule, chunks=chunks)
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", 100)
    assert not is_simulated(of)
    short, long = module._representative(of)
    round_length = math.lcm(*replicas) * (2 if chunks > 1 else 1)
    assert short % round_length == long % round_length == total % round_length
    depth = module._depth(of)
    assert 3 * depth <= short < 3 * depth + 4 * round_length and 2 * depth <= long - short < long < total


def test_a_minibatch_hardly_longer_than_two_short_ones_is_simulated_whole(monkeypatch):
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", 10)
    assert module._representative(plan([1, 1], 10)) == (10,)
    assert module._representative(plan([1, 1], 11)) == (6, 10)


def test_a_straight_line_goes_through_two_short_minibatches(monkeypatch):
    profile = model(layer(1.0, 2.0), layer(2.0, 2.5))
    for schedule in ("1f1b", "gpipe"):
        long = plan([1, 1], 50, schedule)
        timeline, whole = predict(long, profile, free(2))
        assert timeline.seconds == whole.minibatch_seconds
        with monkeypatch.context() as patch:
            patch.setattr(module, "MAX_INSTRUCTIONS", 100)
            shorter, extended = predict(long, profile, free(2))
        assert shorter.seconds < timeline.seconds
        assert extended.minibatch_seconds == pytest.approx(whole.minibatch_seconds)
        assert extended.bubble_fraction == pytest.approx(whole.bubble_fraction)
        assert extended.samples_per_second == pytest.approx(whole.samples_per_second)


def test_a_lag_longer_than_the_pipeline_is_filled_too(monkeypatch):
    profile = model(layer(1.0, 2.0, 1), layer(1.0, 2.0, 1))
    long = plan([1, 1], 80, "zero-bubble", in_flight=3, weight_lag=9)
    whole = predict(long, profile, free(2))[1].minibatch_seconds
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", 100)
    assert module._representative(long) == (27, 45)
    assert predict(long, profile, free(2))[1].minibatch_seconds == pytest.approx(whole)


def test_what_is_simulated_is_known_beforehand(monkeypatch):
    synchronous, asynchronous = plan([1, 1], 12), plan([1, 1, 1], 1, "pipedream")
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", 10 * 8)  # the longer one of two
    assert is_simulated(synchronous)
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", 10 * 8 - 1)
    assert not is_simulated(synchronous)
    each = module._instructions_per_microbatch(asynchronous)
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", (6 + 32 + 3) * each)
    assert is_simulated(asynchronous)
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", (6 + 32 + 3) * each - 1)
    assert not is_simulated(asynchronous)


def test_a_window_is_whole_rounds_of_all_stages_unless_these_are_too_many():
    assert module._window(plan([8, 7], 1, "pipedream"))[1] == 56  # more than 8 + 32
    assert module._window(plan([9, 8, 7], 1, "pipedream"))[1] == 261  # 8 * 32, in rounds of the first stage


def test_a_pipeline_too_deep_to_fill_is_taken_at_the_formulas_pace(monkeypatch):
    of, profile = plan([1, 1, 1], 1, "pipedream"), model(layer(1, 1), layer(2, 2), layer(1, 2))
    _, filled = predict(of, profile, free(3))
    monkeypatch.setattr(module, "MAX_INSTRUCTIONS", 200)
    timeline, estimated = predict(of, profile, free(3))
    assert estimated.minibatch_seconds == filled.minibatch_seconds == 4
    assert sum(map(len, timeline.events.values())) <= 200
    assert estimated.bubble_fraction == pytest.approx(1 - (2 + 4 + 3) / (3 * 4))


def test_what_would_take_minutes_is_refused(monkeypatch):
    profile = model(layer(1, 1), layer(1, 1))
    many = plan([1, 1], 12)
    monkeypatch.setattr(module, "MOST_INSTRUCTIONS", 12 * 8)
    predict(many, profile, free(2))
    with pytest.raises(ValueError, match="too large to simulate: its num_microbatches make 104 instructions"):
        predict(replace(many, num_microbatches=13), profile, free(2))
    routes = plan([2, 3], 6)
    monkeypatch.setattr(module, "MOST_ROUTES", 6)
    predict(routes, profile, free(5))
    monkeypatch.setattr(module, "MOST_ROUTES", 5)
    with pytest.raises(ValueError, match="replicas of neighbouring stages make 6 routes"):
        predict(routes, profile, free(5))
