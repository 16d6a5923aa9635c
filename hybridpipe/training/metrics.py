"""Recorder: what a run measured about itself, gathered into summary.json and trace.json.

Each rank notes its own; `summary` and `timeline` bring the notes together on rank 0.
"""

import resource
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hybridpipe.device import peak_memory_bytes
from hybridpipe.engine.worker import Worker
from hybridpipe.planning.schedules.instructions import Forward, Load
from hybridpipe.planning.timeline import COMPUTE, Event, Spent, Timeline

# The first minibatches negotiate shapes and warm caches up; they are in the losses, not in the speeds.
WARM_UP = 3
KEPT = 64  # updates whose events are kept


@dataclass(frozen=True, slots=True)
class MinibatchRecord:
    """One minibatch as rank 0 saw it; a line of metrics.jsonl."""

    step: int
    epoch: int
    loss: float
    num_samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankTime:
    """A rank's time in its last full minibatches, by its own clock.

    Args:
        seconds: from the end of the update before the first of them to the end of the last.
        spent: of that, what its program's instructions took.
    """

    num_minibatches: int
    seconds: float
    spent: Spent

    @property
    def other_seconds(self) -> float:
        """What no instruction took: losses, notes and the loop around the program."""
        return max(0.0, self.seconds - self.spent.seconds)

    def per_minibatch(self) -> dict[str, float]:
        """Seconds of a minibatch, on average, by part; the parts add up to `seconds`."""
        parts = {"seconds": self.seconds, **asdict(self.spent), "other_seconds": self.other_seconds}
        return {name: seconds / self.num_minibatches for name, seconds in parts.items()}


@dataclass(frozen=True, slots=True)
class Past:
    """What the summary needs of the runs that this one goes on from.

    Args:
        minibatches, loss_first, loss_last, most_samples: of their records.
        training_seconds: of whole epochs.
        target: epochs and seconds that it took to reach the target.
    """

    minibatches: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    most_samples: int = 0
    training_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    target: tuple[int, float] | None = None


class Traced(NamedTuple):
    """The last full minibatches of a run, warm-up left out, and each used rank's time in them."""

    timeline: Timeline
    ranks: dict[int, RankTime]

    def per_minibatch(self) -> dict[int, dict[str, float]]:
        """Each rank's seconds of a minibatch, by part."""
        return {rank: time.per_minibatch() for rank, time in self.ranks.items()}


class _Kept(NamedTuple):
    """An update of this rank."""

    events: list[Event]
    seconds: float
    num_minibatches: int


