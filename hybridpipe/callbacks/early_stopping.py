"""EarlyStopping: ends a training whose validation no longer improves.

Not known here: how a training ends. Invariant: metrics are the same on all ranks, so all want the same.
"""

from collections.abc import Mapping
from typing import Any

from hybridpipe.callbacks.metric import Best
from hybridpipe.errors import suggesting
from hybridpipe.planning.checks import positive_int
from hybridpipe.training.callbacks import Callback, Run


@suggesting
class EarlyStopping(Callback):
    """Ends the training after `patience` validations in a row without a better value.

    A resumed training goes on counting, and one that has ended this way stays ended.

    Args:
        metric, mode, min_delta: when a value is better (`metric.Best`).
        patience: validations.

    Raises:
        ValueError: an argument is out of range; in `fit`: there is no validation, or it has no such metric.
    """

    needs_validation = True

    def __init__(
        self, metric: str = "loss", patience: int = 3, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        positive_int("patience", patience)
        self.best, self.patience, self.num_worse = Best(metric, mode, min_delta), patience, 0

    def on_fit_start(self, run: Run) -> None:
        """End at once if an earlier run has ended this way."""
        self._decide(run)

    def on_evaluate(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Count, and ask to end."""
        self.num_worse = 0 if self.best.improves(metrics) else self.num_worse + 1
        self._decide(run)

    def _decide(self, run: Run) -> None:
        if self.num_worse >= self.patience:
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count."""
        return {**self.best.state_dict(), "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.best.load_state_dict(state)
        self.num_worse = state["num_worse"]
