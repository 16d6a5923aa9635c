"""Supervisor of a training under mpirun or srun: stop signals, deadline, exit code and restarts.

A signal to stop reaches the ranks as USR1, which makes them save. The exit code is the one that the ranks
reported; mpirun's says little. Not known here: torch and MPI, so that no rank's failure reaches this process.
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

from hybridpipe import environment
from hybridpipe.checkpoint.directory import checkpoints
from hybridpipe.errors import UserError
from hybridpipe.health import exit_report
from hybridpipe.launch import mpirun, restarts, slurm

# Signals to stop: users, batch systems and shells send different ones. mpirun itself would kill the ranks two
# seconds after a TERM, too soon to save.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
UNLESS_IGNORED = (signal.SIGINT, signal.SIGHUP)  # nohup ignores them, and so do shells for background jobs
# Time from a rank's exit report until the job is ended. It is needed because MPI_Abort hung in 1 of 10 runs
# with Horovod. A rank in such a hang ends itself after 2 s, and mpirun notices that within 2 s.
BACKSTOP_SECONDS = 8.0
# A working host starts a process in a fraction of a second, but one start in 25 hung with Open MPI 5.0.11.
PROBE_SECONDS = 10.0
PROBES = 3
POLL_SECONDS = 0.05
PROGRAM = (sys.executable, "-m", "hybridpipe")
# What `train` is given to resume. A script resumes by itself, if at all.
RESUME = ("--resume", "auto")
NOT_UP = "the job was asked to stop before its ranks were up"
LAUNCHER_LOG = "launcher.log"  # in OUT: what the launcher told of ends that ranks have told better
SCRIPT_RESUMES = 'a script resumes with fit(checkpoint=..., resume="auto")'
# srun of Slurm 22.05 returned 0 when it could launch no task: what runs leaves a mark.
# And a rank that has not begun to listen ignores USR1, of which it would die: Slurm sends it at any time.
_MARK = f'trap "" USR1; true 2>/dev/null >"${exit_report.DIRECTORY}/{exit_report.STARTED}"; exec "$@"'
MARKED = ("/bin/sh", "-c", _MARK, "sh")


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `hybridpipe launch`.

    Args:
        words: the command of every rank, such as ("train", "digits.toml", "--plan", "auto").
        out: the training's folder, on a disk that all hosts share.
        checkpoints: the training's folder of checkpoints; None until a script's ranks tell it.
        ranks: number of ranks.
        launcher: "mpirun" or "srun".
        slots: the most ranks of each host; empty for this host, or the whole Slurm allocation.
        max_restarts: the most attempts after the first.
        min_ranks: the fewest ranks to continue with.
        deadline_seconds: from a signal to stop until the job is ended.
        fixed_plan: True if the plan is a file, which fits one number of ranks only.
        resumes: True if the command resumes by itself: checkpoints in the folder are this training's.
        resume_words: further words with which a restart resumes.
        program: the command before `words`.
        requeue: return the Slurm job to the queue where it can continue.
    """

    words: tuple[str, ...]
    out: Path
    checkpoints: Path | None
    ranks: int
    launcher: str = "mpirun"
    slots: Mapping[str, int] = field(default_factory=dict)
    max_restarts: int = 0
    min_ranks: int = 1
    deadline_seconds: float = 100.0
    fixed_plan: bool = False
    resumes: bool = False
    resume_words: tuple[str, ...] = RESUME
    program: tuple[str, ...] = PROGRAM
    requeue: bool = False


