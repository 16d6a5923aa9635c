"""Preemption: USR1 or TERM requests a stop, and all ranks end at the same step.

Not known here: torch and MPI, because a command handles signals before it loads them.
Invariant: a handler only notes the request; `Worker.sum_losses` carries it to all ranks beside the losses.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from hybridpipe.environment import launched_rank
from hybridpipe.health import exit_report

# A thread that waits in MPI does not block these. Blocking would have to precede the import of numpy, whose
# OpenBLAS starts threads: one that does not block the signal would get it. So any thread may get it, and
# Python runs the handler once the main thread is in Python again. That is early enough: the request counts
# from the next `share` on. One after the last `share`, while the end is saved, is kept for the next training.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# The first rank that exits makes mpirun end the others, so all exit together, if the others arrive in time.
TOGETHER_SECONDS = 30.0


class Preempted(SystemExit):
    """Raised when all ranks have stopped at one step and have saved their state; the exit code is 75.

    A script may catch it to clean up, but the job cannot continue.
    """

    def __init__(self, what: str) -> None:
        super().__init__(exit_report.PREEMPTED)
        self.what = what

    def __str__(self) -> str:
        return self.what


class _Preemption:
    """This rank's state of preemption.

    Args:
        listening: the signals request a stop.
        noted: a signal has arrived while the rank listened, perhaps too late for the training at that time.
        stop_requested: by a signal; False in a training that does not listen, because it would end unsaved.
        leaving: the process is about to end.
    """

    listening = False
    noted = False
    stop_requested = False
    leaving = False


state = _Preemption()


@contextlib.contextmanager
def listening(wanted: bool = True) -> Iterator[None]:
    """Let the signals request a stop inside the block, if `wanted`; outside they end the process.

    Under a supervisor they never end the process again: after a training, a script evaluates and writes what
    it has trained. Only the main thread can handle signals; in another one nothing changes.
    """
    if not wanted or state.listening or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    listen()
    try:
        yield
    finally:
        if not state.leaving:  # a second signal must not end a process that is about to end with 75
            for signum, handler in before.items() if not exit_report.has_supervisor() else ():
                signal.signal(signum, handler)
            state.listening = state.stop_requested = False


def listen() -> None:
    """Let the signals request a stop from now on, and tell the supervisor. Main thread only."""
    for signum in SIGNALS:
        signal.signal(signum, _note)
        signal.siginterrupt(signum, False)  # system calls of any library are resumed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by __main__
    state.listening, state.stop_requested = True, state.noted
    atexit.unregister(_ignore)
    atexit.register(_ignore)
    exit_report.up()


def _ignore() -> None:
    """Ignore USR1 while the process ends: Python then takes its handlers away, and the signal would kill."""
    if exit_report.has_supervisor():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _note(_signum: int, _frame: object) -> None:
    state.noted, state.stop_requested = True, state.listening  # a second signal changes nothing


def _in_child() -> None:
    """Reset the handlers in a forked child, such as one that a data set starts: TERM ends it.

    USR1 is ignored there: Slurm sends it to every process of a step, and the rank needs its children to save.
    """
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        state.listening = state.noted = state.stop_requested = False


os.register_at_fork(after_in_child=_in_child)


def stop(what: str, step: int, barrier: Callable[[float], None]) -> NoReturn:
    """End the training, on all ranks alike. Collective; to be called after saving.

    Args:
        what: message such as "stopped at step 12, saved in runs/digits/step-00000012".
        step: minibatches trained on.
        barrier: waits for the other ranks, for at most the seconds given to it.

    Raises:
        Preempted: always.
    """
    state.leaving = True
    exit_report.tell(exit_report.PREEMPTED, what, step=step)
    if launched_rank() == 0:
        print(f"hybridpipe: {what}", file=sys.stderr, flush=True)
    atexit.register(_leave, barrier)  # runs first because it is registered last: before MPI's and Horovod's
    raise Preempted(what)


def _leave(barrier: Callable[[float], None]) -> None:
    """Exit without MPI_Finalize, which would wait for messages between stages that no rank receives."""
    barrier(TOGETHER_SECONDS)
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # closed already
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_report.PREEMPTED)
