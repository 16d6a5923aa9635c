"""Supervisor: `hybridpipe launch`, what stands above mpirun or srun and sees a training to its end.

mpirun passes a signal on with no deadline, kills its ranks two seconds after a TERM, may hang in MPI_Abort,
and its exit code tells little of the ranks. So: whatever signal asks the supervisor to end goes to the job as
USR1, which asks it to save and stop; after the deadline, what is left is ended; the exit code is the one that
the ranks told (hybridpipe.health.exit_report); and after a failure the job is started again, on the hosts
that are left (hybridpipe.launch.restarts decides). Knows neither torch nor MPI: nothing that breaks a
rank can break it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybridpipe.checkpoint.directory import checkpoints
from hybridpipe.errors import UserError
from hybridpipe.health import exit_report
from hybridpipe.launch import mpirun, restarts

# All of them ask for the same: a user, a batch system and a shell each send another.
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
UNLESS_IGNORED = (signal.SIGINT, signal.SIGHUP)  # by nohup, or by a shell for what it runs in the background
# Once a rank has told why it ends, the others are gone within this, or are ended: MPI_Abort hung in 1 of 10
# runs with Horovod; a rank whose MPI_Abort hangs ends itself after 2 s, which mpirun notices in under 2 s.
BACKSTOP_SECONDS = 8.0
# A host that is there starts a process in a fraction of a second, or hangs: 1 in 25 with Open MPI 5.0.11.
PROBE_SECONDS = 10.0
PROBES = 3
POLL_SECONDS = 0.05
PROGRAM = (sys.executable, "-m", "hybridpipe")


@dataclass(frozen=True)
class Asked:
    """What `hybridpipe launch` was asked for.

    Args:
        words: the command for every rank, such as ("train", "digits.toml", "--plan", "auto").
        out: the folder that the training writes to, which every host sees.
        checkpoints: its folder of checkpoints.
        resumes: the words say --resume auto: what lies in that folder is this training's.
        slots: ranks that each host can take; empty: this one, or the Slurm allocation as a whole.
        fixed_plan: the plan is a file, which fits this number of ranks only.
    """

    words: tuple[str, ...]
    out: Path
    checkpoints: Path
    ranks: int
    launcher: str = "mpirun"
    slots: Mapping[str, int] = field(default_factory=dict)
    max_restarts: int = 0
    min_ranks: int = 1
    deadline_seconds: float = 100.0
    fixed_plan: bool = False
    resumes: bool = False
    program: tuple[str, ...] = PROGRAM


class Stop:
    """Whether, when and by which signal the job was asked to stop; a second signal changes nothing."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.since = 0.0

    def note(self, signum: int, _frame: object = None) -> None:
        if self.signum is None:
            self.signum, self.since = signum, time.monotonic()

    def seconds(self) -> float:
        """Since the job was asked to stop."""
        return 0.0 if self.signum is None else time.monotonic() - self.since


