"""Timeline: the events of every rank, with their times. The simulator predicts one, the executor measures
one.

The data, its figures and its export. Not known here: the origin of a timeline.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, NamedTuple

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.instructions import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    JoinBackward,
    JoinForward,
    Load,
    Products,
    ReceiveActivation,
    ReceiveGradient,
    ReduceScatter,
    Reduction,
    SendActivation,
    SendGradient,
    Step,
    parse,
)

COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight, JoinForward, JoinBackward, Products, Step)
BACKWARDS = ("backward", "backward-input", "backward-weight", "products")  # whole, and its parts
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")
TRACE_FORMAT = "hybridpipe-trace/1"  # of files with Chrome traces; Perfetto ignores the field


class TimedEvent(NamedTuple):
    """One instruction on one rank. A receive lasts as long as the rank waited for it."""

    instruction: Instruction | Load | Products
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """The duration of the event."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of one rank's events by activity, in seconds.

    Args:
        allreduce_seconds: waiting for the sum of the gradients, or for updated weights, once every replica
            waits for it.
        message_seconds: waiting for messages that are being sent.
        copying_seconds: writing messages and starting to send them.
        loading_seconds: taking microbatches from the data set to the device.
        idle_seconds: waiting for messages whose send has not started, or for late replicas.
    """

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    allreduce_seconds: float
    message_seconds: float
    copying_seconds: float
    loading_seconds: float
    idle_seconds: float

    @property
    def compute_seconds(self) -> float:
        """Forwards, backwards and updates."""
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds

    @property
    def seconds(self) -> float:
        """The sum: the length of the rank's events."""
        return float(sum(astuple(self)))


class EventTime(NamedTuple):
    """The time of an event: seconds of a field of `Spent`, and those that it idled before."""

    field: str
    seconds: float
    idle_seconds: float


