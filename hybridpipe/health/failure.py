"""Failure: one rank's error ends the whole job within seconds, with one message that says where it happened.

Not known here: programs and plans. Invariant: in a world of several ranks an uncaught error is printed and
ends in MPI_Abort, where mpi4py alone would leave the other ranks waiting; a single rank ends as Python does.
"""

import atexit
import builtins
import dis
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import Doing, rank_status
from hybridpipe.errors import UserError, told
from hybridpipe.health import exit_report, out_of_memory

# MPI_Abort hung in 1 of 10 runs with Horovod. A rank that a signal kills makes mpirun end the job, too.
ABORT_SECONDS = 2
# If all ranks meet one error at the same time, the first to report ends the job before the others report.
STAGGER_SECONDS = 0.5
# After a link was cut, mpirun 5.0.11 waited for the lost host until it was killed.
LAUNCHER_SECONDS = 3
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted")  # of Open MPI


_reporting = threading.Lock()
_original_exit = sys.exit


class _Exit(NamedTuple):
    """A call of `sys.exit`, whose exception may still be caught.

    Args:
        stack: of the call; it is no longer known at exit.
        doing: the rank's status in the call. If it has changed by the exit, the exception was caught.
    """

    code: Any
    stack: list[str]
    doing: Doing


_last_exit: _Exit | None = None


def install() -> None:
    """Install the hooks that let any error on this rank end the job; repeated calls do nothing.

    The hooks see uncaught exceptions of all threads, and `sys.exit` with an error. In a world of one rank
    they see those of the main thread, and only write the exit report; without a supervisor none is installed.
    """
    exit_report.begin()
    alone = MPI.COMM_WORLD.size == 1
    if sys.excepthook is _excepthook or (alone and not exit_report.has_supervisor()):
        return
    sys.excepthook = _excepthook
    if not alone:
        threading.excepthook = lambda args: _excepthook(args.exc_type, args.exc_value, args.exc_traceback)
    # SystemExit does not reach an excepthook; one that is raised without these three is not seen
    sys.exit = builtins.exit = builtins.quit = _exit  # type: ignore[assignment]
    look_first_at_exit()
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash prints its Python stack


def look_first_at_exit() -> None:
    """Register the check for a `sys.exit` with an error again, so that it runs first at exit.

    Handlers run in reverse order. MPI's would wait for the other ranks. Horovod's, which is registered at
    each initialisation, would fail on those and hide the cause with its message.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


@contextmanager
def guard() -> Iterator[None]:
    """Guard work with other ranks: any exception that leaves it ends the job.

    A caller that caught the exception would leave the other ranks waiting.
    """
    try:
        yield
    except BaseException as error:
        end_job_for(error)
        if explanation := out_of_memory.explanation(error):
            error.add_note(explanation)  # Python prints it below the error
        raise


def end_job_for(error: BaseException) -> None:
    """Report an error and end the job; returns where there are no other ranks."""
    if MPI.COMM_WORLD.size > 1:
        _abort(error)


def _excepthook(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    found = (error or kind()).with_traceback(trace)
    if MPI.COMM_WORLD.size > 1:
        if (mistake := _mistake(found)) is not None:
            refuse(mistake)  # in a script, as in a config
        _abort(found)
    if not isinstance(found, KeyboardInterrupt):
        _tell(found)
    sys.__excepthook__(kind, found, trace)


def _mistake(error: BaseException) -> UserError | None:
    """Return a user's mistake, reported in one line; None for another error, whose traceback is of use.

    What the package itself raises for an argument is one: a ValueError or TypeError that no other error has
    caused. Its line names that of the script.
    """
    if isinstance(error, UserError):
        return error if error.exit_code == 2 else None
    if type(error) not in (TypeError, ValueError) or error.__cause__ or hasattr(error, "__notes__"):
        return None
    where, trace = "", error.__traceback__
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<")):  # "<": what dataclasses make
            where = f" ({Path(file).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    operation = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return UserError(f"{error}{where}") if operation == "RAISE_VARARGS" else None


def _exit(code: Any = None) -> None:
    global _last_exit
    _last_exit = _Exit(code, traceback.format_stack()[:-1], rank_status.doing)
    _original_exit(code)


def _at_exit() -> None:
    last = _last_exit
    if last is None or last.code in (None, 0) or rank_status.doing is not last.doing:
        return
    if MPI.COMM_WORLD.size > 1:
        _abort(SystemExit(last.code), last.stack)
    _tell(SystemExit(last.code))


def _tell(error: BaseException) -> tuple[int, str]:
    """Write the exit report. Return the exit code and the report's line."""
    explanation = out_of_memory.explanation(error)
    what = told(error) if explanation in told(error) else f"{told(error)}; {explanation}"
    where = f"rank {MPI.COMM_WORLD.rank} on host {socket.gethostname()}, {rank_status}"
    code = 1 if (mistake := _mistake(error)) is None else mistake.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    exit_report.tell(code, f"{where}: {what}", what, rank_status.step)
    return code, f"{where}: {what}"


