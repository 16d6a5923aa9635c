"""Batch scripts of Slurm: from options to text. Pure: processes, files and this machine are not known here.

Invariant: the text is a whole script for bash; words of the user reach their programs as they were given.
"""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

NOTICE_SECONDS = 120
# The process that Slurm sends its notice to becomes the supervisor, which until it listens ignores it.
EXEC = """trap '' USR1
exec """
ASKED = """trap 'asked=1' USR1
asked="""
ASKED_ALREADY = """if [ $asked ]; then
  echo "$(date '+%F %T') the notice came before training began: the job returns to the queue"
  scontrol requeue "$SLURM_JOB_ID"; exit 75
fi"""
# The log goes on for days, and the clock in its lines has no date.
START = "start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${SLURM_JOB_NODELIST:-}"
BEGIN = f"""echo "$(date '+%F %T') job ${{SLURM_JOB_ID:-}}, {START}\""""
EXAMPLE_ABOUT = """\
# Trains as a Slurm job. Submit it from the repository; options of sbatch override the lines above:
#   sbatch launch/slurm.sbatch examples/digits.toml --plan auto --out runs/digits
#   sbatch launch/slurm.sbatch -- python train.py                      a script with fit(..., resume="auto")
#   sbatch --ntasks-per-node=4 --cpus-per-task=16 --gpus-per-task=1 launch/slurm.sbatch CONFIG     4 GPUs
#   sbatch --nodes=4 --export=ALL,LAUNCHER=mpirun launch/slurm.sbatch CONFIG
# `srun -N 2 -n 4 --mpi=pmix .venv/bin/python -m hybridpipe doctor` checks the cluster (on Debian, Slurm's
# pmix plugin needs the package libpmix-dev on every node). `hybridpipe slurm` writes a script for one job.
#
# Only this script may get the signal (B:): mpirun's daemons would die of it, and starting ranks miss it.
# MAX_RESTARTS: 3 by default; with MIN_RANKS (and sbatch --no-kill) also on the hosts that are left."""
EXAMPLE_SETUP = """set -euo pipefail

python=${PYTHON:-$PWD/.venv/bin/python}   # Slurm runs a copy of this script, in the folder of submission
[ -x "$python" ] || python=$(type -P python)
if [ "${1:-}" = -- ]; then shift; else set -- train "$@" --resume auto; fi"""
EXAMPLE_LAUNCH = """--launcher "${LAUNCHER:-srun}" --max-restarts "${MAX_RESTARTS:-3}" \\
  ${MIN_RANKS:+--min-ranks "$MIN_RANKS"} --requeue -- "$@" """.rstrip()


@dataclass(frozen=True)
class Batch:
    """Options of a batch script; None leaves a choice to Slurm.

    Args:
        command: of every rank, such as ("train", "digits.toml") or ("python", "train.py").
        nodes: number of hosts.
        ntasks_per_node: ranks of each host.
        cpus_per_task: cores of each rank, which are also its threads.
        gpus_per_node: GPUs of each host, all seen by all of its ranks.
        mem: memory of each host, such as "64G".
        time: limit, such as "01:00:00"; after it the job is requeued.
        account: to charge.
        partition: to run in.
        output: file of what the job prints; %j is the job's number.
        extra: further options of sbatch, such as "--qos=high".
        notice_seconds: from the request to save until the time limit.
        launcher: "srun" or "mpirun".
        max_restarts: restarts after a failure, within the job.
        modules: to load.
        venv: environment to activate; None for none.
        python: that runs the supervisor.
        container: image in which the ranks run, by apptainer; None for none.
    """

    command: tuple[str, ...]
    nodes: int
    ntasks_per_node: int
    cpus_per_task: int = 1
    gpus_per_node: int | None = None
    mem: str | None = None
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    output: str | None = None
    extra: tuple[str, ...] = ()
    notice_seconds: int = NOTICE_SECONDS
    launcher: str = "srun"
    max_restarts: int = 3
    modules: tuple[str, ...] = ()
    venv: str | None = None
    python: str = "python"
    container: str | None = None

    @property
    def name(self) -> str:
        """Name of the job: that of the config or script, else of the program."""
        files = [word for word in self.command if word.endswith((".toml", ".py"))]
        name = PurePath(files[0]).stem if files else PurePath(self.command[0]).name
        return re.sub(r"[^\w.-]", "_", name)


