"""Rounds: medians, ratios within a round, losses beside one process's, and what is kept between calls."""

from rounds import (
    Outcome,
    median_seconds,
    next_round,
    other_losses,
    read,
    steady_seconds,
    times_as_fast,
    write,
)

# The machine was half as fast in the second round.
OUTCOMES = [
    Outcome("mlp", "one", 0, 1.0, loss=2.0),
    Outcome("mlp", "two", 0, 0.5, loss=2.0005),
    Outcome("mlp", "one", 1, 2.0, loss=2.0),
    Outcome("mlp", "two", 1, 1.0, loss=2.1),
    Outcome("mlp", "broken", 1, error="RuntimeError: no"),
    Outcome("gpt", "one", 0, 9.0),
]


def test_a_ratio_is_taken_within_a_round():
    assert times_as_fast(OUTCOMES, "mlp", "two", "one") == 2.0
    late = [o for o in OUTCOMES if (o.way, o.round) != ("one", 0)]
    assert times_as_fast(late, "mlp", "two", "one") == 2.0


def test_median_over_the_rounds():
    assert median_seconds(OUTCOMES, "mlp", "one") == 1.5


def test_what_did_not_run_has_no_figures():
    assert median_seconds(OUTCOMES, "mlp", "broken") is None
    assert times_as_fast(OUTCOMES, "mlp", "broken", "one") is None
    assert times_as_fast(OUTCOMES, "mlp", "one", "broken") is None


def test_another_loss_is_seen_beyond_rounding():
    ((outcome, wanted),) = other_losses(OUTCOMES, "one")
    assert (outcome.way, outcome.round, wanted) == ("two", 1, 2.0)
    assert not other_losses(OUTCOMES, "one", but=["two"])


def test_a_loss_that_is_no_number_is_another():
    outcomes = [Outcome("mlp", "one", 0, 1.0, 2.0), Outcome("mlp", "two", 0, 1.0, float("nan"))]
    assert len(other_losses(outcomes, "one")) == 1


def test_warm_up_is_not_looked_at():
    assert steady_seconds([9.0, 9.0, 9.0, 1.0, 2.0, 3.0]) == 2.0
    assert steady_seconds([9.0]) == 9.0


def test_rounds_of_earlier_calls_count_on(tmp_path):
    path = tmp_path / "outcomes.json"
    assert read(path) == []
    write(path, OUTCOMES)
    assert read(path) == OUTCOMES
    assert next_round(OUTCOMES, "mlp") == 2
    assert next_round(OUTCOMES, "vgg") == 0
