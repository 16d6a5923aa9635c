"""The supervisor with real mpirun and ranks that do what is told: each story ends with nobody left behind."""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from hybridpipe.launch import slurm

# A rank without torch and MPI: "MODE" says what it does, as `train` would.
RANK = """
import os, signal, subprocess, sys, time
from hybridpipe.health import exit_report
from pathlib import Path
mode, rank, attempt = sys.argv[1], int(os.environ["OMPI_COMM_WORLD_RANK"]), os.environ["HYBRIDPIPE_ATTEMPT"]

def preempted(*_):
    print("asked", flush=True)
    exit_report.tell(75, "stopped at step 5")
    time.sleep(0.2)
    os._exit(75)

if mode == "own":
    signal.signal(signal.SIGUSR1, lambda *_: print("own", flush=True) or os._exit(0))
    print("here", flush=True)
    time.sleep(600)
if mode in ("late", "starting"):
    print("here", flush=True)
    time.sleep(1.5 if mode == "late" else 600)
signal.signal(signal.SIGUSR1, signal.SIG_IGN if mode == "deaf" or "stopped" in mode else preempted)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
exit_report.up()
child = subprocess.Popen(["sleep", "600"], start_new_session=True) if mode == "deaf" else None
print("pids", os.getpid(), child.pid if child else 0, " ".join(sys.argv[2:]), flush=True)
if mode in ("late", "waits", "deaf"):
    time.sleep(600)
if mode.startswith("dies") and attempt == "0" and rank == 1:
    if "saved" in mode:
        folder = Path(__file__).parent  # `train` puts the other training's aside
        (folder / "step-00000004").rename(folder / "aside")
        (folder / "step-00000004").mkdir()
    if "stopped" in mode:
        os.kill(int(os.environ["SUPERVISOR"]), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "raises" and rank == 1:
    exit_report.tell(1, f"rank 1, step 3: E (pid {os.getpid()})", "E", 3)
    sys.exit(1)
if mode == "mistake":
    exit_report.tell(2, "no such file")
    sys.exit(2)
if mode == "hangs" and rank == 0:  # as MPI_Abort did
    exit_report.tell(7, "rank 0: E", "E", 3)
    time.sleep(600)
if mode == "hangs":
    time.sleep(600)
time.sleep(0.3)
"""
DRIVER = """
import os, signal, sys
from pathlib import Path
from hybridpipe.launch import supervisor
# What a shell starts in the background, these tests perhaps, ignores it, and so would the supervisor.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["SUPERVISOR"] = str(os.getpid())
supervisor.BACKSTOP_SECONDS = 1.0
out, mode, restarts, deadline, *words = sys.argv[1:]
sys.exit(supervisor.supervise(supervisor.LaunchOptions(
    words=(mode, *words), resumes="auto" in words, out=Path(out), checkpoints=Path(out), ranks=2,
    max_restarts=int(restarts), deadline_seconds=float(deadline), requeue=True,
    program=(sys.executable, out + "/rank.py"))))
"""