def limit_seconds(time: str) -> float:
    """Seconds of a time limit as Slurm takes it, such as "30", "1:30" or "1-12"; infinity for "0"."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def script(batch: Batch, made_by: Sequence[str] = ()) -> str:
    """Text of a job's script.

    Args:
        batch: what to run, and where.
        made_by: the command line that asked for it, for the script's comment.
    """
    words = " ".join(shlex.join(made_by).split())
    about = [f"# Made by `{words}`."] if words else []
    about.append("# Submit it with sbatch from the folder that its paths begin in.\n#")
    return _assembled(batch, [*about, _about(batch)], [*_setup(batch)], [*_launch(batch)])


def example() -> str:
    """Text of launch/slurm.sbatch, which takes a config and more when it is submitted."""
    batch = Batch(("hybridpipe",), nodes=2, ntasks_per_node=2, time="01:00:00")
    launch = f'{EXEC}"$python" -m hybridpipe launch {EXAMPLE_LAUNCH}'
    return _assembled(batch, [EXAMPLE_ABOUT, "#", _about(batch)], [EXAMPLE_SETUP], [launch])


def _assembled(batch: Batch, about: Sequence[str], setup: Sequence[str], launch: Sequence[str]) -> str:
    shell = "#!/bin/bash -l" if batch.modules else "#!/usr/bin/env bash"  # a login shell knows `module`
    options = [f"#SBATCH {option}" for option in _options(batch)]
    return "\n".join([shell, *options, *about, *setup, BEGIN, "", *launch, ""])


def _options(batch: Batch) -> Iterator[str]:
    """Yield the options of sbatch."""
    output = f"{batch.name}-%j.log" if batch.output is None else batch.output
    given = {
        "job-name": batch.name,
        "nodes": batch.nodes,
        "ntasks-per-node": batch.ntasks_per_node,
        "cpus-per-task": batch.cpus_per_task,
        "gpus-per-node": batch.gpus_per_node,
        "mem": batch.mem,
        "account": batch.account,
        "partition": batch.partition,
        "time": batch.time,
        "output": output,
        "open-mode": "append",  # a requeued job continues its file
        "requeue": "",
        "signal": f"B:USR1@{batch.notice_seconds}",
    }
    for name, value in given.items():
        if value is not None:
            yield f"--{name}={shlex.quote(str(value))}" if value != "" else f"--{name}"
    yield from batch.extra


def _about(batch: Batch) -> str:
    return f"""\
# Slurm sends USR1 {batch.notice_seconds} seconds before the time limit to `hybridpipe launch`, which this
# script becomes, and which passes it on once every rank listens. The ranks save, and stop with code 75, as
# when the job is preempted or requeued. The job returns to the queue and resumes from its last good
# checkpoint. After the loss of a rank it is restarted at once, within the job."""


def _setup(batch: Batch) -> Iterator[str]:
    """Yield the lines that make the environment; modules and venvs use variables that are not set."""
    if batch.modules:
        yield f"module load {shlex.join(batch.modules)} || exit 1"
    if batch.venv is not None:
        yield f". {shlex.quote(f'{batch.venv}/bin/activate')} || exit 1"
    yield "set -euo pipefail"
    yield f"python={shlex.quote(batch.python)}"


def _launch(batch: Batch) -> Iterator[str]:
    """Yield the lines that check the cluster and train."""
    base = f'"$python" -m hybridpipe launch --launcher {batch.launcher}'
    deadline = batch.notice_seconds * 5 // 6
    yield "# What is missing on these hosts is told before training begins; not again after a requeue."
    yield ASKED
    yield 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then'
    yield f"  {base} -- {shlex.join(_of_ranks(batch, ('hybridpipe', 'doctor')))}"
    yield "fi"
    yield ASKED_ALREADY
    yield ""
    yield f"{EXEC}{base} --max-restarts {batch.max_restarts} --deadline {deadline} --requeue \\"
    yield f"  -- {shlex.join(_of_ranks(batch, _resuming(batch.command)))}"


def _resuming(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that continues when the job is requeued; a script does so by itself."""
    return (*command, "--resume", "auto") if command[0] == "train" else command


def _of_ranks(batch: Batch, command: tuple[str, ...]) -> tuple[str, ...]:
    """Return what each rank runs: the command itself, or apptainer that runs it in the image."""
    if batch.container is None:
        return command
    gpus = ("--nv",) if batch.gpus_per_node else ()
    inside = ("hybridpipe", *command) if command[0] == "train" else command
    return ("apptainer", "exec", *gpus, batch.container, *inside)
