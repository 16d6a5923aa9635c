"""Metrics: measurements of a run, for metrics.jsonl, summary.json and trace.json.

Each rank records its own; `summary`, `timeline` and `traced` gather the records on rank 0.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from hybridpipe.device import peak_memory_bytes
from hybridpipe.engine.traffic import Traffic, traffic
from hybridpipe.engine.worker import Worker
from hybridpipe.environment.memory_limits import RankMemory
from hybridpipe.optim.update import Made
from hybridpipe.planning.timeline import COMPUTE, EventTime, TimedEvent, Timeline, shifted, spent_in, typical
from hybridpipe.report.memory import predicted_bytes

# The first minibatches exchange shapes and warm up caches. They count for losses, not for speeds.
WARM_UP = 3
_NOT_MADE = Made()
KEPT = 64  # updates whose events are kept


@dataclass(frozen=True, slots=True)
class MinibatchRecord:
    """One minibatch on one rank; rank 0's are the lines of metrics.jsonl.

    Args:
        step: minibatches trained on before it.
        epoch: complete epochs.
        loss: the minibatch's loss.
        num_samples: its samples.
        seconds: time on this rank since the minibatch before.
        learning_rate: in this rank's first parameter group; None without one.
        gradient_norm: norm of the whole model's gradient before clipping; None without `clip_grad_norm`, or
            where the update was skipped.
    """

    step: int
    epoch: int
    loss: float
    num_samples: int
    seconds: float
    learning_rate: float | None = None
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class RankTime:
    """A rank's time in its last full minibatches, by its own clock.

    Args:
        num_minibatches: number of these minibatches.
        seconds: of each update, for each of its minibatches: from the end of the update before to its own.
        spent: of each update: the part of its time in instructions of the program.
    """

    num_minibatches: int
    seconds: Sequence[float]
    spent: Sequence[dict[str, float]]

    def per_minibatch(self) -> dict[str, float]:
        """Median seconds of a minibatch, and of its parts, which add up to them.

        The parts have the shares that they have in the middle half of the minibatches, by length. What is
        outside of instructions is other: losses, records and the loop around the program.
        """
        whole, count = statistics.median(self.seconds), len(self.seconds)
        middle = sorted(range(count), key=self.seconds.__getitem__)[count // 4 : count - count // 4]
        scale = whole / sum(self.seconds[i] for i in middle)
        parts = {name: scale * sum(self.spent[i][name] for i in middle) for name in self.spent[0]}
        return {"seconds": whole, **parts, "other_seconds": max(0.0, whole - sum(parts.values()))}


@dataclass(frozen=True, slots=True)
class Past:
    """Figures of the runs before a checkpoint, for the summary of a resumed run.

    Args:
        minibatches: minibatches trained on.
        loss_first: loss of the first one.
        loss_last: loss of the last one.
        most_samples: samples of the largest one.
        training_seconds: training time of complete epochs.
        metrics: results of the last validation.
        target: epochs and seconds until the target was reached; None if it was not.
    """

    minibatches: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    most_samples: int = 0
    training_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    target: tuple[int, float] | None = None


class Traced(NamedTuple):
    """The last full minibatches of a run after the warm-up, and each used rank's time in them."""

    timeline: Timeline
    ranks: dict[int, RankTime]

    def per_minibatch(self) -> dict[int, dict[str, float]]:
        """Median seconds of a minibatch, by rank and part."""
        return {rank: time.per_minibatch() for rank, time in self.ranks.items()}


class _TimedUpdate(NamedTuple):
    """One update of this rank."""

    events: list[TimedEvent]
    seconds: float
    num_minibatches: int


