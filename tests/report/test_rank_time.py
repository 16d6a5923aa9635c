from pytest import approx

from hybridpipe.planning.timeline import TimeParts
from hybridpipe.report.rank_time import TRACED, compared, parts_table, ranks_table

RANK = dict.fromkeys(TRACED, 0.0)
RANKS = {
    0: RANK
    | {"seconds": 4.0, "forward_seconds": 1.0, "message_seconds": 0.5, "copying_seconds": 0.5}
    | {"idle_seconds": 1.5, "loading_seconds": 0.25, "other_seconds": 0.25},
    1: RANK | {"seconds": 5.0, "forward_seconds": 2.5, "optimizer_seconds": 1.25, "idle_seconds": 1.25},
}


def test_a_minibatch_is_as_long_as_on_the_slowest_rank_and_its_parts_add_up_to_that():
    parts = compared(TimeParts(1, 2, 0, 0, 0.5, 0), RANKS)
    measured = {name.removesuffix("_seconds"): each["measured"] for name, each in parts.items()}
    assert sum(measured.values()) == approx(5.0)
    assert measured["forward"] == approx(5 * (0.25 + 0.5) / 2)
    assert measured["traffic"] == approx(5 * 0.25 / 2) and measured["other"] == approx(5 * 0.125 / 2)


def test_idle_is_what_it_is_in_the_ranks_own_rows():
    """Loading and the loop around the program counted as idle here, and as other there."""
    measured = compared(TimeParts(1, 2, 0, 0, 0.5, 0), RANKS)["idle_seconds"]["measured"]
    assert measured == approx(5 * (1.5 / 4 + 1.25 / 5) / 2)


def test_predicted_and_measured_parts_side_by_side():
    parts = compared(TimeParts(1, 2, 0, 0, 0.5, 0), {0: RANK | {"seconds": 1.0, "allreduce_seconds": 0.25}})
    assert parts["allreduce_seconds"] == {"predicted": 0.5, "measured": 0.25}
    assert [line.split() for line in parts_table(parts).splitlines()][-3:] == [
        ["allreduce", "500", "ms", "250", "ms"],
        ["idle", "0", "us", "0", "us"],
        ["other", "0", "us", "0", "us"],
    ]


def test_where_each_ranks_time_goes():
    parts = {"seconds": 0.01, "forward_seconds": 0.004, "idle_seconds": 0.0, "other_seconds": 0.006}
    header, _, row = ranks_table({3: parts}).splitlines()
    assert header.split() == ["rank", "minibatch", "forward", "idle", "other"]
    assert row.split() == ["3", "10", "ms", "4", "ms", "-", "6", "ms"]
