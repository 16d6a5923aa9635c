"""Outcome: what the ranks tell the supervisor above mpirun, whose exit code says little of them.

    DIR/rank-0003.up           signals may be passed on to this rank now: it does with them what it is to do
    DIR/rank-0003.json         why this rank has ended, written before it does

DIR is $HYBRIDPIPE_OUTCOMES, on a disk that all hosts share; without the variable nothing is told. A file is
there whole or not at all, and the first that a rank tells stays. Standard library only: what a rank has to
tell may come before torch and MPI are there.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridpipe.environment import launched_rank

DIRECTORY = "HYBRIDPIPE_OUTCOMES"
ATTEMPT = "HYBRIDPIPE_ATTEMPT"
PREEMPTED = 75  # EX_TEMPFAIL: start it again, and it goes on


@dataclass(frozen=True)
class Outcome:
    """Why a rank has ended: its exit code, the report's line, what of it two failures have in common.

    `error` is the cause without rank and host; `step` is where it arose, None outside of training.
    """

    rank: int
    code: int
    cause: str
    error: str
    step: int | None
    time: float


def is_asked_for() -> bool:
    """Whether somebody above wants to be told."""
    return _directory() is not None


def up() -> None:
    """From now on this rank does with signals what it is to do."""
    if directory := _directory():
        with contextlib.suppress(OSError):
            (directory / f"rank-{launched_rank():04}.up").touch()


def tell(code: int, cause: str, error: str = "", step: int | None = None) -> None:
    """Leave word why this rank ends."""
    directory = _directory()
    if directory is None:
        return
    rank = launched_rank()
    outcome = Outcome(rank, code, " ".join(cause.splitlines()), error or cause, step, time.time())
    final = directory / f"rank-{rank:04}.json"
    temporary = final.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk must not hide what was to be told: it is printed, too
        if not final.exists():
            temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
            temporary.replace(final)


def read(directory: Path) -> list[Outcome]:
    """What the ranks have told, the earliest first."""
    told = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in directory.glob("rank-*.json")]
    return sorted(told, key=lambda outcome: outcome.time)


def num_up(directory: Path) -> int:
    return sum(1 for _ in directory.glob("rank-*.up"))


def _directory() -> Path | None:
    """Where to tell; None if nobody asked, or the directory is not on this host."""
    directory = os.environ.get(DIRECTORY)
    return Path(directory) if directory and Path(directory).is_dir() else None
