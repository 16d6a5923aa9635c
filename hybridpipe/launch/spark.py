"""Ranks in a Spark application: the tasks of a barrier stage are places for the ranks of an mpirun.

The first task starts mpirun, and the first task of each other host its daemon there. Not known here: models
and MPI. Invariant: mpirun ends with its task, and Spark ends all tasks with any of them, so no rank remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpipe.errors import REMEDIES, UserError
from hybridpipe.health import exit_report
from hybridpipe.launch import restarts
from hybridpipe.launch.output import Output
from hybridpipe.launch.supervisor import BACKSTOP_SECONDS, POLL_SECONDS
from hybridpipe.planning.checks import positive_int

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext, SparkContext
    from pyspark.sql import DataFrame

FUNCTION, ROWS = "function.pkl", "rows"
# A rank reads whole groups of rows, in any order: of about 1 MiB, also where single rows are large.
ROW_GROUPS = {"parquet.block.size": 2**20, "parquet.page.size.row.check.min": 1}
EXECUTORS_SECONDS = 60.0  # in which executors come up, at the start or after one was lost
DAEMONS_SECONDS = 60.0  # mpirun starts none on a host that has this one's address
# mpirun calls its agent with a host's name and the command of the daemon there, of which this is the text.
_AGENT = '#!/bin/sh\nhost=$1; shift\necho "$*" >"$0.$host.part" && mv "$0.$host.part" "$0.$host"\n'
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Work:
    """Work of all ranks, as every task gets it.

    Args:
        num_ranks: number of ranks.
        words: arguments of Python on each rank.
        payload: for a rank's `FUNCTION`; empty for a config.
        folder: path of a folder that each host makes for itself; ranks find their work there, and leave
            reports and values.
    """

    num_ranks: int
    words: Sequence[str]
    payload: bytes
    folder: Path


@dataclass(frozen=True)
class _HostEnd:
    """End of a host's ranks: their values and reports; of the first host also how mpirun ended."""

    values: Mapping[int, bytes]
    outcomes: Sequence[exit_report.Outcome]
    code: int = 0
    lost: str = ""


