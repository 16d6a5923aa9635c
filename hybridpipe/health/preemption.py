"""Preemption: whether this rank was asked to stop, and the end that all ranks come to together.

USR1 and TERM ask. A handler only notes it; `Worker.share` carries the note to all ranks beside the losses, so
all see it with the same minibatch and stop at the same step. A signal is taken on whatever thread it comes:
blocking it for a thread that waits would have to precede numpy, whose OpenBLAS starts threads on import that
would die of it. Python runs the handler when the main thread is next in Python, which is early enough: it has
to get out of a receive, and to the next `share`, in any case. One that comes behind the last `share`, while
the end is saved, stays noted for whoever listens next. Imports neither torch nor MPI, because a command
listens before it loads them; whoever does not listen is ended by the signal, as any process is.
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

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# Whoever leaves first makes mpirun end the others, so all leave together, if the others come at all.
TOGETHER_SECONDS = 30.0


class Preempted(SystemExit):
    """All ranks have stopped at one step, and what they have trained is saved. Ends the process with 75.

    To be caught for what must be done before the end; the job does not go on after it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(exit_report.PREEMPTED)
        self.what = what

    def __str__(self) -> str:
        return self.what


class _State:
    """This rank's part in a preemption.

    Args:
        listening: signals ask.
        noted: a signal has come while the rank listened, perhaps too late for the training that did.
        asked: the rank is to stop; False for a training that does not listen, as it would end unsaved.
        leaving: the process is about to end.
    """

    listening = False
    noted = False
    asked = False
    leaving = False


state = _State()


@contextlib.contextmanager
def listening(wanted: bool = True) -> Iterator[None]:
    """Inside, if wanted, the signals ask; outside they end the process. Only the main thread can listen."""
    if not wanted or state.listening or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    listen()
    try:
        yield
    finally:
        if not state.leaving:  # else a second signal would end what is about to end with 75
            for signum, handler in before.items():
                signal.signal(signum, handler)
            state.listening = state.asked = False


def listen() -> None:
    """From now on the signals ask."""
    for signum in SIGNALS:
        signal.signal(signum, _note)
        signal.siginterrupt(signum, False)  # a read in C, of whoever, goes on
    state.listening, state.asked = True, state.noted


def _note(_signum: int, _frame: object) -> None:
    state.noted = state.asked = True  # a second signal changes nothing


def _in_child() -> None:
    """A forked child, such as one that a data set starts, asks nobody: TERM ends it.

    USR1, which Slurm sends to every process of a step, does not: the rank needs its children to save.
    """
    if state.listening:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        state.listening = state.noted = state.asked = False


os.register_at_fork(after_in_child=_in_child)


def stop(what: str, step: int, barrier: Callable[[float], None]) -> NoReturn:
    """End the training here, on all ranks alike, once what is to be saved is saved on all of them.

    Args:
        what: in words, such as "stopped at step 12, saved in runs/digits/step-00000012".
        barrier: waits for the other ranks, at most so many seconds.

    Raises:
        Preempted: always.
    """
    state.leaving = True
    exit_report.tell(exit_report.PREEMPTED, what, step=step)
    if launched_rank() == 0:
        print(f"hybridpipe: {what}", file=sys.stderr, flush=True)
    atexit.register(_leave, barrier)  # registered last, it comes first: before MPI's and Horovod's
    raise Preempted(what)


def _leave(barrier: Callable[[float], None]) -> None:
    """MPI's own end would wait for messages that are under way between the stages, and nobody takes."""
    barrier(TOGETHER_SECONDS)
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # closed already
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_report.PREEMPTED)