class Recorder:
    """Notes of one rank."""

    def __init__(self) -> None:
        self.records: list[MinibatchRecord] = []
        self._full_seconds: list[float] = []
        self._busy_seconds: list[float] = []
        self._kept: deque[_Kept] = deque(maxlen=KEPT)  # for timelines
        self.metrics: dict[str, float] = {}
        self._memory_before = 0
        self.training_seconds = 0.0  # of whole epochs, until the last loss; not what evaluating takes
        self._target: tuple[int, float] | None = None
        self._before = Past()

    def go_on(self, past: Past) -> None:
        """This run goes on where those ended; what it has noted itself so far is forgotten."""
        self._before, self.records = past, []
        self.metrics, self.training_seconds, self._target = past.metrics, past.training_seconds, past.target

    def past(self) -> Past:
        """All that was noted until now, for a run that goes on from here."""
        first, last = self._before.loss_first, self._before.loss_last
        if self.records:
            first, last = self.records[0].loss if first is None else first, self.records[-1].loss
        return Past(
            self._before.minibatches + len(self.records),
            first,
            last,
            max([self._before.most_samples, *(record.num_samples for record in self.records)]),
            self.training_seconds,
            self.metrics,
            self._target,
        )

    def end_epoch(self, entry: dict[str, Any]) -> None:
        """Take an epoch's entry of the history into account."""
        self.metrics = entry.get("validation", self.metrics)
        self.training_seconds += entry["seconds"]

    def begin(self) -> None:
        """Training begins: what the process weighs so far is no stage's."""
        self._memory_before = _resident_bytes()

    def keep(self, events: list[Event], seconds: float, full: bool, num_minibatches: int = 1) -> None:
        """The events of an update and the time since the one before; short minibatches are not typical."""
        if full and num_minibatches:
            self._kept.append(_Kept(events, seconds, num_minibatches))
            busy = sum(end - start for instruction, start, end in events if isinstance(instruction, COMPUTE))
            self._busy_seconds.append(busy / num_minibatches)

    def note(self, epoch: int, loss: float, num_samples: int, seconds: float, full: bool) -> MinibatchRecord:
        """A finished minibatch; `seconds` on this rank, in an epoch since the end of the one before."""
        step = self._before.minibatches + len(self.records)
        record = MinibatchRecord(step, epoch, loss, num_samples, seconds)
        self.records.append(record)
        if full:
            self._full_seconds.append(seconds)
        return record

    @property
    def has_reached_target(self) -> bool:
        """Whether `fit` was told to stop at a target, and did, in this run or before."""
        return self._target is not None

    def reach_target(self, epochs: int) -> None:
        """The target was reached after so many epochs."""
        self._target = epochs, self.training_seconds

    def summary(self, worker: Worker) -> dict[str, Any] | None:
        """The figures of summary.json on rank 0, None elsewhere. Collective.

        `bytes_sent_p2p` and `bytes_allreduced` (gradients handed to the all-reduce) are sums over the ranks.
        `memory_before_bytes` is what each process held when training began: Python, libraries, the whole
        model; of all that `predicted_memory_bytes` (by rank of the plan) has the stage's weights only.
        `minibatch_seconds_median` is that of the rank where it is longest: a stage that is done early has a
        short first minibatch, and its wait for the others at an epoch's end is in none.
        `seconds_to_target` is the time of whole epochs by rank 0's clock: with loading, filling and draining
        the pipeline and what `on_minibatch` takes, without start-up, measuring and evaluation.
        `updates_left_out` is how many of this run's a stage has left out for numbers that were not finite,
        of the stage that left out most; under synchronous schedules all leave out the same.
        """
        busy = self._busy_seconds[WARM_UP:] or self._busy_seconds
        full = self._full_seconds[WARM_UP:] or self._full_seconds
        notes = worker.control.gather(
            {
                "busy": statistics.median(busy) if busy else 0.0,
                "full": statistics.median(full) if full else 0.0,
                "memory": peak_memory_bytes(worker.device),
                "before": self._memory_before,
                "p2p": worker.executor.bytes_sent,
                "allreduced": worker.executor.bytes_reduced,
                "left_out": worker.executor.num_skipped,
            }
        )
        if notes is None:
            return None
        seconds = max(notes[rank]["full"] for rank in worker.plan.ranks)
        past = self.past()
        used = [notes[rank]["busy"] for rank in worker.plan.ranks]
        predicted = worker.plan.predicted
        return {
            "plan": worker.plan.name,
            "schedule": worker.plan.schedule,
            "ranks": worker.control.size,
            "ranks_used": worker.plan.num_ranks,
            "samples_per_second": past.most_samples / seconds if seconds else 0.0,
            "minibatch_seconds_median": seconds,
            "predicted_minibatch_seconds": predicted and predicted.minibatch_seconds,
            "bubble_fraction": 1 - statistics.mean(used) / seconds if seconds else 0.0,
            "loss_first": past.loss_first,
            "loss_last": past.loss_last,
            "metrics": self.metrics,
            "epochs_to_target": self._target and self._target[0],
            "seconds_to_target": self._target and self._target[1],
            "peak_memory_bytes": [note["memory"] for note in notes],
            "memory_before_bytes": [note["before"] for note in notes],
            "predicted_memory_bytes": predicted and list(predicted.peak_memory_bytes),
            "bytes_sent_p2p": sum(note["p2p"] for note in notes),
            "bytes_allreduced": sum(note["allreduced"] for note in notes),
            "updates_left_out": max(note["left_out"] for note in notes),
            "minibatches": past.minibatches,
        }

    def timeline(self, worker: Worker) -> Timeline | None:
        """A typical full minibatch, all ranks on one clock, on rank 0; None elsewhere. Collective.

        Without a flush there is no such thing, and it is the last time that all ranks have notes of.

        Ranks are aligned by the wall clock: exactly on one host, as well as NTP does between hosts.
        """
        kept = worker.control.gather([_on_wall_clock(each.events) for each in self._kept])
        if kept is None:
            return None
        used = {rank: kept[rank] for rank in worker.plan.ranks}
        if worker.plan.is_asynchronous:
            return _in_common({rank: list(chain(*events)) for rank, events in used.items()})
        count = min(map(len, used.values()))
        if not count:
            return None
        typical = _median_index([_span([used[rank][i] for rank in used]) for i in range(count)])
        events = {rank: used[rank][typical] for rank in used}
        begin = _begin(list(events.values()))
        return Timeline({rank: tuple(_from(events[rank], begin)) for rank in sorted(events)})

    def traced(self, worker: Worker) -> Traced | None:
        """The last full minibatches after the warm-up, on rank 0; None elsewhere. Collective.

        None as well if there was none.
        """
        forgotten = len(self._busy_seconds) - len(self._kept)
        steady = list(self._kept)[max(0, WARM_UP - forgotten) :] or list(self._kept)
        gathered = worker.control.gather(
            [each._replace(events=_on_wall_clock(each.events)) for each in steady]
        )
        if gathered is None or not all(gathered[rank] for rank in worker.plan.ranks):
            return None
        kept = {rank: gathered[rank] for rank in sorted(worker.plan.ranks)}
        if worker.plan.is_asynchronous:
            kept = _since_all(kept)
            if not all(kept.values()):
                return None
        events = {rank: list(chain(*(each.events for each in updates))) for rank, updates in kept.items()}
        begin = min(rank_events[0].start_seconds for rank_events in events.values())
        timeline = Timeline({rank: tuple(_from(rank_events, begin)) for rank, rank_events in events.items()})
        spent = timeline.spent(worker.plan)
        times = {
            rank: RankTime(
                num_minibatches=sum(each.num_minibatches for each in updates),
                seconds=sum(each.seconds for each in updates),
                spent=spent[rank],
            )
            for rank, updates in kept.items()
        }
        return Traced(timeline, times)