class Metrics:
    """Records of one rank."""

    def __init__(self) -> None:
        self.records: list[MinibatchRecord] = []
        self._full_seconds: list[float] = []
        self._busy_seconds: list[float] = []
        self._kept: deque[_TimedUpdate] = deque(maxlen=KEPT)  # for timelines
        self.validation: dict[str, float] = {}
        self._memory = RankMemory(0)
        self._start_peak = 0
        self.training_seconds = 0.0  # of complete epochs, without evaluation
        self._target: tuple[int, float] | None = None
        self._before = Past()

    def continue_from(self, past: Past) -> None:
        """Continue earlier runs; records of this run so far are dropped."""
        self._before, self.records = past, []
        self.validation, self._target = past.metrics, past.target
        self.training_seconds = past.training_seconds

    def past(self) -> Past:
        """Figures until now, for a run that resumes here."""
        first, last = self._before.loss_first, self._before.loss_last
        if self.records:
            first, last = self.records[0].loss if first is None else first, self.records[-1].loss
        return Past(
            self._before.minibatches + len(self.records),
            first,
            last,
            max([self._before.most_samples, *(record.num_samples for record in self.records)]),
            self.training_seconds,
            self.validation,
            self._target,
        )

    def end_epoch(self, entry: dict[str, Any]) -> None:
        """Take validation and time from an epoch's entry of the history."""
        self.validation = entry.get("validation", self.validation)
        self.training_seconds += entry["seconds"]

    def begin(self, memory: RankMemory) -> None:
        """Record the rank's memory before training, which belongs to no stage, and its limit."""
        self._memory = memory

    def end_start(self, device: torch.device) -> None:
        """Record the peak until now: of imports, measuring, and making or loading the weights."""
        self._start_peak = peak_memory_bytes(device)

    def keep(self, events: list[TimedEvent], seconds: float, full: bool, num_minibatches: int = 1) -> None:
        """Record an update's events and the seconds since the last update; short minibatches are left out."""
        if full and num_minibatches:
            self._kept.append(_TimedUpdate(events, seconds, num_minibatches))
            busy = sum(end - start for instruction, start, end in events if isinstance(instruction, COMPUTE))
            self._busy_seconds.append(busy / num_minibatches)

    def note(
        self, epoch: int, loss: float, num_samples: int, seconds: float, full: bool, made: Made = _NOT_MADE
    ) -> MinibatchRecord:
        """Record a finished minibatch, and return its record.

        Args:
            seconds: time on this rank since the minibatch before.
            full: False for a short minibatch, which does not count for the speed.
            made: figures of its update.
        """
        step = self._before.minibatches + len(self.records)
        record = MinibatchRecord(step, epoch, loss, num_samples, seconds, *made)
        self.records.append(record)
        if full:
            self._full_seconds.append(seconds)
        return record

    @property
    def has_reached_target(self) -> bool:
        """True if a `fit` of this run or an earlier one has reached its target."""
        return self._target is not None

    def reach_target(self, epochs: int) -> None:
        """Record that the target was reached after `epochs` epochs."""
        self._target = epochs, self.training_seconds

    def summary(self, worker: Worker) -> dict[str, Any] | None:
        """Figures of summary.json (docs/reference/files.md) on rank 0, None elsewhere. Collective.

        Bytes are sums over all ranks; of several groups, which are alike, all other figures are those of the
        first one. `memory_before_bytes` holds Python, libraries and the whole model, of
        which `predicted_memory_bytes` contains the stage's weights only. `minibatch_seconds_median` is the
        longest of all ranks, because an early stage does not wait for the others at an epoch's end.
        `seconds_to_target` contains loading and `on_minibatch`, but no start-up, measuring or evaluation.
        `updates_left_out` is the largest number of any stage.
        """
        busy = self._busy_seconds[WARM_UP:] or self._busy_seconds
        full = self._full_seconds[WARM_UP:] or self._full_seconds
        notes = worker.control.gather(
            {
                "busy": statistics.median(busy) if busy else 0.0,
                "full": statistics.median(full) if full else 0.0,
                "memory": peak_memory_bytes(worker.device),
                "start": self._start_peak,
                "before": self._memory.held_bytes,
                "limit": self._memory.limit_bytes,
                "origin": self._memory.origin,
                "traffic": traffic(worker.executor),
                "left_out": worker.executor.num_skipped,
            }
        )
        if notes is None:
            return None
        seconds = max(notes[rank]["full"] for rank in worker.plan.ranks)
        past = self.past()
        used = [notes[rank]["busy"] for rank in worker.plan.ranks]
        predicted, groups = worker.plan.predicted, worker.group.options.count
        moved = Traffic(
            *(groups * sum(kind) for kind in zip(*(note["traffic"] for note in notes), strict=True))
        )
        return {
            "plan": worker.plan.name,
            "schedule": worker.plan.schedule,
            "ranks": worker.group.everyone.size,
            "ranks_used": worker.plan.num_ranks * groups,
            "groups": groups,
            "samples_per_second": past.most_samples / seconds if seconds else 0.0,
            "minibatch_seconds_median": seconds,
            "predicted_minibatch_seconds": predicted and predicted.minibatch_seconds,
            "bubble_fraction": 1 - statistics.mean(used) / seconds if seconds else 0.0,
            "loss_first": past.loss_first,
            "loss_last": past.loss_last,
            "metrics": self.validation,
            "epochs_to_target": self._target and self._target[0],
            "seconds_to_target": self._target and self._target[1],
            "peak_memory_bytes": [note["memory"] for note in notes],
            "start_peak_memory_bytes": [note["start"] for note in notes],
            "memory_before_bytes": [note["before"] for note in notes],
            "memory_limit_bytes": [note["limit"] for note in notes],
            "memory_limit_origin": [note["origin"] for note in notes],
            "predicted_memory_bytes": predicted
            and [predicted_bytes(worker.plan, rank) for rank in range(worker.control.size)],
            "bytes_sent_p2p": moved.sent,
            "bytes_allreduced": moved.reduced,
            "bytes_gathered": moved.gathered,
            "bytes_between_groups": moved.between_groups,
            "updates_left_out": max(note["left_out"] for note in notes),
            "minibatches": past.minibatches,
        }

    def timeline(self, worker: Worker) -> Timeline | None:
        """Timeline of a typical full minibatch on rank 0; None elsewhere, or without one. Collective.

        Under asynchronous schedules it is the last time span that all ranks have recorded. Ranks are aligned
        by the wall clock: exactly on one host, within the accuracy of NTP between hosts.
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
        first = min(1, count - 1)  # a training's first update waits for an agreement, which looks like work
        return typical([{rank: used[rank][i] for rank in sorted(used)} for i in range(first, count)])

    def traced(self, worker: Worker) -> Traced | None:
        """Timeline of the last full minibatches and each rank's time in them. Collective.

        None on other ranks than 0, and without such minibatches.
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
        timeline = Timeline({rank: tuple(shifted(of_rank, begin)) for rank, of_rank in events.items()})
        spent = timeline.spent_by_event(worker.plan)
        return Traced(timeline, {rank: _rank_time(updates, spent[rank]) for rank, updates in kept.items()})


