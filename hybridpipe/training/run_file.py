"""Run file: what a training begins with, for OUT/run.json.

Known here are trainer and machines; not the folder. Invariant: rank 0 has the facts of all ranks.
"""

import platform
from datetime import UTC, datetime
from typing import Any

from hybridpipe.checkpoint.snapshot import software
from hybridpipe.comm.groups import this_host
from hybridpipe.comm.mpi import MPI
from hybridpipe.report.run import RunStart
from hybridpipe.report.tables import shown
from hybridpipe.training.view import TrainerView


def run_start(trainer: TrainerView, config: str, settings: dict[str, Any], plan: str) -> RunStart | None:
    """Describe the training on rank 0, without notes; None elsewhere. Collective.

    Args:
        config: name of the config or the script.
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
        hosts=tuple(host for host, _ in machines),
        num_cores=tuple(cores for _, cores in machines),
        measured=choice is not None,
        device=str(trainer.device),
        versions={**software(), "MPI": MPI.Get_library_version().split(",")[0].strip("\x00\n ")},
        candidates=() if choice is None else tuple(shown(choice.candidates, choice.plan)),
    )
