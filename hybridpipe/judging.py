"""Judging: what a model's outputs are worth on data it was not trained on.

Pure but for the loss, which is the user's; knows no ranks. Sums, not means: they add up over microbatches.
"""

import torch
from torch import Tensor

from hybridpipe.stage.stage import Loss
from hybridpipe.stage.values import Value, tensors_of


def judge(loss: Loss, outputs: Value, targets: Value) -> list[float]:
    """Summed loss, right answers and answers judged, for one microbatch."""
    with torch.no_grad():
        total = float(loss(outputs, targets)) * len(tensors_of(targets)[0])
    classes = _classes(outputs, targets)
    if classes is None:
        return [total, 0.0, 0.0]
    return [total, float(classes.eq(tensors_of(targets)[0]).sum()), float(classes.numel())]


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
