"""Results: medians, ratios within a round, losses beside one process's, and what is kept between calls."""

from results import Row, median, other_losses, read, steady_seconds, times_as_fast, write


def row(group, way, number, seconds=None, loss=None, error=""):
    return Row(group, way, number, {"seconds": seconds, "loss": loss} if seconds else {}, error)


# The machine was half as fast in the second round.
ROWS = [
    row("mlp", "one", 0, 1.0, loss=2.0),
    row("mlp", "two", 0, 0.5, loss=2.0005),
    row("mlp", "one", 1, 2.0, loss=2.0),
    row("mlp", "two", 1, 1.0, loss=2.1),
    row("mlp", "broken", 1, error="RuntimeError: no"),
    row("gpt", "one", 0, 9.0),
]


def test_a_ratio_is_taken_within_a_round():
    assert times_as_fast(ROWS, "mlp", "two", "one") == 2.0
    late = [each for each in ROWS if (each.way, each.round) != ("one", 0)]
    assert times_as_fast(late, "mlp", "two", "one") == 2.0


def test_median_over_the_rounds():
    assert median(ROWS, "mlp", "one") == 1.5


def test_what_did_not_run_has_no_figures():
    assert median(ROWS, "mlp", "broken") is None
    assert times_as_fast(ROWS, "mlp", "broken", "one") is None
    assert times_as_fast(ROWS, "mlp", "one", "broken") is None


def test_another_loss_is_seen_beyond_rounding():
    ((other, wanted),) = other_losses(ROWS, "one")
    assert (other.way, other.round, wanted) == ("two", 1, 2.0)
    assert not other_losses(ROWS, "one", but=["two"])


def test_a_loss_that_is_no_number_is_another():
    rows = [row("mlp", "one", 0, 1.0, 2.0), row("mlp", "two", 0, 1.0, float("nan"))]
    assert len(other_losses(rows, "one")) == 1


def test_warm_up_is_not_looked_at():
    assert steady_seconds([9.0, 9.0, 9.0, 1.0, 2.0, 3.0]) == 2.0
    assert steady_seconds([9.0]) == 9.0


def test_what_was_written_is_read_again(tmp_path):
    path, runs = tmp_path / "peers.json", [{"command": "python benchmarks/run.py peers"}]
    assert read(path) == ([], [])
    write(path, runs, ROWS)
    assert read(path) == (runs, ROWS)
