"""Exit reports: files in which ranks tell the supervisor above mpirun why they end.

Not known here: torch and MPI, as a rank may end before they are loaded.
Invariant: a file is complete or absent, and a rank's first report stays.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridpipe.environment import launched_rank

# The variable names a folder on a disk that all hosts share; without it nothing is reported. In it:
#     started           the launcher has started a command
#     rank-0003.begun   this rank reports its errors from now on
#     rank-0003.up      signals may be passed on to this rank: it handles them now
#     rank-0003.json    its `Outcome`, written before the rank ends
#     continues         the folder of checkpoints that the same command would resume by itself
DIRECTORY = "HYBRIDPIPE_OUTCOMES"
ATTEMPT = "HYBRIDPIPE_ATTEMPT"
STARTED, CONTINUES = "started", "continues"
PREEMPTED = 75  # EX_TEMPFAIL: a job that is started again resumes


@dataclass(frozen=True)
class Outcome:
    """The end of a rank."""

    rank: int
    code: int  # exit code
    cause: str  # one line, with rank and host
    error: str  # the same without them, by which two failures are compared
    step: int | None  # in which it happened; None outside of training
    time: float  # seconds since the epoch


def has_supervisor() -> bool:
    """True if a supervisor reads this job's exit reports."""
    return _directory() is not None


def begin() -> None:
    """Tell the supervisor that this rank reports its errors from now on."""
    _mark("begun")


def up() -> None:
    """Tell the supervisor that this rank handles signals from now on."""
    _mark("up")


def _mark(what: str) -> None:
    if directory := _directory():
        with contextlib.suppress(OSError):
            (directory / f"rank-{launched_rank():04}.{what}").touch()


def continues(folder: str | os.PathLike[str]) -> None:
    """Tell the supervisor that this command, started again, resumes from the checkpoints in `folder`."""
    if (directory := _directory()) and launched_rank() == 0:
        with contextlib.suppress(OSError):
            (directory / CONTINUES).write_text(os.path.abspath(folder), encoding="utf-8")


def tell(code: int, cause: str, error: str = "", step: int | None = None) -> None:
    """Write this rank's exit report, unless there is one already.

    Args:
        code: exit code.
        cause: one line with rank and host.
        error: the cause without them; by default the same.
        step: in which it happened; None outside of training.
    """
    directory = _directory()
    if directory is None:
        return
    rank = launched_rank()
    outcome = Outcome(rank, code, " ".join(cause.splitlines()), error or cause, step, time.time())
    final = directory / f"rank-{rank:04}.json"
    temporary = final.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself, which is printed, too
        if not final.exists():
            temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
            temporary.replace(final)


def read(directory: Path) -> list[Outcome]:
    """Return the outcomes that the ranks have reported, the earliest first."""
    texts = [path.read_text(encoding="utf-8") for path in directory.glob("rank-*.json")]
    return sorted((Outcome(**json.loads(text)) for text in texts), key=lambda outcome: outcome.time)


def has_started(directory: Path) -> bool:
    """Return True if the launcher has started a command on any host."""
    return (directory / STARTED).exists()


def has_begun(directory: Path) -> bool:
    """Return True if a rank reports errors, or handles signals."""
    return any(directory.glob("rank-*.begun")) or num_up(directory) > 0


def continued(directory: Path) -> Path | None:
    """Return the folder that the same command would resume from by itself; None if no rank has named one."""
    try:
        return Path((directory / CONTINUES).read_text(encoding="utf-8"))
    except OSError:
        return None


def num_up(directory: Path) -> int:
    """Return the number of ranks that handle signals."""
    return sum(1 for _ in directory.glob("rank-*.up"))


def _directory() -> Path | None:
    """Return the folder for the reports; None without a supervisor, or if the folder is not on this host."""
    directory = os.environ.get(DIRECTORY)
    return Path(directory) if directory and Path(directory).is_dir() else None