class Stop:
    """The first signal to stop, and its time; later signals change nothing."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.since = 0.0

    def note(self, signum: int, _frame: object = None) -> None:
        """Record a signal; the handler of all of them."""
        if self.signum is None:
            self.signum, self.since = signum, time.monotonic()

    def seconds(self) -> float:
        """Seconds since the signal; 0 without one."""
        return 0.0 if self.signum is None else time.monotonic() - self.since


def places(
    ranks: int | None, hosts: Mapping[str, int], env: Mapping[str, str] = os.environ
) -> tuple[int, Mapping[str, int]]:
    """Number of ranks and the most ranks of each host, by default those of the Slurm allocation.

    Raises:
        UserError: no number is known, the hosts take fewer ranks, or Slurm's variables make no sense.
    """
    if "SLURM_JOB_ID" in env and not hosts:
        ranks = ranks or mpirun.count_of("SLURM_NTASKS", env)
        names = slurm.hosts(env)
        hosts = {name: -(-ranks // len(names)) for name in names}
    ranks = ranks or sum(hosts.values())
    if not ranks:
        raise UserError("launch: needs --ranks or --hosts outside of a Slurm allocation, got neither")
    if hosts and sum(hosts.values()) < ranks:
        raise UserError(f"launch: --ranks must be <= the {sum(hosts.values())} ranks of --hosts, got {ranks}")
    return ranks, hosts


def of_script(command: Sequence[str], name: str = "launch") -> LaunchOptions:
    """Options for any command, such as ("python", "train.py"); reports go to the working directory.

    Args:
        command: the words after --.
        name: of the command of hybridpipe, for messages.

    Raises:
        UserError: there is no such program, or no such Python file.
    """
    if not command or mpirun.find_program(command[0]) is None:
        got = " ".join(command) or "nothing"
        wanted = "-- train CONFIG ..., or by -- python train.py ..."
        raise UserError(f"{name}: must be followed by {wanted}, got {got}")
    if Path(command[0]).name.startswith("python") and command[1:] and not command[1].startswith("-"):
        try:
            Path(command[1]).open().close()
        except OSError as error:
            raise UserError(f"{name}: {command[1]}: {error.strerror}") from None
    return LaunchOptions(tuple(command), Path(), None, 1, resume_words=(), program=())


def supervise(options: LaunchOptions) -> int:
    """Run the job to its end, with restarts after failures.

    Returns:
        The exit code of the last attempt, or 75 if only a signal to stop prevented a restart from a
        checkpoint.

    Raises:
        UserError: the folder cannot be written, or the launcher cannot be started.
    """
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{options.out}: cannot be made: {error.strerror}") from None
    attempts: list[restarts.Attempt] = []
    found = _present(options)
    following: LaunchOptions | None = options
    with stop_signals() as stop:
        while following is not None:
            ended, told = _attempt(following, len(attempts), stop)
            attempts.append(ended)
            if told is not None and not options.resume_words:
                options = replace(options, checkpoints=told, resumes=True)
            why = restarts.no_restart_reason(attempts, options.max_restarts)
            following = _on_remaining_hosts(options) if why is None and stop.signum is None else None
            has_saved = _has_saved(options, found)
            if stop.signum is not None:
                if why is None and has_saved:
                    attempts[-1] = restarts.stopped(ended)
                why, following = "the job was asked to stop", None
            if following is not None:
                if has_saved:
                    following = replace(following, words=(*following.words, *options.resume_words))
                start = "the last good checkpoint" if has_saved else _anew(options)
                _say(f"attempt {len(attempts) - 1}: {ended.cause}; restarting from {start}")
        _report(attempts, why or f"--min-ranks is {options.min_ranks}", options)
        if options.requeue and attempts[-1].code == exit_report.PREEMPTED and slurm.requeue(os.environ):
            _say("the job returns to the queue, and starts again by itself")
    return attempts[-1].code


def _anew(options: LaunchOptions) -> str:
    """Say where a restart without a checkpoint begins: perhaps at the checkpoint of --resume PATH."""
    if options.checkpoints is None:  # a restart was asked for, and a script may save in a way of its own
        return f"its beginning: {SCRIPT_RESUMES}, and no rank got there"
    return "where it began"


def _present(options: LaunchOptions) -> set[tuple[str, int]]:
    """Names and inodes of the checkpoints. A checkpoint may be replaced by another of the same name."""
    present = set()
    for each in [] if options.checkpoints is None else checkpoints(options.checkpoints):
        with contextlib.suppress(FileNotFoundError):  # a rank of a lost host may still delete it
            present.add((each.name, each.stat().st_ino))
    return present


def _has_saved(options: LaunchOptions, found: set[tuple[str, int]]) -> bool:
    """True if a checkpoint of this training exists.

    Checkpoints `found` before the first attempt belong to another training, unless this one resumes them: an
    attempt that is lost early has not yet renamed the other's folder.
    """
    present = _present(options)
    return bool(present if options.resumes else present - found)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Record signals to stop within the context."""
    stop = Stop()
    ignored = {each for each in UNLESS_IGNORED if signal.getsignal(each) == signal.SIG_IGN}
    before = {signum: signal.signal(signum, stop.note) for signum in STOP_SIGNALS if signum not in ignored}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # blocked by __main__
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _attempt(options: LaunchOptions, number: int, stop: Stop) -> tuple[restarts.Attempt, Path | None]:
    """Start the job, wait for its end and leave no process behind.

    Returns:
        Its end, and the folder of checkpoints that its command resumes from by itself, if a rank named one.
    """
    try:
        reports = Path(tempfile.mkdtemp(prefix=".launch-", dir=options.out)).resolve()
    except OSError as error:
        raise UserError(f"{options.out}: cannot be written: {error.strerror}") from None
    env = {**os.environ, exit_report.DIRECTORY: str(reports), exit_report.ATTEMPT: str(number)}
    env |= mpirun.terminal()
    try:
        argv, env = _command(options, [*MARKED, *mpirun.with_path([*options.program, *options.words])], env)
        job = mpirun.start(argv, env)
    except UserError:
        reports.rmdir()
        raise
    try:
        ended_because = _wait(job, options, reports, stop)
        job.end()
        outcomes, has_begun = exit_report.read(reports), exit_report.has_begun(reports)
        has_started, told = exit_report.has_started(reports), exit_report.continued(reports)
    finally:
        job.end()
        shutil.rmtree(reports, ignore_errors=True)
    code = 1 if ended_because else job.process.returncode  # a launcher ended from here has no code of its own
    output = job.output
    lost = "" if output is None else output.lost()
    ended = restarts.attempt(code, outcomes, options.ranks, has_begun, has_started, lost)
    if stop.signum is not None and not outcomes and ended_because:
        ended = replace(ended, code=128 + stop.signum, cause=ended_because, overdue=True)
        if ended_because == NOT_UP:  # nothing is trained, and nothing lost
            ended = replace(ended, code=exit_report.PREEMPTED, overdue=False)
    if output is not None and output.boxes():
        _keep(output.boxes(), ended, options)
    return ended, told