def spent_in(events: Iterable[EventTime]) -> Spent:
    """Return the time of a rank's events by activity."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for each in events:
        seconds[each.field] += each.seconds
        seconds["idle_seconds"] += each.idle_seconds
    return Spent(**{field.name: seconds[field.name] for field in fields(Spent)})


@dataclass(frozen=True, slots=True)
class TimeParts:
    """The ranks' time by activity: seconds of one minibatch, the mean over ranks.

    Args:
        traffic_seconds: sending, and waiting for messages that are being sent.
        allreduce_seconds: waiting for the sum of the gradients, or for updated weights, once every replica
            waits for it.
        idle_seconds: the rest: bubbles, and time between the events of a measured timeline.
    """

    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    traffic_seconds: float
    allreduce_seconds: float
    idle_seconds: float

    @property
    def compute_seconds(self) -> float:
        """Forwards, backwards and updates."""
        return self.forward_seconds + self.backward_seconds + self.step_seconds

    @property
    def seconds(self) -> float:
        """The sum: the timeline's length."""
        return float(sum(astuple(self)))


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one minibatch for each rank, in order; time 0 is the minibatch's start.

    That of an asynchronous schedule, and that of a traced run, hold several minibatches from the first
    forward on.
    """

    events: Mapping[int, tuple[TimedEvent, ...]]

    @property
    def seconds(self) -> float:
        """The time from the start until the last rank is done."""
        return max((events[-1].end_seconds for events in self.events.values() if events), default=0.0)

    def busy_seconds(self, rank: int, begin: float = 0.0, end: float = math.inf) -> float:
        """Return the seconds between `begin` and `end` that the rank spends computing."""
        return sum(
            max(0.0, min(event.end_seconds, end) - max(event.start_seconds, begin))
            for event in self.events[rank]
            if type(event.instruction) in COMPUTE
        )

    @property
    def slowest_rank_seconds(self) -> float:
        """The longest time from the first computing to the end of a rank.

        Minibatches that follow each other take no longer each, if no rank waits for others in between.
        """
        computing = (
            (next((each for each in events if type(each.instruction) in COMPUTE), events[0]), events[-1])
            for events in self.events.values()
            if events
        )
        return max((last.end_seconds - first.start_seconds for first, last in computing), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time, in [0, 1]; waiting for messages and all-reduces counts as idle.

        With p equal stages, m microbatches and free communication, GPipe and 1F1B both give
        (p - 1) / (m + p - 1) (GPipe, Huang et al. 2019, section 2.3). With v stages on each of p ranks
        interleaved 1F1B idles (p - 1) / (m v) of its work (Narayanan et al., SC 2021, section 2.2.2).
        """
        available = self.seconds * len(self.events)
        return 1.0 - sum(map(self.busy_seconds, self.events)) / available if available else 0.0

    def parts(self, plan: Plan) -> TimeParts:
        """Return the time by activity; predicted and measured timelines are split by the same rule.

        The part of a receive before its send began is the sender's lateness, thus idle, and the rest is
        traffic. The part of a collective before the last replica came to it is idle. Time between events is
        idle. The ranks must be on one clock.
        """
        spent = self.spent(plan).values()
        num_ranks = len(self.events) or 1
        busy = TimeParts(
            forward_seconds=sum(each.forward_seconds for each in spent) / num_ranks,
            backward_seconds=sum(each.backward_seconds for each in spent) / num_ranks,
            step_seconds=sum(each.optimizer_seconds for each in spent) / num_ranks,
            traffic_seconds=sum(each.message_seconds + each.copying_seconds for each in spent) / num_ranks,
            allreduce_seconds=sum(each.allreduce_seconds for each in spent) / num_ranks,
            idle_seconds=0.0,
        )
        is_busy = math.isclose(busy.seconds, self.seconds)  # the difference is then rounding, perhaps below 0
        return busy if is_busy else replace(busy, idle_seconds=self.seconds - busy.seconds)

    def spent(self, plan: Plan) -> dict[int, Spent]:
        """Return the time of each rank's events, by the rule of `parts`."""
        return {rank: spent_in(events) for rank, events in self.spent_by_event(plan).items()}

    def spent_by_event(self, plan: Plan) -> dict[int, list[EventTime]]:
        """Return of each event of a rank what it was spent on, by the rule of `parts`."""
        sent, entered = self._sent(plan), self._entered(plan)
        found: dict[int, list[EventTime]] = {}
        for rank, stages in _holders(plan):
            times = found[rank] = []
            num_rounds = 0
            for instruction, start, end in self.events.get(rank, ()):
                ready = start
                if isinstance(instruction, ReceiveActivation | ReceiveGradient):
                    forward = isinstance(instruction, ReceiveActivation)
                    sender = stages[instruction.chunk] + (-1 if forward else 1)
                    starts = sent[sender, forward, instruction.microbatch]
                    if starts:  # of several minibatches, the last before the end
                        ready = starts[max(0, bisect_right(starts, end) - 1)]
                elif isinstance(instruction, Reduction | AllGather):
                    ready = entered[stages[0], num_rounds]
                    num_rounds += 1
                ready = min(max(start, ready), end)
                times.append(EventTime(_SPENT_ON[type(instruction)], end - ready, ready - start))
        return found

    def _sent(self, plan: Plan) -> defaultdict[tuple[int, bool, int], list[float]]:
        """Return the starts of sends, in order, by the sender's stage, direction and microbatch."""
        sent: defaultdict[tuple[int, bool, int], list[float]] = defaultdict(list)
        for rank, stages in _holders(plan):
            for instruction, start, _ in self.events.get(rank, ()):
                if isinstance(instruction, SendActivation | SendGradient):
                    forward = isinstance(instruction, SendActivation)
                    sent[stages[instruction.chunk], forward, instruction.microbatch].append(start)
        return sent

    def _entered(self, plan: Plan) -> dict[tuple[int, int], float]:
        """Return the start of the last replica's collective, by (first) stage and number."""
        entered: dict[tuple[int, int], float] = {}
        for rank, stages in _holders(plan):
            events = self.events.get(rank, ())
            starts = [event[1] for event in events if isinstance(event[0], Reduction | AllGather)]
            for i, start in enumerate(starts):
                entered[stages[0], i] = max(start, entered.get((stages[0], i), start))
        return entered

    def to_chrome_trace(self, name: str, process: int = 0) -> list[dict[str, Any]]:
        """Return events of the Trace Event Format: a process `name`, with one thread a rank."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        ]
        for rank, rank_events in self.events.items():
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": process,
                    "tid": rank,
                    "args": {"name": f"rank {rank}"},
                }
            )
            events += [
                {
                    "ph": "X",
                    "name": str(event.instruction),
                    "cat": kind(event.instruction),
                    "pid": process,
                    "tid": rank,
                    "ts": event.start_seconds * 1e6,  # the format wants microseconds
                    "dur": event.seconds * 1e6,
                }
                for event in rank_events
            ]
        return events


def typical(minibatches: Sequence[Mapping[int, Sequence[TimedEvent]]]) -> Timeline:
    """Return the minibatch of median length; time 0 is the first rank's beginning, earlier waits are cut."""
    found = [
        Timeline({rank: tuple(shifted(of_rank, begin)) for rank, of_rank in events.items()})
        for events, begin in zip(minibatches, map(_begin, minibatches), strict=True)
    ]
    return sorted(found, key=lambda each: each.seconds)[(len(found) - 1) // 2]


def _begin(events: Mapping[int, Sequence[TimedEvent]]) -> float:
    starts = (
        each.start_seconds
        for of_rank in events.values()
        for each in of_rank
        if isinstance(each.instruction, Forward | Load)
    )
    return min(starts, default=0.0)


def shifted(events: Iterable[TimedEvent], begin: float) -> Iterator[TimedEvent]:
    """Yield events with `begin` as time 0, without the time before it."""
    for each in events:
        start, end = max(each.start_seconds - begin, 0.0), max(each.end_seconds - begin, 0.0)
        yield TimedEvent(each.instruction, start, end)


def from_chrome_trace(events: Iterable[Mapping[str, Any]]) -> dict[str, Timeline]:
    """Return the timelines of events of `Timeline.to_chrome_trace`, by name.

    Raises:
        KeyError, TypeError, ValueError: they are others.
    """
    names: dict[int, str] = {}
    ranks: defaultdict[int, defaultdict[int, list[TimedEvent]]] = defaultdict(lambda: defaultdict(list))
    for each in events:
        process, rank = each["pid"], each["tid"]
        if each["ph"] == "X":
            start = each["ts"] * 1e-6
            ranks[process][rank].append(TimedEvent(parse(each["name"]), start, start + each["dur"] * 1e-6))
        elif each["name"] == "process_name":
            names[process] = each["args"]["name"]
        else:
            ranks[process][rank] = []
    return {
        name: Timeline({rank: tuple(ranks[process][rank]) for rank in ranks[process]})
        for process, name in names.items()
    }


def _holders(plan: Plan) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each rank, and the stages that it holds, by chunk."""
    for group, stage in enumerate(plan.stages[: plan.num_groups]):
        for rank in stage.ranks:
            yield rank, plan.held_stages(Place(group, 0))


def kind(instruction: Instruction | Load | Products) -> str:
    """Return "forward", one of BACKWARDS, "step", one of COLLECTIVES, "load" or "message"."""
    return _KINDS.get(type(instruction), "message")


_KINDS: dict[type, str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward-input",
    BackwardWeight: "backward-weight",
    JoinForward: "forward",
    JoinBackward: "backward",
    Products: "products",
    Step: "step",
    AllReduce: "all-reduce",
    ReduceScatter: "reduce-scatter",
    AllGather: "all-gather",
    Load: "load",
}
# The field of Spent to which an instruction's time is added.
_SPENT_ON: dict[type, str] = {
    Forward: "forward_seconds",
    Backward: "backward_seconds",
    BackwardInput: "backward_seconds",
    BackwardWeight: "backward_seconds",
    JoinForward: "forward_seconds",
    JoinBackward: "backward_seconds",
    Products: "backward_seconds",
    Step: "optimizer_seconds",
    AllReduce: "allreduce_seconds",
    ReduceScatter: "allreduce_seconds",
    AllGather: "allreduce_seconds",
    ReceiveActivation: "message_seconds",
    ReceiveGradient: "message_seconds",
    SendActivation: "copying_seconds",
    SendGradient: "copying_seconds",
    Load: "loading_seconds",
}