def places(
    ranks: int | None, hosts: Mapping[str, int], env: Mapping[str, str] = os.environ
) -> tuple[int, Mapping[str, int]]:
    """The number of ranks, and how many each host can take: as asked for, else the Slurm allocation's."""
    if "SLURM_JOB_ID" in env and not hosts:
        ranks = ranks or mpirun.count_of("SLURM_NTASKS", env)
        names = _hosts_of_slurm(env)
        hosts = {name: -(-ranks // len(names)) for name in names}
    ranks = ranks or sum(hosts.values())
    if not ranks:
        raise UserError("launch: needs --ranks or --hosts outside of a Slurm allocation, got neither")
    if hosts and sum(hosts.values()) < ranks:
        raise UserError(
            f"launch: --ranks must be <= the {sum(hosts.values())} that --hosts take, got {ranks}"
        )
    return ranks, hosts


def _hosts_of_slurm(env: Mapping[str, str]) -> list[str]:
    show = ["scontrol", "show", "hostnames", env.get("SLURM_JOB_NODELIST", "")]
    try:
        return subprocess.run(show, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:  # within a container: srun, if it is there, knows its own hosts
        return []


def supervise(asked: Asked) -> int:
    """Run the job to its end, in as many attempts as it takes.

    Returns:
        the exit code of the last attempt; 75 if it was lost, but is not followed by another from a
        checkpoint only because somebody asked to stop.
    """
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{asked.out}: cannot be made: {error.strerror}") from None
    attempts: list[restarts.Attempt] = []
    found = _present(asked)
    following: Asked | None = asked
    with _asked_to_stop() as stop:
        while following is not None:
            ended = _attempt(following, len(attempts), stop)
            attempts.append(ended)
            why = restarts.why_not_again(attempts, asked.max_restarts)
            following = _on_what_is_left(asked) if why is None and stop.signum is None else None
            has_saved = _has_saved(asked, found)
            if stop.signum is not None:
                if why is None and has_saved:
                    attempts[-1] = restarts.stopped_instead(ended)
                why, following = "it was asked to stop", None
            if following is not None:
                start = "where it began"  # which --resume may have named
                if has_saved:
                    start = "the last good checkpoint"
                    following = replace(following, words=(*following.words, "--resume", "auto"))
                _say(f"attempt {len(attempts) - 1}: {ended.cause}; again, from {start}")
    _report(attempts, why or f"--min-ranks is {asked.min_ranks}")
    return attempts[-1].code


def _present(asked: Asked) -> set[tuple[str, int]]:
    """The checkpoints that are there, each of which another training may replace under its name."""
    present = set()
    for each in checkpoints(asked.checkpoints):
        with contextlib.suppress(FileNotFoundError):  # a rank of a lost host may yet be deleting it
            present.add((each.name, each.stat().st_ino))
    return present


def _has_saved(asked: Asked, found: set[tuple[str, int]]) -> bool:
    """Is there a checkpoint of this training? What was found before may be that of another one.

    An attempt that is lost early has not yet put another training's folder aside.
    """
    present = _present(asked)
    return bool(present if asked.resumes else present - found)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Stop]:
    stop = Stop()
    ignored = {each for each in UNLESS_IGNORED if signal.getsignal(each) == signal.SIG_IGN}
    before = {signum: signal.signal(signum, stop.note) for signum in ASKING if signum not in ignored}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _attempt(asked: Asked, number: int, stop: Stop) -> restarts.Attempt:
    """Start the job, see it to its end and leave no process behind."""
    try:
        told_in = Path(tempfile.mkdtemp(prefix=".launch-", dir=asked.out)).resolve()
    except OSError as error:
        raise UserError(f"{asked.out}: cannot be written: {error.strerror}") from None
    env = {**os.environ, exit_report.DIRECTORY: str(told_in), exit_report.ATTEMPT: str(number)}
    if sys.stderr.isatty():
        env["HYBRIDPIPE_TERMINAL"] = "1"
    try:
        argv, env = _command(asked, [*asked.program, *asked.words], env)
        job = mpirun.start(argv, env)
    except UserError:
        told_in.rmdir()
        raise
    try:
        ended_because = _wait(job, asked, told_in, stop)
        job.end()
        told, has_begun = exit_report.read(told_in), exit_report.num_up(told_in) > 0
    finally:
        job.end()
        shutil.rmtree(told_in, ignore_errors=True)
    code = 1 if ended_because else job.process.returncode  # not that of the launcher's end by us
    ended = restarts.attempt(code, told, asked.ranks, has_begun)
    if stop.signum is not None and not told:
        because = ended_because
        if ended.code == 128 + signal.SIGUSR1:  # what the signal does to a rank that is not up
            because = "the job was asked to stop before its ranks were up"
        if because:
            return replace(ended, code=128 + stop.signum, cause=because, overdue=bool(ended_because))
    return ended


def _wait(job: mpirun.Job, asked: Asked, told_in: Path, stop: Stop) -> str:
    """Until the launcher has ended, or is to be ended: then why."""
    passed_on = False
    told_at: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(POLL_SECONDS)
            return ""
        now = time.monotonic()
        if told_at is None and any(told_in.glob("rank-*.json")):
            told_at = now
        if told_at is not None and now - told_at > BACKSTOP_SECONDS:
            return f"the job did not end within {BACKSTOP_SECONDS:g} s of a rank's report"
        if stop.signum is None:
            continue
        if stop.seconds() > asked.deadline_seconds:
            return f"the job did not stop within the deadline of {asked.deadline_seconds:g} s"
        if not passed_on and _may_be_told(asked, told_in, stop):
            passed_on = True
            name, left = signal.Signals(stop.signum).name, asked.deadline_seconds - stop.seconds()
            _say(f"{name}: asking the job to save and stop; it is ended after {left:.0f} s")
            job.process.send_signal(signal.SIGUSR1)


def _may_be_told(asked: Asked, told_in: Path, stop: Stop) -> bool:
    """A rank that is still starting would die of the signal. Not to be waited for for ever."""
    half = asked.deadline_seconds / 2
    return exit_report.num_up(told_in) >= asked.ranks or stop.seconds() > half


def _command(asked: Asked, command: Sequence[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The launcher's argument list and environment, on the hosts that were asked for."""
    make, flags = mpirun.mpirun_command, "HYBRIDPIPE_MPIRUN_FLAGS"
    on = f"--host {','.join(f'{host}:{slots}' for host, slots in asked.slots.items())}"
    if asked.launcher == "srun":
        make, flags = mpirun.srun_command, "HYBRIDPIPE_SRUN_FLAGS"
        on = f"--nodelist={','.join(asked.slots)} --nodes={len(asked.slots)}"
    if asked.slots:
        env = {**env, flags: f"{env.get(flags, '')} {on}"}
    argv, added = make(asked.ranks, command, env)
    return argv, env | added


def _on_what_is_left(asked: Asked) -> Asked | None:
    """What to ask for next, on the hosts that answer; None if they are too few."""
    if len(asked.slots) < 2:
        return asked
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda host: _answers(asked, host), asked.slots))
    there = {host: asked.slots[host] for host, answer in zip(asked.slots, answers) if answer}
    if len(there) == len(asked.slots):
        return asked
    ranks = restarts.ranks_left(asked.ranks, asked.min_ranks, sum(there.values()))
    gone = ", ".join(host for host in asked.slots if host not in there)
    if ranks is None:
        _say(f"no answer from {gone}: the others take {sum(there.values())} ranks")
        return None
    _say(f"no answer from {gone}: going on with {ranks} ranks of {asked.ranks}")
    if ranks == asked.ranks or not asked.fixed_plan:
        return replace(asked, ranks=ranks, slots=there)
    _say(f"the plan given is for {asked.ranks} ranks: taking --plan auto")
    return replace(asked, ranks=ranks, slots=there, words=(*asked.words, "--plan", "auto"))


def _answers(asked: Asked, host: str) -> bool:
    """Can a process be started on this host?"""
    return any(_starts(asked, host) for _ in range(PROBES))


def _starts(asked: Asked, host: str) -> bool:
    only = replace(asked, ranks=1, slots={host: asked.slots[host]})
    argv, env = _command(only, ["/bin/true"], dict(os.environ))
    job = mpirun.start(argv, env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return job.process.wait(PROBE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        job.end()


def _report(attempts: Sequence[restarts.Attempt], why: str) -> None:
    """One line at the end: what it came to, and the first cause."""
    last = attempts[-1]
    tries = f" after {len(attempts)} attempts" if len(attempts) > 1 else ""
    if last.code == exit_report.PREEMPTED:
        _say(f"{last.cause}; exit code {last.code}: start it again with --resume auto")
    elif last.code:
        _say(f"failed with exit code {last.code}{tries} ({why}): {last.cause}")
    elif tries:
        _say(f"done{tries}")


def _say(what: str) -> None:
    print(f"hybridpipe launch: {what}", file=sys.stderr, flush=True)