def _keep(boxes: str, ended: restarts.Attempt, options: LaunchOptions) -> None:
    """Print the launcher's report of the end if there is no other; a training keeps the rest in a file."""
    if ended.cause.endswith(restarts.NOT_TOLD):
        sys.stderr.write(boxes)
    elif options.resume_words and ended.code != restarts.MISTAKE:  # then OUT may be another training's
        with contextlib.suppress(OSError), (options.out / LAUNCHER_LOG).open("a", encoding="utf-8") as log:
            log.write(boxes)


def _wait(job: mpirun.Job, options: LaunchOptions, reports: Path, stop: Stop) -> str:
    """Wait until the launcher has ended, or must be ended; return the reason for the latter, else ""."""
    passed_on = 0
    reported_at: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(POLL_SECONDS)
            return ""
        now = time.monotonic()
        if reported_at is None and any(reports.glob("rank-*.json")):
            reported_at = now
        if reported_at is not None and now - reported_at > BACKSTOP_SECONDS:
            return f"the job did not end within {BACKSTOP_SECONDS:g} s of a rank's report"
        if stop.signum is None:
            continue
        num_up, is_over = exit_report.num_up(reports), stop.seconds() > options.deadline_seconds
        if not num_up and not options.resume_words and (is_over or stop.signum == signal.SIGINT):
            return f"{NOT_UP}, as a script's are in fit(checkpoint=...)"  # it may never be
        if is_over and num_up < options.ranks:
            return NOT_UP
        if is_over:
            return f"the job did not stop within the deadline of {options.deadline_seconds:g} s"
        # Once every rank listens; a script with a handler of its own is asked at half of the deadline.
        due = 2 if num_up >= options.ranks else int(stop.seconds() > options.deadline_seconds / 2)
        if due > passed_on:
            # Before anything is said: Slurm's answers for that may take longer than its KillWait.
            job.process.send_signal(signal.SIGUSR1)
            if not passed_on:
                _say_asked(options, stop, stop.signum)
            passed_on = due


