"""Batch script of `hybridpipe slurm`: printed, or given to sbatch.

Not known here: the text itself (`launch.batch`). Invariant: without --submit nothing is started or written.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridpipe.errors import UserError
from hybridpipe.launch.batch import Batch, limit_seconds, script


def slurm(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the script, or submit it; return 0, or sbatch's exit code.

    Raises:
        UserError: the ranks of a node are not given, the command resumes from elsewhere, the time limit
            leaves no time to train, there is no folder for the output, no such environment, or no sbatch.
    """
    if command[0] == "train" and any(word.partition("=")[0] == "--resume" for word in command):
        why = "the job resumes with --resume auto, also when it is requeued"
        raise UserError(f"slurm: {why}: leave --resume out, or begin with hybridpipe import")
    _check_limit(options)
    _check_output(options.output)
    text = script(batch_of(options, command), ["hybridpipe", *sys.argv[1:]])
    if not options.submit:
        print(text, end="")
        return 0
    try:
        return subprocess.run(["sbatch"], input=text, text=True).returncode
    except FileNotFoundError:
        raise UserError("slurm: no sbatch on the PATH: without --submit the script is printed") from None


def batch_of(options: argparse.Namespace, command: Sequence[str]) -> Batch:
    """Return the script's options. Raises UserError as `slurm` does."""
    venv = _venv(options.venv)
    return Batch(
        command=tuple(command),
        nodes=options.nodes,
        ntasks_per_node=ntasks_per_node(options),
        cpus_per_task=options.cpus_per_task,
        gpus_per_node=options.gpus_per_node,
        mem=options.mem,
        time=options.time,
        account=options.account,
        partition=options.partition,
        output=options.output,
        extra=tuple(options.sbatch),
        notice_seconds=options.notice,
        launcher=options.launcher,
        max_restarts=options.max_restarts,
        modules=tuple(options.modules),
        venv=venv,
        python=sys.executable if venv is None else f"{venv}/bin/python",
        container=options.container,
    )


def ntasks_per_node(options: argparse.Namespace) -> int:
    """Return the ranks of a node, by default one a GPU. Raises UserError if neither is given."""
    found: int | None = options.ntasks_per_node or options.gpus_per_node
    if found is None:
        raise UserError("slurm: needs --ntasks-per-node or --gpus-per-node, got neither")
    return found


def _check_limit(options: argparse.Namespace) -> None:
    """Refuse a job that would be asked to stop when it begins, and requeue itself for ever."""
    if options.time is not None and limit_seconds(options.time) <= options.notice:
        why = f"must be longer than --notice, {options.notice} s, at which the job is asked to save"
        raise UserError(f"slurm: --time: {why}, got {options.time}")


def _check_output(output: str | None) -> None:
    """Refuse a folder that is not there: Slurm ends the job without a word. Patterns (%j) are Slurm's."""
    folder = Path(output or "").parent
    if "%" not in str(folder) and not folder.is_dir():
        raise UserError(f"slurm: --output: {folder}: no such folder, and Slurm makes none: mkdir -p {folder}")


def _venv(given: Path | None) -> str | None:
    """Return the environment to activate, by default that of this command; None if that is none."""
    folder = Path(sys.prefix) if given is None else given.absolute()
    if (folder / "bin/activate").is_file():
        return str(folder)
    if given is not None:
        raise UserError(f"slurm: --venv: {folder}/bin/activate: does not exist")
    return None
