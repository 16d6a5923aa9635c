"""Hang: the states of all ranks of a job that makes no progress, and the rank that causes it.

Not known here: MPI and processes. Invariant: a rank that waits for others is no cause, unless all wait; ranks
that wait for a checkpoint do not hang while any rank's disk still accepts data.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hybridpipe.comm.status import CHECKPOINT, OUTSIDE

# A hint for a rank that others wait for while it is in no method.
COLLECTIVE = "methods of Trainer are collective: every rank has to call them, in the same order"


@dataclass(frozen=True)
class State:
    """The state of one rank, as it answers.

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
        """Return the state as JSON, for a message."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> "State":
        """Return the state that `encode` wrote."""
        fields = json.loads(data)
        return State(**{**fields, "peers": tuple(fields["peers"])})

    def __str__(self) -> str:
        waits = f"; waits for: {self.wait}" if self.wait else "; waits for no other rank"
        saves = f"; in the background it {self.saving}" if self.saving else ""
        return f"{self.position}{waits} (for {self.seconds:.0f} s){saves}"


def awaited(states: Mapping[int, State | None], start: int) -> list[int]:
    """Return `start`, the ranks that it waits for, and those that they wait for in turn, nearest first."""
    found, todo = [start], [start]
    while todo:
        state = states.get(todo.pop(0))
        for peer in () if state is None else state.peers:
            if peer not in found:
                found.append(peer)
                todo.append(peer)
    return found


def cause(states: Mapping[int, State | None], reporter: int) -> tuple[list[int], str]:
    """Return the ranks that make `reporter` wait, and a verb phrase that says what is wrong with them.

    A rank that does not answer, being stopped or lost, comes first; then one whose checkpoint does not
    advance; then one that is busy with something that does not end.

    Args:
        states: of each rank; None: it did not answer.
    """
    ranks = awaited(states, reporter)
    silent = [rank for rank in ranks if states.get(rank) is None]
    if silent:
        return silent, "gives no answer"
    saving = [rank for rank in ranks if _state(states, rank).saving]
    if saving and _for_checkpoint(states, ranks):
        first = _state(states, saving[0])
        return saving, f"{first.saving}, and its disk has accepted no data for {first.still_seconds:.0f} s"
    busy = [rank for rank in ranks if not _state(states, rank).wait]
    if busy:
        first = _state(states, busy[0])
        hint = f"; {COLLECTIVE}" if first.position.startswith(OUTSIDE) else ""
        return busy, f"is alive and waits for no other rank: {first}{hint}"
    missing = sorted(rank for rank, state in states.items() if state is None)
    if missing:
        return missing, "gives no answer"
    return sorted(ranks), "wait for each other"


def seconds_since_saving_moved(states: Mapping[int, State | None], reporter: int) -> float | None:
    """Return the seconds since any rank's disk last accepted data, if `reporter` waits for a checkpoint.

    None: it waits for something else, or a rank did not answer.
    """
    ranks = awaited(states, reporter)
    if any(state is None for state in states.values()) or not _for_checkpoint(states, ranks):
        return None
    return min(state.still_seconds for state in states.values() if state is not None)


def describe(states: Mapping[int, State | None], hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield a line of the report for each rank."""
    for rank, state in sorted(states.items()):
        yield f"hybridpipe:   rank {rank} on host {hosts[rank]}: {state or 'no answer'}"


def _for_checkpoint(states: Mapping[int, State | None], ranks: list[int]) -> bool:
    return any(_state(states, rank).wait.startswith(CHECKPOINT) for rank in ranks)


def _state(states: Mapping[int, State | None], rank: int) -> State:
    state = states[rank]
    assert state is not None
    return state