def _say_asked(options: LaunchOptions, stop: Stop, signum: int) -> None:
    """Say that the ranks are asked to stop, and how long they have: Slurm, which sends TERM, may not wait."""
    left = options.deadline_seconds - stop.seconds()
    if signum == signal.SIGTERM and "SLURM_JOB_ID" in os.environ and not slurm.is_running(os.environ):
        left = min(left, (slurm.kill_wait() or left) - stop.seconds())
    name = signal.Signals(signum).name
    _say(f"{name}: asking the job to save and stop; it is ended after {max(left, 0):.0f} s")


def _command(
    options: LaunchOptions, command: Sequence[str], env: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's argument list and environment for the given hosts."""
    make, flags = mpirun.mpirun_command, "HYBRIDPIPE_MPIRUN_FLAGS"
    on = f"--host {','.join(f'{host}:{slots}' for host, slots in options.slots.items())}"
    if options.launcher == "srun":
        make, flags = mpirun.srun_command, "HYBRIDPIPE_SRUN_FLAGS"
        on = f"--nodelist={','.join(options.slots)} --nodes={len(options.slots)}"
    if options.slots:
        env = {**env, flags: f"{env.get(flags, '')} {on}"}
    argv, added = make(options.ranks, command, env)
    return argv, env | added


def _on_remaining_hosts(options: LaunchOptions) -> LaunchOptions | None:
    """Return the options for the hosts that answer; None if they take too few ranks."""
    if len(options.slots) < 2:
        return options
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda host: _answers(options, host), options.slots))
    there = {host: options.slots[host] for host, answer in zip(options.slots, answers) if answer}
    if len(there) == len(options.slots):
        return options
    ranks = restarts.ranks_left(options.ranks, options.min_ranks, sum(there.values()))
    gone = ", ".join(host for host in options.slots if host not in there)
    if ranks is None:
        _say(f"no answer from {gone}: the remaining hosts take {sum(there.values())} ranks")
        return None
    _say(f"no answer from {gone}: continuing with {ranks} of {options.ranks} ranks")
    if ranks == options.ranks or not options.fixed_plan:
        return replace(options, ranks=ranks, slots=there)
    _say(f"the given plan is for {options.ranks} ranks: using --plan auto")
    return replace(options, ranks=ranks, slots=there, words=(*options.words, "--plan", "auto"))


def _answers(options: LaunchOptions, host: str) -> bool:
    """True if a process can be started on this host."""
    return any(_starts(options, host) for _ in range(PROBES))


def _starts(options: LaunchOptions, host: str) -> bool:
    only = replace(options, ranks=1, slots={host: options.slots[host]})
    argv, env = _command(only, ["/bin/true"], dict(os.environ))
    job = mpirun.start(argv, env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return job.process.wait(PROBE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        job.end()


def _report(attempts: Sequence[restarts.Attempt], why: str, options: LaunchOptions) -> None:
    """Print the result and the first cause of a failure, in one line."""
    last = attempts[-1]
    tries = f" after {len(attempts)} attempts" if len(attempts) > 1 else ""
    if last.code == exit_report.PREEMPTED:
        _say(f"{last.cause}; exit code {last.code}: {_how_to_go_on(options)}")
    elif last.code:
        _say(f"failed with exit code {last.code}{tries} ({why}): {last.cause}")
    elif tries:
        _say(f"done{tries}")


def _how_to_go_on(options: LaunchOptions) -> str:
    if options.resume_words:
        return f"start it again with {' '.join(options.resume_words)}"
    return "start it again" if options.resumes else f"{SCRIPT_RESUMES}, and this one did not call it"


def _say(what: str) -> None:
    print(f"hybridpipe: {environment.group_prefix()}{what}", file=sys.stderr, flush=True)
