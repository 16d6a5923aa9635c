"""Pipeline and data parallelism for PyTorch, planned from measurements, over MPI and Horovod.

Importing the package imports neither torch nor MPI; `Trainer` is imported on first access.
"""

from typing import TYPE_CHECKING, Any

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.version import __version__

if TYPE_CHECKING:
    from hybridpipe.training.trainer import Trainer

__all__ = ["Cluster", "LayerProfile", "ModelProfile", "Plan", "StageSpec", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from hybridpipe.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'hybridpipe' has no attribute {name!r}")
