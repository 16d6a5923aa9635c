"""Best: the best value of a metric so far, by which callbacks decide.

Pure. Invariant: a value that is not finite is never the best.
"""

import math
from collections.abc import Mapping
from typing import Any

from hybridpipe.planning.checks import non_negative, one_of

MODES = ("min", "max")


class Best:
    """The best value of a metric that validations give.

    Args:
        metric: its name: "loss", "accuracy", or one of the trainer's `metrics`.
        mode: "min" where less is better, "max" where more is; None: "min" for the loss, else "max".
        min_delta: a value must be better by more than this.

    Raises:
        ValueError: another mode, or a negative `min_delta`.
    """

    def __init__(self, metric: str, mode: str | None = None, min_delta: float = 0.0) -> None:
        mode = mode or ("min" if metric == "loss" else "max")
        one_of("mode", mode, MODES)
        non_negative("min_delta", min_delta)
        self.metric, self._min_delta = metric, min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self.value: float | None = None

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Note a validation's metrics; return True if the metric is the best so far.

        Raises:
            ValueError: the validation has no such metric.
        """
        if self.metric not in metrics:
            raise ValueError(f"metric must be one of {', '.join(metrics)}, got {self.metric!r}")
        value = metrics[self.metric]
        is_better = math.isfinite(value) and (
            self.value is None or self._sign * (self.value - value) > self._min_delta
        )
        if is_better:
            self.value = value
        return is_better

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.value = state["value"]
