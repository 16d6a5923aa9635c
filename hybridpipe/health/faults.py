"""Faults that HYBRIDPIPE_FAULT injects at named points: "rank=1,step=3,mb=2,point=forward,kind=kill; ...".

Not known here: torch and MPI; code that passes a point calls `at`. Invariant: a fault happens once, in one
attempt (HYBRIDPIPE_ATTEMPT, which the supervisor counts), so that a restarted job can get past it.
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
    "all-gather",
    "step",
    "evaluate",
    *SAVING,
)
# Kinds that the code at the point carries out itself, with the points that do.
ACTED_ON = {"badsize": SENDING, "badtag": SENDING, "nan": ("forward", "receive-gradient", "step")}
ASKING = {"usr1": signal.SIGUSR1, "term": signal.SIGTERM}  # preempt the rank; each is sent twice
KINDS = ("raise", "exit", "thread", "kill", "stop", "segv", "delay", *ASKING, *ACTED_ON)

EXIT_CODE = 3
_NUMBERS = ("rank", "step", "mb", "attempt")
_KEYS = (*_NUMBERS, "point", "kind", "seconds")
_FOREVER = 3600.0  # for a thread that waits for the end of its process


class InjectedFault(RuntimeError):
    """An error that HYBRIDPIPE_FAULT demands."""


@dataclass
class Fault:
    """A fault, and where it happens.

    Args:
        step: minibatches trained on before this one, as in reports; None: any.
        mb: microbatch; None: any.
        attempt: of the supervisor, counted from 0.
        seconds: length of a delay.
        happened: a fault happens once.
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
        """True if the fault is to happen at this point now; the rank is not checked."""
        return (
            not self.happened
            and self.point == point
            and self.step in (None, step)
            and self.mb in (None, microbatch)
        )


def parse(text: str) -> list[Fault]:
    """Parse the variable's text, faults separated by semicolons.

    Raises:
        UserError: the text is no list of faults; the message names field, value and what is allowed.
    """
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
    if not 0 <= seconds < _FOREVER:
        raise UserError(f"{VARIABLE}: {key} must be a number in [0, {_FOREVER:g}), got {shown(value)}")
    return seconds


def from_environment(environment: Mapping[str, str] = os.environ) -> list[Fault]:
    """Return the faults of this attempt.

    Raises:
        UserError: as in `parse`, or HYBRIDPIPE_ATTEMPT is no number.
    """
    text = environment.get(VARIABLE)
    if not text:
        return []
    attempt = environment.get(ATTEMPT_VARIABLE, "0")
    if not attempt.isdecimal():
        raise UserError(f"{ATTEMPT_VARIABLE}: must be an integer >= 0, got {shown(attempt)}")
    return [fault for fault in parse(text) if fault.attempt == int(attempt)]


_faults: Sequence[Fault] = from_environment()


def any_left() -> bool:
    """True if any fault is still to happen on some rank."""
    return any(not fault.happened for fault in _faults)


def at(point: str, *, step: int | None = None, microbatch: int | None = None) -> str | None:
    """Inject the fault that is due at `point`, if there is one.

    Returns:
        "badsize", "badtag" or "nan", which the caller carries out; else None.

    Raises:
        InjectedFault: kind=raise.
        SystemExit: kind=exit.
    """
    if not _faults:
        return None
    for fault in _faults:
        if fault.is_due(point, step, microbatch) and fault.rank == _rank():
            fault.happened = True
            return _inject(fault, step, microbatch)
    return None


def _inject(fault: Fault, step: int | None, microbatch: int | None) -> str | None:
    what = f"injected {fault.kind} at {fault.point}, step {step}, microbatch {microbatch}"
    # tests measure from this time
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
    """Raise in another thread, while this one sleeps."""

    def fail() -> None:
        raise InjectedFault(what)

    threading.Thread(target=fail, name="hybridpipe-fault").start()
    time.sleep(_FOREVER)


def _signal_and_wait(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(_FOREVER)


def _rank() -> int:
    """Return this rank, from MPI if it is initialised, else from the launcher's variables."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        rank: int = mpi.COMM_WORLD.rank
        return rank
    return launched_rank()
