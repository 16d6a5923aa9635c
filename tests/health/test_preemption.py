"""Being asked to stop: noted on whatever thread the signal comes, and in nobody's way."""

import os
import signal
import subprocess
import sys

from hybridpipe.cli.main import main
from hybridpipe.health import preemption

# numpy's OpenBLAS has a thread of its own by then: a signal that only the main thread blocks would end it.
ON_ANY_THREAD = """
import os, signal, threading, time
import numpy
from hybridpipe.health import preemption
other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
other.start()
assert not preemption.state.stop_requested
with preemption.listening():
    signal.pthread_kill(other.ident, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not preemption.state.stop_requested:  # the process has a time limit
        time.sleep(0.01)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        assert not preemption.state.stop_requested
        os.kill(os.getpid(), signal.SIGUSR1)  # Slurm signals the children of a rank, too
        os.write(writes, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM, status
assert not preemption.state.stop_requested  # by a training that is not saved
with preemption.listening():
    assert preemption.state.stop_requested  # what came too late for the one before
print("so far", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""

UNDER_A_SUPERVISOR = """
import os, signal
from pathlib import Path
from hybridpipe.health import exit_report, preemption
told = Path(os.environ["HYBRIDPIPE_OUTCOMES"])
assert exit_report.num_up(told) == 0
with preemption.listening():
    assert exit_report.num_up(told) == 1
os.kill(os.getpid(), signal.SIGUSR1)  # a script evaluates what it has trained
os.kill(os.getpid(), signal.SIGTERM)
assert not preemption.state.stop_requested
if not (child := os.fork()):
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
with preemption.listening():
    assert preemption.state.stop_requested
print("to the end")
"""

STOPPING = """
import atexit, sys
from hybridpipe.health import preemption
atexit.register(lambda: print("MPI's own end"))
seconds = []
try:
    preemption.stop("stopped at step 3", 3, seconds.append)
except preemption.Preempted as stopped:
    print(stopped, stopped.code)
    sys.exit({code})
"""


def run(program, **env):
    command, env = [sys.executable, "-c", program], {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)


def test_under_a_supervisor_a_signal_after_training_ends_nothing(tmp_path):
    done = run(UNDER_A_SUPERVISOR, HYBRIDPIPE_OUTCOMES=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "to the end\n"), done.stderr


def test_signals_are_noted_on_any_thread_and_kept_for_whoever_listens_next():
    done = run(ON_ANY_THREAD)
    assert done.stdout == "so far\n", done.stderr
    assert done.returncode == -signal.SIGTERM


def test_the_process_ends_with_75_whatever_happens_on_the_way_and_without_mpis_own_end():
    for code in (75, 0):
        done = run(STOPPING.format(code=code))
        assert (done.returncode, done.stdout) == (75, "stopped at step 3 75\n"), done.stderr


def test_elsewhere_than_on_the_main_thread_nobody_listens():
    program = """
import threading, signal
from hybridpipe.health import preemption
def listen():
    with preemption.listening():
        print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
threading.Thread(target=listen).start()
"""
    assert run(program).stdout == "True\n"


def test_importing_loads_neither_torch_nor_mpi():
    probe = "import sys, hybridpipe.health.preemption; print({'torch', 'mpi4py'} & {*sys.modules})"
    assert run(probe).stdout == "set()\n"


def test_listening_in_this_process_is_undone(monkeypatch):
    monkeypatch.setattr(
        preemption.state, "noted", False
    )  # and again at the end: else the next `fit` would stop
    before = [signal.getsignal(signum) for signum in preemption.SIGNALS]
    with preemption.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert [signal.getsignal(signum) for signum in preemption.SIGNALS] == before


def test_the_command_leaves_no_handlers_behind(tmp_path):
    """Whoever calls it from Python, such as pytest, could not be ended by TERM any more."""
    before = [signal.getsignal(signum) for signum in preemption.SIGNALS]
    config = tmp_path / "c.toml"
    config.write_text(
        'model.factory = "none:none"\ndata.factory = "none:none"\n'
        'optimizer.factory = "torch.optim:SGD"\ntrain.minibatch = 8\n'
    )
    assert main(["train", str(config), "--out", str(tmp_path / "out")]) == 2
    assert [signal.getsignal(signum) for signum in preemption.SIGNALS] == before


ENDING = """
import os, signal
from hybridpipe.health import preemption
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGUSR1):
        kill(pid, signum)
        print("there", flush=True)
with preemption.listening():
    pass
late = Late()
"""


def test_a_process_that_is_ending_does_not_die_of_the_signal(tmp_path, monkeypatch):
    """Ctrl-C in a finished script ended it, and the supervisor said that nothing had been trained (75)."""
    monkeypatch.setenv("HYBRIDPIPE_OUTCOMES", str(tmp_path))
    done = run(ENDING)
    assert (done.returncode, done.stdout) == (0, "there\n"), done.stderr
