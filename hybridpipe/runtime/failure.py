"""Failure: one rank's error ends the whole job within seconds, with one message that says where.

mpi4py alone leaves the other ranks waiting for ever when one raises. `install` sees uncaught exceptions of
the main thread, of any other thread, and `sys.exit` with an error; `guard` sees what leaves a step. Each
prints a report and calls MPI_Abort, which ends every rank.
"""

import atexit
import builtins
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.position import position

# MPI_Abort hung in 1 of 10 runs with Horovod. A rank that dies of a signal makes mpirun end the job too.
ABORT_SECONDS = 2
# Ranks that meet the same error at the same time report one after the other, so that the first is the last.
STAGGER_SECONDS = 0.5


_reporting = threading.Lock()
_original_exit = sys.exit
_exit_code: Any = None  # of a `sys.exit` that is not known to be caught
_exit_stack: list[str] = []  # where it was called: at exit, the exception does not know any more


def install() -> None:
    """Let an error on this rank end the job. Does nothing in a world of one rank, or when called again."""
    if MPI.COMM_WORLD.size == 1 or sys.excepthook is _excepthook:
        return
    sys.excepthook = _excepthook
    threading.excepthook = lambda args: _excepthook(args.exc_type, args.exc_value, args.exc_traceback)
    # SystemExit passes an excepthook by; raised without these three, it stays unseen
    sys.exit = builtins.exit = builtins.quit = _exit  # type: ignore[assignment]
    look_first_at_exit()


def look_first_at_exit() -> None:
    """Let a `sys.exit` with an error be seen before what was registered so far runs at exit.

    Handlers run in reverse order: MPI's would wait for the other ranks, and Horovod's, registered whenever it
    is initialised, would fail on those with a message that hides the cause.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


@contextmanager
def guard() -> Iterator[None]:
    """Around a step: an error that the caller catches would leave the peers waiting for messages."""
    global _exit_code
    _exit_code = None  # whoever is still at work has caught the exit that was asked for
    try:
        yield
    except BaseException as error:
        if MPI.COMM_WORLD.size > 1:
            _abort(error)
        raise


def _excepthook(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    _abort((error or kind()).with_traceback(trace))


def _exit(code: Any = None) -> None:
    global _exit_code, _exit_stack
    _exit_code, _exit_stack = code, traceback.format_stack()[:-1]
    _original_exit(code)


def _at_exit() -> None:
    if _exit_code not in (None, 0):
        _abort(SystemExit(_exit_code), _exit_stack)


def _abort(error: BaseException, stack: Sequence[str] = ()) -> NoReturn:
    """Report and end the job. Never returns; of several failing threads the first one reports.

    Args:
        stack: where the error arose, for one that has no traceback of its own.
    """
    if not _reporting.acquire(blocking=False):
        threading.Event().wait()
    heading = ["Traceback (most recent call last):\n", *stack] if stack else []
    lines = "".join([*heading, *traceback.format_exception(error)])
    what = traceback.format_exception_only(error)[-1].strip()
    time.sleep(getattr(error, "stagger_seconds", STAGGER_SECONDS * min(MPI.COMM_WORLD.rank, 3)))
    where = f"rank {MPI.COMM_WORLD.rank} on host {socket.gethostname()}, {position}"
    sys.stdout.flush()
    print(f"{lines}hybridpipe: {where}: {what}; ending the job", file=sys.stderr, flush=True)
    end_job(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def refuse(error: Exception) -> NoReturn:
    """A mistake of the user: one line and exit code 2. The first rank that sees it ends the job for all."""
    time.sleep(2 * STAGGER_SECONDS * min(MPI.COMM_WORLD.rank, 3))
    print(f"hybridpipe: {error}", file=sys.stderr, flush=True)
    if MPI.COMM_WORLD.size == 1:
        sys.exit(2)
    end_job(2)


def end_job(code: int) -> NoReturn:
    """MPI_Abort, and SIGALRM's default action should that hang. Never returns."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})  # in this thread at least
    signal.alarm(ABORT_SECONDS)
    MPI.COMM_WORLD.Abort(code or 1)
    os._exit(code or 1)
