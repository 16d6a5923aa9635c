"""Evaluation: loss and metrics on held-out data.

Pure except for `evaluate`, which runs the worker, and the user's loss and metrics.
Invariant: numbers of microbatches are sums, not means, so that they add up.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.pending import PendingLosses
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import shown
from hybridpipe.health import faults
from hybridpipe.model.tensors import Tree
from hybridpipe.stage.losses import LossSum, SameKind, called_with, computed
from hybridpipe.types import Loss

Metric = Callable[[Any, Any], tuple[Any, Any]]  # (outputs, targets) of a microbatch → (sum, count)
LOSS, ACCURACY = "loss", "accuracy"
IGNORED = -100  # the target that is not counted, unless the loss has another ignore_index
_SECOND = (functional.cross_entropy, functional.nll_loss)  # losses with classes in the second dimension
_WITHOUT_CLASSES = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.poisson_nll_loss,
    functional.gaussian_nll_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
)
_MODULES_WITHOUT = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.PoissonNLLLoss,
    nn.GaussianNLLLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
)


def evaluate(
    worker: Worker,
    batches: Iterable[Minibatch],
    metrics: "MicrobatchMetrics",
    step: int,
    may_stop: bool = False,
) -> dict[str, float] | None:
    """Mean loss and metrics over a data set, inside `worker.evaluating()`. Collective.

    Args:
        step: the training's step, for injected faults.
        may_stop: True to return None on all ranks once a rank was asked to stop.
    """
    worker.average_statistics()
    totals = np.zeros(metrics.width)
    previous: PendingLosses | None = None
    for number, minibatch in enumerate(batches):
        faults.at("evaluate", step=step)
        current = worker.infer(minibatch, metrics, metrics.width, number)
        if previous is not None:  # one minibatch late, which keeps the pipeline full and bounds its queue
            totals += previous.wait().sum(axis=0)
            if may_stop and previous.ask_to_stop():
                return None
        previous = current
    if previous is not None:
        totals += previous.wait().sum(axis=0)
    return metrics.metrics(totals)


class MicrobatchMetrics:
    """Reduces a microbatch to numbers that add up: sum and weight of the loss, sum and count of each metric.

    Args:
        loss: the training's loss.
        metrics: functions by name, called with (outputs, targets) of a microbatch; each returns (sum, count).
            Unless one is called "accuracy", the accuracy is counted for targets that are classes.

    Raises:
        TypeError: a metric has no name or is no function.
        ValueError: a metric is called "loss".
    """

    def __init__(self, loss: Loss, metrics: Mapping[str, Metric]) -> None:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics must be a dict of functions by name, got {type(metrics).__name__}")
        for name, metric in metrics.items():
            if not isinstance(name, str) or not callable(metric):
                raise TypeError(f"metrics must be a dict of functions by name, got {name!r}: {metric!r}")
        if LOSS in metrics:
            raise ValueError(f"metrics must not be called {LOSS!r}, which is the mean loss")
        self._loss, self._metrics, self._kind = loss, dict(metrics), SameKind()
        self._accuracy = None if ACCURACY in metrics else Accuracy(loss)

    @property
    def width(self) -> int:
        """Length of the list of a microbatch's numbers."""
        return 2 + 2 * len(self._metrics) + (0 if self._accuracy is None else Accuracy.width)

    @torch.no_grad()
    def __call__(self, outputs: Tree, targets: Tree, num_samples: int) -> list[float]:
        """Return the numbers of one microbatch."""
        loss = computed(self._loss, outputs, targets)
        self._kind.see(loss.is_weighted)
        numbers = [*loss.summed(num_samples)]
        for name, metric in self._metrics.items():
            try:
                result = metric(outputs, targets)
            except Exception as error:
                error.add_note(called_with(f"metric {name}", outputs, targets))
                raise
            numbers += _sum_and_count(name, result)
        return numbers if self._accuracy is None else [*numbers, *self._accuracy(outputs, targets)]

    def metrics(self, totals: np.ndarray) -> dict[str, float]:
        """Loss and metrics from the added numbers; the loss is NaN without weight, a metric then missing."""
        found = {LOSS: LossSum(*totals[:2].tolist()).mean}
        for i, name in enumerate(self._metrics):
            total, count = totals[2 + 2 * i : 4 + 2 * i]
            if count:
                found[name] = float(total / count)
        if self._accuracy is not None:
            right, judged, others = totals[-Accuracy.width :]
            if judged and not others:
                found[ACCURACY] = float(right / judged)
        return found


def _sum_and_count(name: str, result: Any) -> list[float]:
    try:
        total, count = result
        return [float(total), float(count)]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"metric {name} must return (sum, count), two numbers of the microbatch, got {shown(result)}"
        ) from None


class Accuracy:
    """Counts right answers, counted targets, and targets outside the classes.

    Only a classification is counted: outputs have a dimension of at least two classes, the last one or, as in
    `cross_entropy`, the second; targets are integers.

    Args:
        loss: a loss of torch decides about classes, their dimension and the ignored target.
    """

    width = 3

    def __init__(self, loss: Loss) -> None:
        function: Any = loss
        ignored: Any = IGNORED
        while isinstance(function, partial):
            ignored = function.keywords.get("ignore_index", ignored)
            function = function.func
        ignored = getattr(function, "ignore_index", ignored)
        self._ignored = int(ignored) if isinstance(ignored, Integral) else IGNORED  # None is no index
        self._has_classes = function not in _WITHOUT_CLASSES and not isinstance(function, _MODULES_WITHOUT)
        self._second = function in _SECOND or isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss)

    def __call__(self, outputs: Tree, targets: Tree) -> list[float]:
        """Return the three counts of one microbatch."""
        dim = self._class_dimension(outputs, targets)
        if dim is None:
            return [0.0] * self.width
        assert isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        classes = targets.long()  # bytes would wrap around at 256 classes, or at -100
        judged = classes != self._ignored
        in_range = (classes >= 0) & (classes < outputs.shape[dim])
        right = outputs.argmax(dim).eq(classes) & judged
        return [float(right.sum()), float(judged.sum()), float((judged & ~in_range).sum())]

    def _class_dimension(self, outputs: Tree, targets: Tree) -> int | None:
        if not (self._has_classes and isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
            return None
        if targets.is_floating_point() or targets.is_complex() or not outputs.is_floating_point():
            return None
        last, second = outputs.ndim - 1, 1
        for dim in (second, last) if self._second else (last, second):
            others = outputs.shape[:dim] + outputs.shape[dim + 1 :]
            if dim < outputs.ndim and others == targets.shape and outputs.shape[dim] > 1:
                return dim
        return None


def targets_wanted(validation: Any, **targets: float | None) -> dict[str, float]:
    """Targets that are not None.

    Raises:
        ValueError: there is a target, but no validation data.
    """
    wanted = {name: value for name, value in targets.items() if value is not None}
    if wanted and validation is None:
        raise ValueError(f"target_{min(wanted)} = {wanted[min(wanted)]} needs validation, got None")
    return wanted


def reached(metrics: dict[str, float], wanted: dict[str, float]) -> bool:
    """True if the accuracy is high enough and the loss low enough; every rank has the same metrics.

    Raises:
        ValueError: an accuracy is wanted, and the targets are no classes.
    """
    if "accuracy" in wanted and "accuracy" not in metrics:
        raise ValueError(
            f"target_accuracy = {wanted['accuracy']} needs targets that are classes; there is no accuracy"
        )
    return all(
        metrics[name] >= value if name == "accuracy" else metrics[name] <= value
        for name, value in wanted.items()
    )
