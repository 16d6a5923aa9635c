"""Timeline: what every rank did, and when. The simulator predicts one, the executor measures one.

Lives here: the data, its figures, its export. A timeline does not know whether it is a prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridpipe.planning.instructions import AllReduce, Backward, Forward, Instruction, Step

COMPUTE = (Forward, Backward, Step)
TRACE_FORMAT = "hybridpipe-trace/1"  # of files with Chrome traces; Perfetto passes over the field


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction on one rank. A receive lasts as long as the rank waited for it."""

    instruction: Instruction
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one minibatch for each rank, in order; time 0 is the minibatch's start."""

    events: Mapping[int, tuple[Event, ...]]

    @property
    def seconds(self) -> float:
        """From the start until the last rank is done."""
        return max((event.end_seconds for events in self.events.values() for event in events), default=0.0)

    def busy_seconds(self, rank: int) -> float:
        """Time that the rank spent computing: forwards, backwards, updates."""
        return sum(event.seconds for event in self.events[rank] if isinstance(event.instruction, COMPUTE))

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time, in [0, 1]; waiting for messages and all-reduce is idle too.

        With p equal stages, m microbatches and free communication, GPipe and 1F1B both give
        (p - 1) / (m + p - 1) (GPipe, Huang et al. 2019, section 2.3).
        """
        available = self.seconds * len(self.events)
        return 1.0 - sum(map(self.busy_seconds, self.events)) / available if available else 0.0

    def to_chrome_trace(self, name: str, process: int = 0) -> list[dict[str, Any]]:
        """Events of the Trace Event Format, which Perfetto opens: a process `name`, a thread a rank."""
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


def kind(instruction: Instruction) -> str:
    """What an instruction's time is spent on: forward, backward, step, all-reduce or message."""
    match instruction:
        case Forward():
            return "forward"
        case Backward():
            return "backward"
        case Step():
            return "step"
        case AllReduce():
            return "all-reduce"
        case _:
            return "message"
