"""Losses: what a user's loss returned for one microbatch, checked, and its share in the minibatch's loss.

Knows one microbatch; no layers, no ranks. Invariant: a mean over the samples is their sum over their number,
so the loss of several microbatches is always the sum of their sums over the sum of their weights.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.errors import UserError
from hybridpipe.model.tensors import Tree, described
from hybridpipe.types import Loss


class LossSum(NamedTuple):
    """A loss as a sum and its weight; those of several microbatches add up."""

    sum: float
    weight: float

    @property
    def mean(self) -> float:
        """The loss: the sum over the weight; NaN if the weight is 0."""
        return self.sum / self.weight if self.weight else math.nan


class MicrobatchLoss(NamedTuple):
    """The loss of one microbatch.

    Args:
        value: a tensor of one number: a sum if there is a weight, else the mean over the samples.
        weight: the number by which the sums of a minibatch are divided, as far as it is this microbatch's.
    """

    value: Tensor
    weight: float | None = None

    @property
    def is_weighted(self) -> bool:
        """True for (sum, weight), False for a mean."""
        return self.weight is not None

    def detached(self) -> "MicrobatchLoss":
        """Return a copy without graph, whose value requires grad if this one's does."""
        copy = self.value.detach().clone().requires_grad_(self.value.requires_grad)
        return self._replace(value=copy)

    def factor(self, share: float, num_samples: int) -> float:
        """Return the factor on the value in the backward.

        It makes the gradients those of the minibatch's loss, but for a sum among several microbatches: the
        others' weights are not known yet, so for the time being the sum is divided by the samples.

        Args:
            share: the microbatch's fraction of the minibatch's samples.
            num_samples: samples of the minibatch.
        """
        if self.weight is None:
            return share
        if share == 1:
            return 1 / self.weight if self.weight else 0.0
        return 1 / num_samples

    def summed(self, num_samples: int) -> LossSum:
        """Return the loss as a sum and its weight.

        Args:
            num_samples: samples of the microbatch.
        """
        value = float(self.value.detach())
        if self.weight is None:
            return LossSum(value * num_samples, num_samples)
        return LossSum(value, self.weight)


def summed(losses: Mapping[int, MicrobatchLoss], sizes: Sequence[int]) -> dict[int, LossSum]:
    """Return losses as sums and their weights, by microbatch; all values come from the device in one copy.

    Args:
        sizes: samples of each microbatch.
    """
    if not losses:
        return {}
    values = torch.stack([loss.value.detach().double().reshape(()) for loss in losses.values()]).cpu()
    here = zip(losses.items(), values, strict=True)
    return {m: loss._replace(value=value).summed(sizes[m]) for (m, loss), value in here}


class SameKind:
    """Checks that all losses are means, or all of them (sum, weight)."""

    def __init__(self) -> None:
        self._is_weighted: bool | None = None

    def see(self, is_weighted: bool) -> None:
        """Raise ValueError if an earlier loss was of the other kind."""
        if self._is_weighted not in (None, is_weighted):
            raise both_kinds()
        self._is_weighted = is_weighted


def computed(loss: Loss, outputs: Tree, targets: Tree) -> MicrobatchLoss:
    """Call a user's loss. An error inside gets a note of what it was called with.

    Raises:
        UserError: it returns neither a mean nor a pair (sum, weight).
    """
    try:
        result = loss(outputs, targets)
    except Exception as error:
        error.add_note(called_with("loss", outputs, targets))
        raise
    return checked(result)


def called_with(name: str, outputs: Tree, targets: Tree) -> str:
    """Return a note for an error inside a loss or a metric."""
    return f"in {name}(outputs, targets) with outputs = {described(outputs)}, targets = {described(targets)}"


def both_kinds() -> ValueError:
    """Return the error of a loss that returns now a mean and now a pair."""
    return ValueError(
        "loss must return the same kind for every microbatch, either the mean over the samples or a pair "
        "(sum, weight), got both"
    )


def checked(result: Any) -> MicrobatchLoss:
    """Return what a loss returned as a `MicrobatchLoss`.

    Raises:
        UserError: it is neither a mean nor a pair (sum, weight).
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    value, weight = result if is_pair else (result, None)
    wrong = _wrong_value(value)
    if is_pair:
        wrong = _wrong_weight(weight) if wrong is None else f"a pair with {wrong}"
    if wrong is not None:
        raise UserError(
            "loss must return a tensor of one number, the mean over the samples, or a pair (sum, weight) of "
            f"such a tensor and a number >= 0 without gradient, got {wrong}"
        )
    return MicrobatchLoss(value, None if weight is None else float(weight))


def _wrong_value(value: Any) -> str | None:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return None if value.numel() == 1 else f"shape {tuple(value.shape)}"


def _wrong_weight(weight: Any) -> str | None:
    if isinstance(weight, Tensor):
        if weight.requires_grad:
            return "a weight that requires grad"
        if weight.numel() != 1 or weight.is_complex():
            return f"a weight of shape {tuple(weight.shape)}, {str(weight.dtype).removeprefix('torch.')}"
    elif not isinstance(weight, Real):
        return f"a weight of type {type(weight).__name__}"
    number = float(weight)
    return None if 0 <= number < math.inf else f"the weight {number}"