@pytest.fixture
def launch(tmp_path):
    """`launch(mode)` starts a supervisor with two ranks; whatever is left of it at the end is killed."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "step-00000004").mkdir()  # an earlier training's
    started = []

    def start(mode, restarts=0, deadline=30.0, words=()):
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), mode, str(restarts), str(deadline), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    for path in Path("/proc").glob("[0-9]*/cmdline"):  # its ranks hold the pipes open
        with contextlib.suppress(OSError):
            if str(tmp_path).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    for process in started:
        process.communicate()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"  # dead, not reaped
    except OSError:
        return False


def nobody_is_left(output):
    pids = [int(pid) for line in output.splitlines() if "pids" in line for pid in line.split()[1:3]]
    assert pids
    return not any(alive(pid) for pid in pids if pid)


OTHER = "--resume elsewhere/step-00000002"


@pytest.mark.parametrize(
    "mode, words, second",
    [
        ("dies", "", ""),  # what lies there is an earlier training's, which nobody asked to go on with
        ("dies", OTHER, OTHER),
        ("dies", "--resume auto", "--resume auto --resume auto"),
        ("dies-saved", "", "--resume auto"),
        ("dies-saved", OTHER, f"{OTHER} --resume auto"),
    ],
)
def test_a_second_attempt_goes_on_with_this_trainings_checkpoint_only(launch, mode, words, second):
    process = launch(mode, restarts=2, words=words.split())
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    start = "the last good checkpoint" if second.endswith("auto") else "where it began"
    lost = f"a rank was lost: SIGKILL (rank 1 on host {platform.node()})"
    assert f"hybridpipe: attempt 0: {lost}; restarting from {start}" in err
    assert err.rstrip().endswith("hybridpipe: done after 2 attempts")
    started = Counter(" ".join(line.split()[3:]) for line in out.splitlines())
    assert started == Counter([words, second] * 2) and nobody_is_left(out)


@pytest.mark.parametrize(
    "mode, restarts, code, attempts, last",
    [
        ("raises", 5, 1, 2, "(the same error came at step 3 twice in a row): rank 1, step 3: E (pid"),
        ("mistake", 5, 2, 1, "(it would fail again): no such file"),
        ("hangs", 0, 7, 1, "(--max-restarts is 0): rank 0: E"),
    ],
)
def test_the_exit_code_and_the_cause_are_the_ranks_own(launch, mode, restarts, code, attempts, last):
    process = launch(mode, restarts)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert last in err.splitlines()[-1] and f"exit code {code}" in err.splitlines()[-1]
    assert "------" not in err and "\0" not in err  # the launcher's own words are no help beside the line
    assert err.count("; restarting from") == attempts - 1 and nobody_is_left(out)


@pytest.mark.parametrize(
    "mode, signums",
    [
        ("waits", [signal.SIGTERM, signal.SIGTERM]),
        ("waits", [signal.SIGINT]),
        ("late", [signal.SIGUSR1]),  # the ranks are not up yet: they would die of it
    ],
)
def test_every_signal_asks_the_ranks_to_stop(launch, mode, signums):
    process = launch(mode, restarts=3)
    lines = [process.stdout.readline() for _ in range(2)]
    for signum in signums:
        process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    out = "".join(lines) + out
    assert process.returncode == 75, err
    assert out.count("asked") == 2 and nobody_is_left(out)
    assert f"{signums[0].name}: asking the job to save and stop" in err
    assert "stopped at step 5; exit code 75: start it again with --resume auto" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "mode, restarts, code",
    [
        ("dies-saved-stopped", 2, 75),  # Slurm's script puts it back into the queue
        ("dies-saved-stopped", 0, 137),  # there would have been no other attempt in any case
        ("dies-stopped", 2, 137),  # nothing to go on with: the checkpoint is an earlier training's
    ],
)
def test_asked_to_stop_when_a_rank_is_lost_it_says_whether_it_can_go_on(launch, mode, restarts, code):
    process = launch(mode, restarts)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert ("exit code 75: start it again with --resume auto" in err.splitlines()[-1]) == (code == 75)
    assert "a rank was lost: SIGKILL" in err.splitlines()[-1] and "restarting" not in err
    assert nobody_is_left(out)


LOST_ONCE = "import os; os.environ['HYBRIDPIPE_ATTEMPT'] == '0' and os.kill(os.getpid(), 9)"


def command(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "2", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "program, code, last",
    [
        (LOST_ONCE, 0, "done after 2 attempts"),
        ("import gone", 1, "(the same error came before any rank was up twice in a row)"),
    ],
)
def test_a_program_that_saves_nothing_is_started_anew_and_that_is_told(tmp_path, program, code, last):
    process = command("--max-restarts", "3", "--", "python", "-c", program, cwd=tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and last in err.splitlines()[-1], err
    anew = 'restarting from its beginning: a script resumes with fit(checkpoint=..., resume="auto")'
    assert err.count(anew) == 1 and not list(tmp_path.iterdir())


def test_ctrl_c_ends_a_program_that_never_listens_at_once(tmp_path):
    """It waited for half of the deadline, 50 s, for ranks to handle signals."""
    program = "import time; print('here', flush=True); time.sleep(600)"
    restored = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    process = command("--deadline", "900", "--", "python", "-c", program, cwd=tmp_path, preexec_fn=restored)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "before its ranks were up, as a script's are in fit(checkpoint=...)" in err.splitlines()[-1], err


def test_after_the_deadline_nobody_is_left(launch):
    """Ranks that ignore every signal, and a process of theirs in a session of its own."""
    process = launch("deaf", restarts=3, deadline=1.5)
    lines = [process.stdout.readline() for _ in range(2)]
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began > 1.5
    assert "did not stop within the deadline of 1.5 s" in err.splitlines()[-1]
    assert nobody_is_left("".join(lines) + out)


def test_ranks_that_are_not_up_by_the_deadline_have_nothing_to_save(launch):
    process = launch("starting", deadline=3.0)
    assert process.stdout.readline() == process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the job was asked to stop before its ranks were up; exit code 75: start it again with" in err, err


def test_a_notice_of_slurms_does_not_kill_ranks_that_are_starting(launch):
    """It ended them while they imported torch: taken for a crash, and the job met its time limit."""
    process = launch("late", restarts=3)
    lines = [process.stdout.readline() for _ in range(2)]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0") if path.parent.exists() else []
        if any(word.endswith(b"/rank.py") for word in words) and b"mpirun" not in b" ".join(words):
            os.kill(int(path.parent.name), signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and out.count("asked") == 2 and "restarting" not in err, err
    assert nobody_is_left("".join(lines) + out)


def test_a_handler_of_a_scripts_own_is_called_at_half_of_the_deadline(launch):
    process = launch("own", deadline=4.0)
    assert process.stdout.readline() == process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.count("own") == 2, err


FAST_SLURM = """#!/bin/sh
sleep "${SLOW:-0}"
case "$*" in
  *-o%T) [ -n "$ENDS" ] && echo COMPLETING || echo RUNNING;;
  "show config") echo "KillWait                = 7 sec";;
  *) echo "$(basename $0) $*" >> "$CALLS";;