def _in_common(events: dict[int, list[Event]]) -> Timeline | None:
    """What happened while every rank took notes."""
    if not all(events.values()):
        return None
    begin = max(rank_events[0].start_seconds for rank_events in events.values())
    end = min(rank_events[-1].end_seconds for rank_events in events.values())
    return Timeline(
        {
            rank: tuple(_from([e for e in events[rank] if begin <= e[1] and e[2] <= end], begin))
            for rank in sorted(events)
        }
    )


def _since_all(kept: dict[int, list[_Kept]]) -> dict[int, list[_Kept]]:
    """The updates that began when every rank took notes already.

    A replicated stage's are of several minibatches each, so as many of them reach further back: whom a rank
    waited for then, nobody could tell.
    """
    begin = max(updates[0].events[0].start_seconds for updates in kept.values())
    return {
        rank: [each for each in updates if each.events[0].start_seconds >= begin]
        for rank, updates in kept.items()
    }


def _on_wall_clock(events: list[Event]) -> list[Event]:
    return _shifted(events, time.time() - time.perf_counter())


def _shifted(events: list[Event], seconds: float) -> list[Event]:
    return [Event(e.instruction, e.start_seconds + seconds, e.end_seconds + seconds) for e in events]


def _from(events: list[Event], begin: float) -> list[Event]:
    """Time 0 is `begin`; what lies before it is cut off."""
    return [
        Event(e.instruction, max(e.start_seconds, 0.0), max(e.end_seconds, 0.0))
        for e in _shifted(events, -begin)
    ]


def _span(events: list[list[Event]]) -> float:
    return max(each.end_seconds for rank_events in events for each in rank_events) - _begin(events)


def _begin(events: list[list[Event]]) -> float:
    """When the first rank began to work; others wait since they were done with the minibatch before."""
    starts = (
        each.start_seconds
        for of_rank in events
        for each in of_rank
        if isinstance(each.instruction, Forward | Load)
    )
    return min(starts)


def _median_index(values: list[float]) -> int:
    return values.index(statistics.median_low(values))


def _resident_bytes() -> int:
    """Of this process now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