def run(
    what: Callable[..., Any] | str | os.PathLike[str],
    num_proc: int,
    data_frame: DataFrame | None = None,
    *,
    data_folder: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Run a function, or train a config, on ranks inside this Spark application.

    Args:
        what: a function, called on each rank, or the path of a config, trained as `hybridpipe train` does.
        num_proc: number of ranks, each in a Spark task of its own; Spark must run as many at once.
        data_frame: rows that the function gets as a data set of dicts (`hybridpipe.data.Parquet`).
        data_folder: new folder for these rows, on a disk that all hosts share; by default a temporary one
            of this host. A config names it in `[data] args`.

    Returns:
        What the function returned, by rank; None for each rank of a config.

    Raises:
        UserError: an argument is wrong, a package or slots are missing, or a rank reported a mistake.
        RuntimeError: a rank failed, or Spark lost a task; one line names it and its host.
    """
    positive_int("num_proc", num_proc)
    if not callable(what) and not isinstance(what, (str, os.PathLike)):
        raise UserError(f"what must be a function or the path of a config, got {what!r}")
    if data_frame is None and data_folder is not None:
        raise UserError("data_folder is for the rows of a data_frame, and none is given")
    if data_frame is not None and data_folder is None and not callable(what):
        raise UserError("a config with a data_frame needs data_folder, which its [data] args name")
    _require("pyspark", "cloudpickle", *([] if data_frame is None else ["pyarrow"]))
    from pyspark.sql import SparkSession

    context = SparkSession.builder.getOrCreate().sparkContext
    _wait_for_slots(context, num_proc)
    with _parquet(data_frame, data_folder, context) as rows:
        work = _work(what, num_proc, rows)
        tasks = context.parallelize(range(num_proc), num_proc).barrier()
        try:
            ends = tasks.mapPartitions(partial(_task, work)).collect()
        except Exception as error:  # of Py4J, whose text is Java's stack
            raise RuntimeError(_spark_reason(str(error), context)) from None
    return _values(ends, num_proc)


def _require(*packages: str) -> None:
    for name in packages:
        try:
            import_module(name)
        except ModuleNotFoundError:
            raise UserError(f"hybridpipe.spark needs {name}, which is missing: {REMEDIES[name]}") from None


def _wait_for_slots(context: SparkContext, num_proc: int) -> None:
    """Wait until Spark runs as many tasks at once; its own check takes 10 minutes to fail."""
    scheduler = context._jsc.sc()
    profile = scheduler.resourceProfileManager().defaultResourceProfile()
    end = time.monotonic() + (0 if scheduler.isLocal() else EXECUTORS_SECONDS)
    while (slots := scheduler.maxNumConcurrentTasks(profile)) < num_proc:
        if time.monotonic() > end:
            raise UserError(f"num_proc must be <= the {slots} tasks that Spark runs at once, got {num_proc}")
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _parquet(
    data_frame: DataFrame | None, folder: str | os.PathLike[str] | None, context: SparkContext
) -> Iterator[Path | None]:
    """Write the rows, and yield their folder; a temporary one is gone afterwards."""
    if data_frame is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="hybridpipe-") as scratch:
        path = Path(scratch, ROWS) if folder is None else Path(folder).absolute()
        if path.exists():
            raise UserError(f"data_folder must be a new folder, and {path} exists")
        try:
            num_rows = _write(data_frame, path)
        except Exception as error:  # of Spark or a function of the user's in the frame
            shutil.rmtree(path, ignore_errors=True)
            raise RuntimeError(_spark_reason(str(error), context)) from None
        _check_all_here(path, num_rows)
        yield path


def _write(data_frame: DataFrame, path: Path) -> int:
    """Write the rows, each executor its own ones; return their number."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    seen = Observation()
    observed = data_frame.observe(seen, count(lit(1)).alias(ROWS))
    observed.write.options(**ROW_GROUPS).parquet(path.as_uri())
    return int(seen.get[ROWS])


def _check_all_here(path: Path, num_rows: int) -> None:
    """Raises UserError if another host has kept rows on a disk of its own."""
    from pyarrow.parquet import read_metadata

    here = sum(read_metadata(file).num_rows for file in path.glob("*.parquet"))
    if here != num_rows:
        shutil.rmtree(path, ignore_errors=True)
        raise UserError(
            f"data_folder must be on a disk that all hosts share: this one sees {here} of {num_rows} rows"
        )


def _work(what: Callable[..., Any] | str | os.PathLike[str], num_ranks: int, rows: Path | None) -> _Work:
    folder = Path(tempfile.gettempdir(), f"hybridpipe-{uuid.uuid4().hex}")
    if callable(what):
        import cloudpickle

        words = ["-m", "hybridpipe.launch.spark_rank", str(folder)]
        return _Work(num_ranks, words, cloudpickle.dumps((what, rows)), folder)
    config = Path(what).absolute()
    out = Path("runs", config.stem).absolute()  # as by default, of the driver's working folder
    return _Work(num_ranks, ["-m", "hybridpipe", "train", str(config), "--out", str(out)], b"", folder)


def _task(work: _Work, _partition: Iterator[int]) -> list[_HostEnd]:
    """Run a task to the end of the ranks. Collective among the tasks."""
    from pyspark import BarrierTaskContext

    context, host = BarrierTaskContext.get(), socket.gethostname()
    hosts = context.allGather(host)
    own, ends = context.partitionId(), []
    try:
        if own == 0:
            ends = [_start_ranks(work, Counter(hosts), context)]
        else:
            daemons = json.loads(context.allGather()[0])
            if host in daemons and hosts.index(host) == own:
                ends = [_start_daemon(work, daemons[host])]
        context.barrier()  # until then each task stands for its rank: Spark ends all if an executor is lost
    finally:
        shutil.rmtree(work.folder, ignore_errors=True)
    return ends


def _start_ranks(work: _Work, hosts: Mapping[str, int], context: BarrierTaskContext) -> _HostEnd:
    """Run mpirun to its end. `hosts` are the slots of each host, this one first."""
    _make_folder(work)
    agent = work.folder / "agent"
    agent.write_text(_AGENT)
    agent.chmod(0o700)
    env = os.environ | {exit_report.DIRECTORY: str(work.folder)}
    if len(hosts) > 1:
        slots = ",".join(f"{host}:{count}" for host, count in hosts.items())
        env["HYBRIDPIPE_MPIRUN_FLAGS"] = f"{env.get('HYBRIDPIPE_MPIRUN_FLAGS', '')} --host {slots}"
        # Without a tree mpirun itself, on this host, calls the agent for each other one.
        env |= {"PRTE_MCA_plm_ssh_agent": str(agent), "PRTE_MCA_plm_ssh_no_tree_spawn": "1"}
    command = [sys.executable, "-m", "hybridpipe.launch.mpirun", str(work.num_ranks), "--"]
    with _ending_with_this([*command, sys.executable, *work.words], env, subprocess.PIPE) as process:
        assert process.stderr is not None
        output = Output(process.stderr)
        context.allGather(json.dumps(_daemons(agent, [*hosts][1:], process)))
        code = _wait(process, work.folder)
        output.close()
    return _end_of(work.folder, code, output.lost())


def _daemons(agent: Path, hosts: Sequence[str], process: subprocess.Popen[bytes]) -> dict[str, str]:
    """Return the command of mpirun's daemon by host, or nothing where mpirun has ended before."""
    files = {host: agent.with_name(f"{agent.name}.{host}") for host in hosts}
    end = time.monotonic() + DAEMONS_SECONDS
    while missing := [host for host, file in files.items() if not file.exists()]:
        if process.poll() is not None:
            return {}
        if time.monotonic() > end:
            raise RuntimeError(f"mpirun has started no daemon on host {', '.join(missing)}")
        time.sleep(POLL_SECONDS)
    # A daemon in the background would not end with its task.
    return {host: file.read_text().replace(" --daemonize ", " ") for host, file in files.items()}


def _start_daemon(work: _Work, command: str) -> _HostEnd:
    """Run mpirun's daemon on this host, the parent of the ranks here, to its end."""
    _make_folder(work)
    with _ending_with_this(["/bin/sh", "-c", command], os.environ) as process:
        code = process.wait()
    if code:  # it ends with 0 even if ranks fail
        raise RuntimeError(f"mpirun's daemon on host {socket.gethostname()} ended with exit code {code}")
    return _end_of(work.folder)


def _make_folder(work: _Work) -> None:
    """Make the folder of this host, with what its ranks need."""
    work.folder.mkdir(mode=0o700, exist_ok=True)  # hosts may share the disk
    (work.folder / FUNCTION).write_bytes(pickle.dumps((sys.path, work.payload)))


@contextlib.contextmanager
def _ending_with_this(
    words: Sequence[str], env: Mapping[str, str], stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is terminated with this context, and with this process, however that ends."""
    set_option = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)

    process = subprocess.Popen(
        words, env=env, stdin=subprocess.DEVNULL, stderr=stderr, preexec_fn=end_with_parent
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Wait for mpirun, and end it where it stays after a rank's report; return its exit code."""
    reported_at: float | None = None
    while process.poll() is None:
        if reported_at is None and exit_report.read(folder):
            reported_at = time.monotonic()
        if reported_at is not None and time.monotonic() - reported_at > BACKSTOP_SECONDS:
            process.terminate()
            break
        time.sleep(POLL_SECONDS)
    return process.wait()


def _end_of(folder: Path, code: int = 0, lost: str = "") -> _HostEnd:
    values = {int(file.stem): file.read_bytes() for file in folder.glob("*.value")}
    return _HostEnd(values, exit_report.read(folder), code, lost)


def _values(ends: Sequence[_HostEnd], num_ranks: int) -> list[Any]:
    """Return the ranks' values, or raise the first cause of their failure."""
    outcomes = sorted((each for end in ends for each in end.outcomes), key=lambda outcome: outcome.time)
    first = ends[0]  # mpirun's
    ended = restarts.attempt(first.code, outcomes, num_ranks, has_begun=bool(outcomes), lost=first.lost)
    if ended.code == restarts.MISTAKE:
        raise UserError(ended.cause)
    if ended.code:
        raise RuntimeError(ended.cause)
    values = {rank: value for end in ends for rank, value in end.values.items()}
    return [pickle.loads(values[rank]) if rank in values else None for rank in range(num_ranks)]


def _spark_reason(text: str, context: SparkContext) -> str:
    """Return why Spark lost a task, in one line, from a text with Java's stack."""
    said = (
        re.search(r"ExecutorLostFailure .*?Reason: (.*)", text)
        or re.search(r"Traceback \(.*\n(?:[ \t].*\n)+(\S.*)", text)  # the last line of a task's own
        or re.search(r"Exception: ((?!Job aborted).*)", text)
    )
    cause = (said[1] if said else text.splitlines()[0]).partition(". Consider ")[0].strip()
    task = re.search(r"barrier task \w+\((\d+), (\d+)\)", text)
    return f"Spark lost {_place(context, *map(int, task.groups()))}: {cause}" if task else f"Spark: {cause}"


def _place(context: SparkContext, stage: int, index: int) -> str:
    """Return a task with its executor and host."""
    tasks = context._jsc.sc().statusStore().taskList(stage, 0, 2**31 - 1)
    for task in map(tasks.apply, range(tasks.size())):
        if task.index() == index:
            return f"task {index} on executor {task.executorId()}, host {task.host()}"
    return f"task {index}"
