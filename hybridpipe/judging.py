"""Judging: what a model's outputs are worth on data it was not trained on.

Pure but for the loss, which is the user's, and for `evaluated`, which runs the worker. Sums, not means: they
add up over microbatches.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridpipe.runtime import faults
from hybridpipe.runtime.stream import Minibatch
from hybridpipe.runtime.worker import Sums, Worker
from hybridpipe.stage.stage import Loss
from hybridpipe.stage.values import Value, tensors_of


def evaluated(
    worker: Worker,
    batches: Iterable[Minibatch],
    loss: Loss,
    num_samples: int,
    step: int,
    may_stop: bool = False,
) -> dict[str, float] | None:
    """Mean loss, and accuracy where targets are classes. Collective.

    Args:
        num_samples: in all batches.
        step: of the training, for reports.
        may_stop: leave it when a rank was asked to stop; all do alike, and get None.
    """
    worker.average_statistics()
    totals = np.zeros(3)
    previous: Sums | None = None
    with worker.evaluating():
        for number, minibatch in enumerate(batches):
            faults.at("evaluate", step=step)
            current = worker.infer(minibatch, partial(judge, loss), width=3, number=number)
            if previous is not None:  # one minibatch late: the pipeline stays full, but never runs away
                totals += previous.wait().sum(axis=0)
                if may_stop and previous.ask_to_stop():
                    return None
            previous = current
    if previous is not None:
        totals += previous.wait().sum(axis=0)
    summed, correct, judged = totals
    metrics = {"loss": float(summed) / max(num_samples, 1)}
    if judged:
        metrics["accuracy"] = float(correct / judged)
    return metrics


def judge(loss: Loss, outputs: Value, targets: Value) -> list[float]:
    """Summed loss, right answers and answers judged, for one microbatch."""
    with torch.no_grad():
        total = float(loss(outputs, targets)) * len(tensors_of(targets)[0])
    classes = _classes(outputs, targets)
    if classes is None:
        return [total, 0.0, 0.0]
    return [total, float(classes.eq(tensors_of(targets)[0]).sum()), float(classes.numel())]


def targets_wanted(validation: Any, **targets: float | None) -> dict[str, float]:
    """Those that are given. Raises ValueError where there is nothing to measure them on."""
    wanted = {name: value for name, value in targets.items() if value is not None}
    if wanted and validation is None:
        raise ValueError(f"target_{min(wanted)} = {wanted[min(wanted)]} needs validation, got None")
    return wanted


def reached(metrics: dict[str, float], wanted: dict[str, float]) -> bool:
    """Whether an accuracy is high and a loss low enough; every rank has the same metrics."""
    if "accuracy" in wanted and "accuracy" not in metrics:
        raise ValueError(
            f"target_accuracy = {wanted['accuracy']} needs targets that are classes; there is no accuracy"
        )
    return all(
        metrics[name] >= value if name == "accuracy" else metrics[name] <= value
        for name, value in wanted.items()
    )


def _classes(outputs: Value, targets: Value) -> Tensor | None:
    """The most likely classes, where outputs are logits of the targets in the last dimension or, as
    `cross_entropy` has them, in the second."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
        return None
    if outputs.shape[:-1] == targets.shape:
        return outputs.argmax(-1)
    if outputs.ndim > 1 and outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        return outputs.argmax(1)
    return None
