"""BestCheckpoint: keeps the checkpoint whose validation was the best.

Not known here: what a checkpoint holds. Invariant: metrics are the same on all ranks, so all save together.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridpipe.callbacks.metric import Best
from hybridpipe.checkpoint.resume import load_validated
from hybridpipe.errors import suggesting
from hybridpipe.training.callbacks import Callback, Run


@suggesting
class BestCheckpoint(Callback):
    """Saves a checkpoint after each validation that is better than all before it.

    The training waits until it is published. `hybridpipe export` and `Trainer.resume` take the folder.

    Args:
        folder: of its own, not that of the training's checkpoints, on a disk that all ranks share.
        metric, mode, min_delta: when a value is better (`metric.Best`).
        keep: number of the best checkpoints that stay.
        restore: when `fit` ends, the model has the weights of the best validation, or the averages that
            `EMA` has kept by then; steps, optimizer and the training's own checkpoints stay as they are.

    Raises:
        ValueError: an argument is out of range; in `fit`: there is no validation, or it has no such metric.
        RuntimeError: in `fit`, minibatches of an asynchronous schedule are under way.
    """

    needs_validation = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        metric: str = "loss",
        mode: str | None = None,
        min_delta: float = 0.0,
        keep: int = 1,
        restore: bool = False,
    ) -> None:
        self.best, self.folder, self._keep = Best(metric, mode, min_delta), folder, keep
        self._restore = restore
        self.folders = (folder,)

    def on_evaluate(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Save if the metric is better."""
        if self.best.improves(metrics):
            run.save(self.folder, self._keep)

    def on_fit_end(self, run: Run) -> None:
        """Give the model the best weights back, if that was asked for and the process is not about to end."""
        if self._restore and self.best.value is not None and not run.trainer.state.preempted:
            load_validated(run.trainer.worker, Path(self.folder))

    def state_dict(self) -> dict[str, Any]:
        """Return the best value."""
        return self.best.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.best.load_state_dict(state)
