"""Pipeline and data parallelism for PyTorch, planned from measurements, over MPI and Horovod.

Importing the package imports nothing else: its names are imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridpipe.errors import suggesting
from hybridpipe.version import __version__

if TYPE_CHECKING:
    from hybridpipe.checkpoint.policy import Checkpointing
    from hybridpipe.config.options import (
        DataOptions,
        GroupOptions,
        PlanOptions,
        RankOptions,
        UpdateOptions,
    )
    from hybridpipe.health.preemption import Preempted
    from hybridpipe.optim.nonfinite import NotFinite
    from hybridpipe.planning.cluster import Cluster
    from hybridpipe.planning.plan import Plan, StageSpec
    from hybridpipe.planning.profile import LayerProfile, ModelProfile
    from hybridpipe.training.callbacks import Callback
    from hybridpipe.training.metrics import MinibatchRecord
    from hybridpipe.training.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpointing",
    "Cluster",
    "DataOptions",
    "GroupOptions",
    "LayerProfile",
    "MinibatchRecord",
    "ModelProfile",
    "NotFinite",
    "Plan",
    "PlanOptions",
    "Preempted",
    "RankOptions",
    "StageSpec",
    "Trainer",
    "UpdateOptions",
    "__version__",
]
_LATER = {  # loaded at the first use, from these modules
    "Callback": "training.callbacks",
    "Checkpointing": "checkpoint.policy",
    "Cluster": "planning.cluster",
    "DataOptions": "config.options",
    "GroupOptions": "config.options",
    "LayerProfile": "planning.profile",
    "MinibatchRecord": "training.metrics",
    "ModelProfile": "planning.profile",
    "NotFinite": "optim.nonfinite",
    "Plan": "planning.plan",
    "PlanOptions": "config.options",
    "Preempted": "health.preemption",
    "RankOptions": "config.options",
    "StageSpec": "planning.plan",
    "Trainer": "training.trainer",
    "UpdateOptions": "config.options",
}
# Classes that name the argument meant where one is misspelt. Planning, of which some are, cannot import that.
_SUGGESTING = (
    "Plan",
    "StageSpec",
    "PlanOptions",
    "UpdateOptions",
    "DataOptions",
    "RankOptions",
    "GroupOptions",
)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        found = getattr(import_module(f"hybridpipe.{_LATER[name]}"), name)
        globals()[name] = suggesting(found) if name in _SUGGESTING else found  # once
        if name == "Trainer":  # a mistake in its arguments is told before it is made
            import_module("hybridpipe.health.failure").install()
        return found
    if name in ("callbacks", "spark"):
        return import_module(f"hybridpipe.{name}")
    raise AttributeError(f"module 'hybridpipe' has no attribute {name!r}")
