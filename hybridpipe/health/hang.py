"""Hang: the activity of all ranks of a job that makes no progress, and the rank that causes it.

Not known here: MPI and processes. Invariant: a rank that waits for others is no cause, unless all wait; ranks
that wait for a checkpoint do not hang while any rank's disk still accepts data.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hybridpipe.comm.status import CHECKPOINT, MEETING, OUTSIDE

# A hint for a rank that others wait for while it is in no method.
COLLECTIVE = "methods of Trainer are collective: every rank has to call them, in the same order"


@dataclass(frozen=True)
class RankActivity:
    """Activity of one rank, as it answers.

    Args:
        position: instruction, step and stage.
        seconds: since the rank last made progress.
        wait: operation that it waits in; empty while it computes.
        peers: ranks that take part in that operation.
        stacks: of its threads.
        saving: activity of its saving thread, a verb; empty if that thread waits.
        still_seconds: seconds since its disk last accepted data of a checkpoint.
    """

    position: str
    seconds: float
    wait: str = ""
    peers: tuple[int, ...] = ()
    stacks: str = ""
    saving: str = ""
    still_seconds: float = math.inf

    def encode(self) -> bytes:
        """Return the activity as JSON, for a message."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> "RankActivity":
        """Return the activity that `encode` wrote."""
        fields = json.loads(data)
        return RankActivity(**{**fields, "peers": tuple(fields["peers"])})

    def __str__(self) -> str:
        waits = f"; waits for: {self.wait}" if self.wait else "; waits for no other rank"
        saves = f"; in the background it {self.saving}" if self.saving else ""
        return f"{self.position}{waits} (for {self.seconds:.0f} s){saves}"


def awaited(activities: Mapping[int, RankActivity | None], start: int) -> list[int]:
    """Return `start`, the ranks that it waits for, and those that they wait for in turn, nearest first."""
    found, todo = [start], [start]
    while todo:
        activity = activities.get(todo.pop(0))
        for peer in () if activity is None else activity.peers:
            if peer not in found:
                found.append(peer)
                todo.append(peer)
    return found


def cause(activities: Mapping[int, RankActivity | None], reporter: int) -> tuple[list[int], str]:
    """Return the ranks that make `reporter` wait, and a verb phrase that says what is wrong with them.

    A rank that does not answer, being stopped or lost, comes first; then one whose checkpoint does not
    advance; then one that is busy with something that does not end.

    Args:
        activities: of each rank; None: it did not answer.
    """
    ranks = awaited(activities, reporter)
    silent = [rank for rank in ranks if activities.get(rank) is None]
    if silent:
        return silent, "gives no answer"
    saving = [rank for rank in ranks if _activity(activities, rank).saving]
    if saving and _for_checkpoint(activities, ranks):
        first = _activity(activities, saving[0])
        return saving, f"{first.saving}, and its disk has accepted no data for {first.still_seconds:.0f} s"
    busy = [rank for rank in ranks if not _activity(activities, rank).wait]
    if busy:
        first = _activity(activities, busy[0])
        hint = f"; {COLLECTIVE}" if first.position.startswith(OUTSIDE) else ""
        return busy, f"is alive and waits for no other rank: {first}{hint}"
    missing = sorted(rank for rank, activity in activities.items() if activity is None)
    if missing:
        return missing, "gives no answer"
    return sorted(ranks), "wait for each other"


def seconds_since_saving_moved(activities: Mapping[int, RankActivity | None], reporter: int) -> float | None:
    """Return the seconds since any rank's disk last accepted data, if `reporter` waits for a checkpoint.

    None: it waits for something else, or a rank did not answer.
    """
    ranks = awaited(activities, reporter)
    if any(activity is None for activity in activities.values()) or not _for_checkpoint(activities, ranks):
        return None
    return min(activity.still_seconds for activity in activities.values() if activity is not None)


def meets_other_jobs(activities: Mapping[int, RankActivity | None], timeout_seconds: float) -> bool:
    """Return True if a rank waits for groups that are other jobs, which may take any time.

    False if a rank here does not answer, or is in one instruction for too long: then that is the cause.
    """
    answers = [activity for activity in activities.values() if activity is not None]
    are_well = all(each.wait or each.seconds < timeout_seconds for each in answers)
    meet = any(each.wait.startswith(MEETING) for each in answers)
    return meet and are_well and len(answers) == len(activities)


def describe(activities: Mapping[int, RankActivity | None], hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield a line of the report for each rank."""
    for rank, activity in sorted(activities.items()):
        yield f"hybridpipe:   rank {rank} on host {hosts[rank]}: {activity or 'no answer'}"


def _for_checkpoint(activities: Mapping[int, RankActivity | None], ranks: list[int]) -> bool:
    return any(_activity(activities, rank).wait.startswith(CHECKPOINT) for rank in ranks)


def _activity(activities: Mapping[int, RankActivity | None], rank: int) -> RankActivity:
    activity = activities[rank]
    assert activity is not None
    return activity