def _abort(error: BaseException, stack: Sequence[str] = ()) -> NoReturn:
    """Report an error and end the job; never returns. Of several failing threads only the first reports.

    Args:
        stack: of an error without a traceback.
    """
    if not _reporting.acquire(blocking=False):
        threading.Event().wait()
    mistake = _mistake(error)
    if mistake is not None and rank_status.step is None:
        refuse(mistake)
    heading = ["Traceback (most recent call last):\n", *stack] if stack else []
    lines = "" if mistake is not None else "".join([*heading, *traceback.format_exception(error)])
    code, told = _tell(error)
    time.sleep(getattr(error, "stagger_seconds", STAGGER_SECONDS * min(MPI.COMM_WORLD.rank, 3)))
    sys.stdout.flush()
    print_in_one_piece(f"{lines}hybridpipe: {told}; ending the job")
    end_job(code)


@contextmanager
def refusing(num_ranks: int | None = None) -> Iterator[None]:
    """End the job in one line where a UserError leaves this context.

    Other ranks may not meet it, as what rank 0 does alone, and would wait. In a world of one it is raised.

    Args:
        num_ranks: that train together; by default all.
    """
    try:
        yield
    except UserError as error:
        if (MPI.COMM_WORLD.size if num_ranks is None else num_ranks) > 1:
            refuse(error)
        raise


def print_in_one_piece(lines: str) -> None:
    """Print last words on stderr by one write, since the launcher puts its own words between two of them.

    `print` writes the end of several lines by itself.
    """
    sys.stderr.write(f"{lines}\n")
    sys.stderr.flush()


def refuse(error: Exception) -> NoReturn:
    """Print a user's mistake in one line, without a traceback, and end the job; never returns.

    The exit code is that of a `UserError`, else 2. The first rank that reports ends all ranks.
    """
    code, step = (error.exit_code, error.step) if isinstance(error, UserError) else (2, None)
    exit_report.tell(code, str(error), step=step)
    time.sleep(2 * STAGGER_SECONDS * min(MPI.COMM_WORLD.rank, 3))
    print_in_one_piece(f"hybridpipe: {error}")
    if MPI.COMM_WORLD.size == 1:
        sys.exit(code)
    end_job(code)


def end_launcher_if_stuck() -> None:
    """Start a process that kills this rank's launcher, unless it ends by itself within LAUNCHER_SECONDS.

    To be called before `end_job` where a host may be lost: mpirun would wait for that host's daemon forever.
    """
    launcher = _launcher()
    if launcher is not None:
        polls = range(10 * LAUNCHER_SECONDS)
        wait = f"for i in {' '.join(map(str, polls))}; do kill -0 {launcher} || exit; sleep 0.1; done"
        subprocess.Popen(
            ["/bin/sh", "-c", f"{wait}; kill -KILL {launcher}"],
            env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def _launcher() -> int | None:
    """Return the process of mpirun, or of its daemon on this host, that this rank descends from."""
    process = os.getpid()
    while process > 1:
        try:
            if Path(f"/proc/{process}/comm").read_text().strip() in LAUNCHERS:
                return process
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
    return None


def end_job(code: int) -> NoReturn:
    """Call MPI_Abort; if it hangs, SIGALRM kills this process. Never returns."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})  # in this thread at least
    signal.alarm(ABORT_SECONDS)
    MPI.COMM_WORLD.Abort(code or 1)
    os._exit(code or 1)
