"""Progress: what the lines about a running training say."""

import pytest

from hybridpipe.report.progress import (
    WINDOW_SECONDS,
    Progress,
    Speed,
    exchange_line,
    hosts_line,
    progress_line,
)


def test_a_line_about_a_minibatch_and_one_about_an_epoch():
    assert progress_line(Progress(3, 20, 820, 7180), 0.43124, 1234.4, 760.2) == (
        "epoch 3/20, minibatch 820/7180: loss 0.4312; 1,234 samples/s; 0:12:40 left"
    )
    held_out = {"loss": 0.5, "accuracy": 0.875}
    line = progress_line(
        Progress(3, 20, 1077, 7180), 0.43124, 1234.4, 90061.0, validation=held_out, learning_rate=0.03
    )
    assert line == (
        "epoch 3/20, minibatch 1077/7180: loss 0.4312; validation loss 0.5000, accuracy 0.8750; "
        "1 day, 1:01:01 left"
    ), "it had 150 characters with the clock: what metrics.jsonl has is left out"
    short = progress_line(Progress(1, 2, 3, 6), 0.4, 1234.4, None, learning_rate=0.03)
    assert short == "epoch 1/2, minibatch 3/6: loss 0.4000; lr 0.03; 1,234 samples/s"


def test_what_is_not_known_is_left_out():
    assert progress_line(Progress(1, None, 5, None), 0.00012345, None, None) == (
        "epoch 1, minibatch 5: loss 0.0001234"
    )


@pytest.mark.parametrize(
    "hosts, line",
    [
        (["a"], "1 rank on a"),
        (["a", "a"], "2 ranks on a"),
        (["a", "a", "b", "b"], "4 ranks on 2 hosts: a, b"),
        ([f"n{i}" for i in range(16)], "16 ranks on 16 hosts: n0, n1, n2, n3, n4, n5, n6, .., n15"),
    ],
)
def test_the_hosts_are_named(hosts, line):
    assert hosts_line(hosts) == line


def test_the_speed_is_that_of_the_last_seconds():
    speed = Speed()
    assert speed.samples_per_second is None
    speed.note(8, 100.0, now=100.0)  # the first minibatch warms up
    assert speed.samples_per_second == 0.08
    for i in range(20):
        speed.note(8, 1.0, now=101.0 + i)
    assert speed.samples_per_second == 8.0
    for i in range(int(WINDOW_SECONDS)):
        speed.note(8, 2.0, now=122.0 + 2 * i)
    assert speed.samples_per_second == 4.0


def test_the_time_left_counts_validations_but_not_the_start():
    speed = Speed()
    speed.note(8, 50.0, now=50.0)
    assert speed.seconds_left(10, now=51.0) is None
    speed.note(8, 1.0, now=51.0)
    speed.note(8, 1.0, now=52.0)
    assert speed.seconds_left(10, now=52.0) == 10.0
    assert speed.seconds_left(10, now=56.0) == 30.0, "four seconds of validation"
    assert speed.seconds_left(0, now=56.0) is None


def test_groups_say_how_often_they_exchange():
    told = "they exchange weights after 8 updates (average), which is in no prediction"
    assert exchange_line(2, 8, "average") == f"2 groups, each under the plan below; {told}"
    assert "after each update (diloco)" in exchange_line(3, 1, "diloco")
