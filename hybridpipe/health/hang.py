"""Hang: what a watchdog knows of a job that stands still, and whose fault it is. Pure; knows no MPI.

Ranks that wait are victims. The cause is who is waited for, and for nobody else: a rank that gives no answer
because it is stopped or lost, or one that is busy with something that does not end. Who waits for a
checkpoint is no victim while any rank's disk still takes something of it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hybridpipe.comm.status import CHECKPOINT, OUTSIDE

# For a rank that others wait for while it is in no method.
COLLECTIVE = "methods of Trainer are collective: every rank has to call them, in the same order"


@dataclass(frozen=True)
class State:
    """What one rank is doing, in its own words.

    Args:
        position: instruction, step and stage.
        wait: what it waits for, and `peers` who with; empty while it computes.
        stacks: of its threads.
        saving: what its saving thread does, if it does not wait; `still_seconds`: for how long its disk has
            taken nothing.
    """

    position: str
    seconds: float
    wait: str = ""
    peers: tuple[int, ...] = ()
    stacks: str = ""
    saving: str = ""
    still_seconds: float = math.inf

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> "State":
        fields = json.loads(data)
        return State(**{**fields, "peers": tuple(fields["peers"])})

    def __str__(self) -> str:
        waits = f"; waits for: {self.wait}" if self.wait else "; waits for nobody"
        saves = f"; in the background it {self.saving}" if self.saving else ""
        return f"{self.position}{waits} (for {self.seconds:.0f} s){saves}"


def awaited(states: Mapping[int, State | None], start: int) -> list[int]:
    """The ranks that `start` waits for, and those that they wait for, nearest first."""
    found, todo = [start], [start]
    while todo:
        state = states.get(todo.pop(0))
        for peer in () if state is None else state.peers:
            if peer not in found:
                found.append(peer)
                todo.append(peer)
    return found


def cause(states: Mapping[int, State | None], reporter: int) -> tuple[list[int], str]:
    """The ranks because of which `reporter` waits, and what is wrong with them.

    Args:
        states: None: no answer.
    """
    ranks = awaited(states, reporter)
    silent = [rank for rank in ranks if states.get(rank) is None]
    if silent:
        return silent, "gives no answer"
    saving = [rank for rank in ranks if _state(states, rank).saving]
    if saving and _for_checkpoint(states, ranks):
        first = _state(states, saving[0])
        return saving, f"{first.saving}, and its disk has taken nothing for {first.still_seconds:.0f} s"
    busy = [rank for rank in ranks if not _state(states, rank).wait]
    if busy:
        first = _state(states, busy[0])
        hint = f"; {COLLECTIVE}" if first.position.startswith(OUTSIDE) else ""
        return busy, f"is alive and waits for nobody: {first}{hint}"
    missing = sorted(rank for rank, state in states.items() if state is None)
    if missing:
        return missing, "gives no answer"
    return sorted(ranks), "wait for each other"


def seconds_since_saving_moved(states: Mapping[int, State | None], reporter: int) -> float | None:
    """If `reporter` waits for a checkpoint in the end: for how long nothing more of it was written, anywhere.

    None: it waits for something else, or a rank gives no answer.
    """
    ranks = awaited(states, reporter)
    if any(state is None for state in states.values()) or not _for_checkpoint(states, ranks):
        return None
    return min(state.still_seconds for state in states.values() if state is not None)


def describe(states: Mapping[int, State | None], hosts: Mapping[int, str]) -> Iterator[str]:
    """A line for each rank."""
    for rank, state in sorted(states.items()):
        yield f"hybridpipe:   rank {rank} on host {hosts[rank]}: {state or 'no answer'}"


def _for_checkpoint(states: Mapping[int, State | None], ranks: list[int]) -> bool:
    return any(_state(states, rank).wait.startswith(CHECKPOINT) for rank in ranks)


def _state(states: Mapping[int, State | None], rank: int) -> State:
    state = states[rank]
    assert state is not None
    return state
