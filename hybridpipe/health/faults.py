"""Faults: what HYBRIDPIPE_FAULT asks to go wrong, and where. No timing: a fault is tied to a named point.

    HYBRIDPIPE_FAULT="rank=1,step=3,mb=2,point=forward,kind=kill"     several are separated by ;

Code calls `at` at each point; without the variable that is one comparison. Standard library only: the points
of saving are passed by code that knows neither torch nor MPI. Invariant: a fault happens once, in one
attempt (HYBRIDPIPE_ATTEMPT, which the supervisor counts), so that what is restarted can get further.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpipe.environment import launched_rank
from hybridpipe.errors import UserError, shown, suggest

VARIABLE = "HYBRIDPIPE_FAULT"
ATTEMPT_VARIABLE = "HYBRIDPIPE_ATTEMPT"

SENDING = ("send-activation", "send-gradient")
COMPUTING = ("load", "forward", "backward")
SAVING = (
    "save-snapshot",
    "save-shard",
    "save-shard-written",
    "save-manifest",
    "save-rename",
    "save-latest",
    "save-prune",
)
POINTS = (
    *COMPUTING,
    *SENDING,
    "receive-activation",
    "receive-gradient",
    "all-reduce",
    "step",
    "evaluate",
    *SAVING,
)
# What the code at the point has to do itself, and the points that do it.
ACTED_ON = {"badsize": SENDING, "badtag": SENDING, "nan": ("forward", "receive-gradient", "step")}
ASKING = {"usr1": signal.SIGUSR1, "term": signal.SIGTERM}  # the rank to stop, twice
KINDS = ("raise", "exit", "thread", "kill", "stop", "segv", "delay", *ASKING, *ACTED_ON)

EXIT_CODE = 3
_NUMBERS = ("rank", "step", "mb", "attempt")
_KEYS = (*_NUMBERS, "point", "kind", "seconds")
_FOR_EVER = 3600.0  # a thread that waits for the end of its process


class InjectedFault(RuntimeError):
    """Somebody asked for it."""


@dataclass
class Fault:
    """One fault. `step` and `mb`: None is the first time that the rank passes the point.

    Args:
        step: minibatches trained on before this one, as in reports.
        seconds: of a delay.
    """

    point: str
    kind: str
    rank: int = 0
    step: int | None = None
    mb: int | None = None
    attempt: int = 0
    seconds: float = 1.0
    happened: bool = False

    def is_due(self, point: str, step: int | None, microbatch: int | None) -> bool:
        """At this point, now; on which rank is not asked here."""
        return (
            not self.happened
            and self.point == point
            and self.step in (None, step)
            and self.mb in (None, microbatch)
        )


def parse(text: str) -> list[Fault]:
    """Raises UserError in one line for what is not a list of faults."""
    return [_parse_one(part) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    fields: dict[str, Any] = {}
    for pair in text.split(","):
        key, _, value = (each.strip() for each in pair.partition("="))
        if key not in _KEYS:
            raise UserError(f"{VARIABLE}: unknown {shown(key)}{suggest(key, _KEYS)}")
        fields[key] = _value(key, value)
    for key, allowed in (("point", POINTS), ("kind", KINDS)):
        if key not in fields:
            raise UserError(f"{VARIABLE}: must say {key}=..., one of {', '.join(allowed)}; got {shown(text)}")
    fault = Fault(**fields)
    at = ACTED_ON.get(fault.kind, POINTS)
    if fault.point not in at:
        raise UserError(f"{VARIABLE}: kind={fault.kind} goes with point={'|'.join(at)}, got {fault.point}")
    return fault


def _value(key: str, value: str) -> Any:
    allowed = {"point": POINTS, "kind": KINDS}.get(key)
    if allowed is not None:
        if value not in allowed:
            raise UserError(
                f"{VARIABLE}: {key} must be one of {', '.join(allowed)}, got {shown(value)}"
                f"{suggest(value, allowed)}"
            )
        return value
    if key in _NUMBERS:
        if not value.isdecimal():
            raise UserError(f"{VARIABLE}: {key} must be an integer >= 0, got {shown(value)}")
        return int(value)
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < _FOR_EVER:
        raise UserError(f"{VARIABLE}: {key} must be a number in [0, {_FOR_EVER:g}), got {shown(value)}")
    return seconds


def from_environment(environment: Mapping[str, str] = os.environ) -> list[Fault]:
    """What this attempt has to go through."""
    text = environment.get(VARIABLE)
    if not text:
        return []
    attempt = environment.get(ATTEMPT_VARIABLE, "0")
    if not attempt.isdecimal():
        raise UserError(f"{ATTEMPT_VARIABLE}: must be an integer >= 0, got {shown(attempt)}")
    return [fault for fault in parse(text) if fault.attempt == int(attempt)]


_faults: Sequence[Fault] = from_environment()


def any_left() -> bool:
    """Whether it is worth to find out for `at` where the rank is."""
    return any(not fault.happened for fault in _faults)


def at(point: str, *, step: int | None = None, microbatch: int | None = None) -> str | None:
    """The rank is at `point` now. If a fault is due it happens.

    Returns:
        "badsize", "badtag" or "nan", for the caller to do; else None.

    Raises:
        InjectedFault: kind=raise.
        SystemExit: kind=exit.
    """
    if not _faults:
        return None
    for fault in _faults:
        if fault.is_due(point, step, microbatch) and fault.rank == _rank():
            fault.happened = True
            return _happen(fault, step, microbatch)
    return None


def _happen(fault: Fault, step: int | None, microbatch: int | None) -> str | None:
    what = f"injected {fault.kind} at {fault.point}, step {step}, microbatch {microbatch}"
    # the time is what tests measure from
    print(f"hybridpipe: rank {fault.rank}: {what}, time {time.time():.3f}", file=sys.stderr, flush=True)
    match fault.kind:
        case "raise":
            raise InjectedFault(what)
        case "exit":
            sys.exit(EXIT_CODE)
        case "thread":
            _fail_in_a_thread(what)
        case "kill":
            _signal_and_wait(signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segv":
            ctypes.string_at(0)
        case "usr1" | "term":
            for _ in range(2):  # a second signal changes nothing
                os.kill(os.getpid(), ASKING[fault.kind])
        case "delay":
            time.sleep(fault.seconds)
        case _:
            return fault.kind
    return None


def _fail_in_a_thread(what: str) -> None:
    """Another thread raises, and this one never comes back to see it."""

    def fail() -> None:
        raise InjectedFault(what)

    threading.Thread(target=fail, name="hybridpipe-fault").start()
    time.sleep(_FOR_EVER)


def _signal_and_wait(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(_FOR_EVER)


def _rank() -> int:
    """In the world, if MPI is there already; as the launcher tells it otherwise."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        rank: int = mpi.COMM_WORLD.rank
        return rank
    return launched_rank()