def _rank_time(updates: Sequence[_TimedUpdate], spent: Iterable[EventTime]) -> RankTime:
    events = iter(spent)
    return RankTime(
        sum(each.num_minibatches for each in updates),
        [each.seconds / each.num_minibatches for each in updates],
        [
            {
                name: seconds / each.num_minibatches
                for name, seconds in asdict(spent_in(islice(events, len(each.events)))).items()
            }
            for each in updates
        ],
    )


def _in_common(events: dict[int, list[TimedEvent]]) -> Timeline | None:
    """Return the timeline of the span that every rank has recorded; None without one."""
    if not all(events.values()):
        return None
    begin = max(rank_events[0].start_seconds for rank_events in events.values())
    end = min(rank_events[-1].end_seconds for rank_events in events.values())
    return Timeline(
        {
            rank: tuple(shifted([e for e in events[rank] if begin <= e[1] and e[2] <= end], begin))
            for rank in sorted(events)
        }
    )


def _since_all(kept: dict[int, list[_TimedUpdate]]) -> dict[int, list[_TimedUpdate]]:
    """Return the updates that began after the first record of every rank.

    Updates of a replicated stage have several minibatches each, so that its records begin earlier: the cause
    of a wait in that time is unknown.
    """
    begin = max(updates[0].events[0].start_seconds for updates in kept.values())
    return {
        rank: [each for each in updates if each.events[0].start_seconds >= begin]
        for rank, updates in kept.items()
    }


def _on_wall_clock(events: list[TimedEvent]) -> list[TimedEvent]:
    return [*shifted(events, time.perf_counter() - time.time())]