esac
"""


def commands(monkeypatch, folder, **env):
    """Slurm's commands, which write what they are asked for into `folder / "calls"`."""
    for name in ("squeue", "scontrol"):
        (folder / name).write_text(FAST_SLURM)
        (folder / name).chmod(0o755)
    (folder / "calls").touch()
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "CALLS": str(folder / "calls")}
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def test_ranks_are_asked_before_slurm_is(launch, tmp_path, monkeypatch):
    """A controller that answers late took what KillWait leaves for saving."""
    commands(monkeypatch, tmp_path, ENDS="1", SLOW="4")
    process = launch("waits")
    lines = [process.stdout.readline() for _ in range(2)]
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n" and time.monotonic() - began < 3
    _, err = process.communicate(timeout=60)
    assert len(lines) == 2 and process.returncode == 75, err


def test_a_controller_that_does_not_answer_leaves_the_exit_code(tmp_path, monkeypatch, capsys):
    """It ended in a traceback and code 1, for which the job is no longer one that can continue."""
    commands(monkeypatch, tmp_path)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm, "SECONDS", 1.0)
    assert slurm.is_running(os.environ) and not slurm.requeue(os.environ)
    assert (
        "the job is not requeued: Command '['scontrol', 'requeue', '7']' timed out" in capsys.readouterr().err
    )


@pytest.mark.parametrize("ends, calls, left", [("", "scontrol requeue 7\n", "30 s"), ("1", "", "7 s")])
def test_a_running_slurm_job_is_requeued_and_one_that_slurm_ends_is_not(
    launch, tmp_path, monkeypatch, ends, calls, left
):
    """What Slurm leaves after a TERM is its KillWait, and "ended after 100 s" was not true."""
    commands(monkeypatch, tmp_path, ENDS=ends)
    process = launch("waits")
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert len(lines) == 2 and process.returncode == 75, err
    assert (tmp_path / "calls").read_text() == calls and f"it is ended after {left}" in err, err


@pytest.mark.parametrize(
    "words, mistake",
    [
        (["--ranks", "2"], "-- train CONFIG ..., or by -- python train.py ..., got nothing"),
        (["--ranks", "2", "--", "plan"], "or by -- python train.py ..., got plan"),
        (["--ranks", "2", "--", "python", "gone.py", "-x"], "launch: gone.py: No such file or directory"),
        (["--ranks", "2", "--", "train", "none.toml"], "none.toml"),
        (["--", "train", "examples/digits.toml"], "needs --ranks or --hosts outside of a Slurm allocation"),
        (["--hosts", "h1:0", "--", "train", "x"], "ranks of h1 must be an integer >= 1, got '0'"),
        (
            ["--ranks", "3", "--hosts", "h1,h2", "--", "train", "examples/digits.toml"],
            "--ranks must be <= the 2",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(words, mistake):
    done = subprocess.run(
        [sys.executable, "-m", "hybridpipe", "launch", *words],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
    )  # fmt: skip
    assert done.returncode == 2 and mistake in done.stderr and done.stderr.count("\n") == 1
