"""Start: what a training begins with, for OUT/run.json.

Known here are trainer and machines; not the folder. Invariant: rank 0 has the facts of all ranks.
"""

import math
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridpipe.checkpoint.snapshot import software
from hybridpipe.comm.communicators import this_host
from hybridpipe.comm.mpi import MPI
from hybridpipe.optim.combined import kind_of
from hybridpipe.report.tables import shown
from hybridpipe.run_folder.data import RunStart
from hybridpipe.training.view import TrainerView

GIT_SECONDS = 5.0  # for its answer; then the commit is left out


def run_start(trainer: TrainerView, config: str, settings: dict[str, Any], plan: str) -> RunStart | None:
    """Describe the training on rank 0, without notes; None elsewhere. Collective.

    Args:
        config: path of the config or the script, and what overrides it.
        settings: by table, those that are not the defaults.
        plan: a plan's name or the path of a plan.json.
    """
    machines = trainer.world.gather((platform.node(), this_host(trainer.world).num_cores))
    if machines is None:
        return None
    choice = trainer.choice
    return RunStart(
        config=config,
        settings=settings,
        plan_source=plan,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        commit=commit(Path(config.partition(" with --set ")[0]).parent),
        hosts=tuple(host for host, _ in machines),
        num_cores=tuple(cores for _, cores in machines),
        measured=choice is not None,
        device=str(trainer.device),
        versions={**software(), "MPI": MPI.Get_library_version().split(",")[0].strip("\x00\n ")},
        candidates=() if choice is None else tuple(shown(choice.candidates, choice.plan)),
    )


def commit(folder: Path) -> str:
    """Return the git commit of a folder, with "-dirty" if files differ from it; "" outside of git."""
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(
            describe, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a slow file system
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def optimizer_settings(trainer: TrainerView) -> dict[str, Any]:
    """Return the optimizer of this rank, its options and what goes with it; nothing if it trains nothing."""
    update, rule = trainer.worker.executor.update, trainer.rule
    if update.optimizer is None:
        return {}
    first, *others = update.given.options
    found = {
        "type": kind_of(update.optimizer),
        **first,
        "parameter_groups": 1 + len(others) if others else None,
        "lr_scheduler": None if update.scheduler is None else type(update.scheduler).__name__,
        "clip_grad_norm": rule.clip_grad_norm,
    }
    return {name: _plain(value) for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return an option as JSON has it, or else as text."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    finite = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if finite else str(value)
