"""What a run says of itself, from events made by hand, in a world of one rank."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.environment.memory_limits import RankMemory
from hybridpipe.planning.plan import Plan, Prediction, StageSpec
from hybridpipe.planning.schedules.instructions import AllReduce, Backward, Forward, Step
from hybridpipe.planning.timeline import Spent, TimedEvent
from hybridpipe.training.metrics import KEPT, WARM_UP, Metrics, MinibatchRecord, Past, RankTime


def worker(predicted: Prediction | None = None) -> SimpleNamespace:
    parts = {"p2p": [SimpleNamespace(bytes_sent=300)], "sync": SimpleNamespace(bytes_reduced=70)}
    parts |= {"shares": SimpleNamespace(bytes_gathered=50), "shared": None, "centre": None, "stages": ()}
    plan = Plan((StageSpec(0, 2),), num_microbatches=2, predicted=predicted)
    return SimpleNamespace(
        plan=plan,
        control=MPI.COMM_SELF,
        device=torch.device("cpu"),
        executor=SimpleNamespace(num_skipped=0, **parts),
        group=TrainingGroup(MPI.COMM_SELF, MPI.COMM_SELF),
    )


def minibatch(start: float, scale: float = 1.0) -> list[TimedEvent]:
    """Busy for 3, waiting for 1, in units of `scale` seconds."""
    ends = [(Forward(0), 1.0), (Backward(0), 2.5), (AllReduce(), 3.5), (Step(), 4.0)]
    events, began = [], start
    for instruction, end in ends:
        events.append(TimedEvent(instruction, began, start + end * scale))
        began = start + end * scale
    return events


def test_a_run_in_figures():
    metrics = Metrics()
    metrics.begin(RankMemory(2**21, 2**22, "RAM"))
    metrics.end_start(torch.device("cpu"))
    for i in range(WARM_UP + 3):
        slow = 10.0 if i < WARM_UP else 1.0  # the first minibatches are not typical
        metrics.keep(minibatch(100.0 * i, slow), 1.0, full=True)
        record = metrics.note(epoch=0, loss=5.0 - i, num_samples=8, seconds=4.0 * slow, full=True)
        assert record == MinibatchRecord(i, 0, 5.0 - i, 8, 4.0 * slow)
    metrics.keep(minibatch(1000.0, 0.1), 1.0, full=False)
    metrics.note(epoch=0, loss=-1.0, num_samples=3, seconds=0.4, full=False)
    metrics.validation["accuracy"] = 0.5
    metrics.training_seconds = 25.0
    metrics.reach_target(epochs=1)
    summary = metrics.summary(worker(Prediction(3.0, 2.7, 0.2, (1,))))
    (start,), (peak,) = (summary.pop(name) for name in ("start_peak_memory_bytes", "peak_memory_bytes"))
    assert 1 << 20 < start <= peak
    assert summary == {
        "plan": "1",
        "schedule": "1f1b",
        "ranks": 1,
        "ranks_used": 1,
        "groups": 1,
        "samples_per_second": 2.0,
        "minibatch_seconds_median": 4.0,
        "predicted_minibatch_seconds": 3.0,
        "memory_before_bytes": [2**21],
        "memory_limit_bytes": [2**22],
        "memory_limit_origin": ["RAM"],
        "predicted_memory_bytes": [1],
        "bubble_fraction": pytest.approx(0.25),
        "loss_first": 5.0,
        "loss_last": -1.0,
        "metrics": {"accuracy": 0.5},
        "epochs_to_target": 1,
        "seconds_to_target": 25.0,
        "bytes_sent_p2p": 300,
        "bytes_allreduced": 70,
        "bytes_gathered": 50,
        "bytes_between_groups": 0,
        "updates_left_out": 0,
        "minibatches": WARM_UP + 4,
    }


def test_before_the_first_minibatch():
    summary = Metrics().summary(worker())
    assert summary["samples_per_second"] == summary["bubble_fraction"] == 0.0
    assert summary["loss_first"] is summary["loss_last"] is summary["predicted_minibatch_seconds"] is None
    assert Metrics().timeline(worker()) is None


def test_fewer_minibatches_than_the_warm_up():
    metrics = Metrics()
    metrics.keep(minibatch(0.0), 1.0, full=True)
    metrics.note(epoch=0, loss=1.0, num_samples=8, seconds=4.0, full=True)
    assert metrics.summary(worker())["samples_per_second"] == 2.0


def test_a_minibatch_takes_what_it_takes_on_the_slowest_rank():
    """Over 100 Mbit/s the first of two stages did every epoch's first of two minibatches in 0.5 s, by itself.

    The second needed 0.9 s for each, so none took 0.7 s, as the first rank's median had it.
    """
    metrics = Metrics()
    for _ in range(WARM_UP + 1):
        metrics.keep(minibatch(0.0), 4.0, full=True)
        metrics.note(epoch=0, loss=1.0, num_samples=8, seconds=4.0, full=True)
    two = worker()
    two.plan = Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=2)
    two.control = SimpleNamespace(size=2, gather=lambda mine: [mine, {**mine, "full": 8.0}])
    summary = metrics.summary(two)
    assert (summary["minibatch_seconds_median"], summary["samples_per_second"]) == (8.0, 1.0)


def test_the_timeline_is_that_of_a_typical_minibatch_from_time_zero():
    metrics = Metrics()
    for i, scale in enumerate((1.0, 9.0, 2.0)):
        metrics.keep(minibatch(50.0 * i, scale), 1.0, full=True)
    metrics.keep(minibatch(500.0, 0.1), 1.0, full=False)
    timeline = metrics.timeline(worker())
    assert list(timeline.events) == [0]
    assert timeline.events[0][0].start_seconds == 0
    assert timeline.seconds == pytest.approx(8.0)  # the median of 4, 36 and 8
    assert timeline.bubble_fraction == pytest.approx(0.25)


def test_a_trace_without_a_flush_begins_where_every_rank_has_notes():
    """An update of a replicated stage is of several minibatches: as many notes of it reach further back."""
    metrics = Metrics()
    for i in range(WARM_UP + 5):
        metrics.keep(minibatch(10.0 * i), 10.0, full=True)
    two = worker()
    two.plan = Plan((StageSpec(0, 1), StageSpec(1, 2)), "pipedream", num_microbatches=1)
    two.control = SimpleNamespace(gather=lambda mine: [mine, mine[2:]])
    traced = metrics.traced(two)
    assert [time.num_minibatches for time in traced.ranks.values()] == [3, 3]
    assert [len(events) for events in traced.timeline.events.values()] == [12, 12]


def test_a_trace_leaves_the_warm_up_out():
    metrics = Metrics()
    for i in range(WARM_UP + 2):
        metrics.keep(minibatch(10.0 * i), 10.0 + i, full=True)
    traced = metrics.traced(worker())
    assert traced.ranks[0].num_minibatches == 2
    assert traced.ranks[0].seconds == [10.0 + WARM_UP, 10.0 + WARM_UP + 1]
    assert traced.timeline.events[0][0].start_seconds == 0 and len(traced.timeline.events[0]) == 8
    assert traced.timeline.seconds == pytest.approx(14.0)  # from the first of them to the end of the second
    per_minibatch = traced.per_minibatch()[0]
    assert per_minibatch["forward_seconds"] == pytest.approx(1.0)
    assert per_minibatch["seconds"] == pytest.approx(13.5)


def test_a_trace_of_few_minibatches_has_the_warm_up_too():
    metrics = Metrics()
    assert metrics.traced(worker()) is None
    for i in range(WARM_UP):
        metrics.keep(minibatch(10.0 * i), 4.0, full=True)
    assert metrics.traced(worker()).ranks[0].num_minibatches == WARM_UP


def test_a_trace_has_all_that_is_kept_once_the_warm_up_is_forgotten():
    metrics = Metrics()
    for i in range(KEPT + 1):
        metrics.keep(minibatch(10.0 * i), 4.0, full=True)
    assert metrics.traced(worker()).ranks[0].num_minibatches == KEPT + 1 - WARM_UP
    for i in range(KEPT):
        metrics.keep(minibatch(1000.0 + 10.0 * i), 4.0, full=True)
    assert metrics.traced(worker()).ranks[0].num_minibatches == KEPT


def test_an_update_of_two_minibatches_is_half_as_busy_for_each():
    metrics = Metrics()
    metrics.keep(minibatch(0.0), 4.0, full=True, num_minibatches=2)
    metrics.keep(minibatch(10.0), 4.0, full=True, num_minibatches=0)  # a stream's rest
    metrics.note(epoch=0, loss=1.0, num_samples=8, seconds=3.0, full=True)
    assert metrics.summary(worker())["bubble_fraction"] == pytest.approx(0.5)  # 1.5 s of 3
    assert metrics.traced(worker()).ranks[0].num_minibatches == 2


def test_the_timeline_of_a_stream_is_what_all_ranks_took_notes_of():
    metrics = Metrics()
    for i in range(3):
        metrics.keep(minibatch(10.0 * i), 10.0, full=True)
    two = worker()
    two.plan = Plan((StageSpec(0, 1), StageSpec(1, 2)), "pipedream", num_microbatches=1)
    two.control = SimpleNamespace(gather=lambda mine: [mine, mine[1:]])
    timeline = metrics.timeline(two)
    assert [len(events) for events in timeline.events.values()] == [8, 8]
    assert timeline.events[0][0].start_seconds == 0 and timeline.seconds == pytest.approx(14.0)
    two.control = SimpleNamespace(gather=lambda mine: [mine, mine[:2]])
    assert metrics.timeline(two).seconds == pytest.approx(14.0)
    two.control = SimpleNamespace(gather=lambda mine: [mine, []])
    assert metrics.timeline(two) is None and metrics.traced(two) is None
    two.control = SimpleNamespace(gather=lambda mine: None)  # another rank than 0
    assert metrics.timeline(two) is None and metrics.traced(two) is None and metrics.summary(two) is None


def test_what_no_instruction_took_is_other_and_never_negative():
    spent = asdict(Spent(1.0, 2.0, *[0.0] * 6))
    assert RankTime(1, [4.0], [spent]).per_minibatch()["other_seconds"] == 1.0
    assert RankTime(1, [2.5], [spent]).per_minibatch()["other_seconds"] == 0.0


def test_one_long_minibatch_does_not_count():
    """A new shape was recorded in it, for 12.7 s: the means of all minibatches were those of this one."""
    spent = [asdict(Spent(1.0, 2.0 + i, *[0.0] * 6)) for i in (0, 1, 0, 12.7, 0, 1, 0, 1, 0)]
    parts = RankTime(9, [0.5 + each["backward_seconds"] + 1 for each in spent], spent).per_minibatch()
    seconds = parts.pop("seconds")
    assert seconds == 3.5 and sum(parts.values()) == pytest.approx(seconds)
    assert 2.0 < parts["backward_seconds"] < 2.5


def test_a_run_that_goes_on_adds_to_the_past():
    metrics = Metrics()
    assert metrics.past() == Past()
    metrics.note(epoch=0, loss=5.0, num_samples=8, seconds=1.0, full=True)
    metrics.note(epoch=0, loss=4.0, num_samples=3, seconds=1.0, full=False)
    metrics.end_epoch({"seconds": 2.0, "validation": {"accuracy": 0.25}})
    metrics.end_epoch({"seconds": 3.0})
    assert not metrics.has_reached_target
    metrics.reach_target(epochs=2)
    past = Past(2, 5.0, 4.0, 8, 5.0, {"accuracy": 0.25}, (2, 5.0))
    assert metrics.past() == past
    again = Metrics()
    again.note(epoch=7, loss=9.0, num_samples=99, seconds=1.0, full=True)  # forgotten
    again.continue_from(past)
    assert again.past() == past and again.has_reached_target
    assert again.note(epoch=1, loss=3.0, num_samples=8, seconds=1.0, full=True).step == 2
    assert again.past() == Past(3, 5.0, 3.0, 8, 5.0, {"accuracy": 0.25}, (2, 5.0))
