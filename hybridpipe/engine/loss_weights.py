"""LossWeights: the factor on a minibatch's gradients where its losses are pairs (sum, weight).

Knows losses, no gradients and no messages: the caller passes in the sum over the ranks that update together.
Invariant: all ranks that update together use the same factor, and the same one under every plan.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hybridpipe.planning.plan import Plan
from hybridpipe.stage.losses import MicrobatchLoss, SameKind, both_kinds

AddUp = Callable[[np.ndarray], np.ndarray]


def _alone(numbers: np.ndarray) -> np.ndarray:
    return numbers


class Weighed(NamedTuple):
    """Outcome of adding up the weights of an update's losses.

    Args:
        factor: to multiply all gradients by, the same on all ranks that update together.
        has_weight: False if the weights that are known here add up to 0, so that the loss is no number.
    """

    factor: float
    has_weight: bool


EQUAL = Weighed(1.0, has_weight=True)  # of losses that are means


class LossWeights:
    """The weights of a training's losses.

    A backward runs before the weights of all microbatches are known, with its sum over the minibatch's
    samples. `factor` turns samples into weights. Only the last stage sees a loss, so all ranks learn in the
    first update whether there are weights, and exchange nothing later if there are none.

    A minibatch of one microbatch needs no factor, since its sum was divided by its own weight.

    Args:
        add_up: returns the sum of an array over all ranks that update together; collective.
    """

    def __init__(self, plan: Plan, add_up: AddUp = _alone) -> None:
        self._plan, self._add_up = plan, add_up
        self._own = SameKind()  # of this rank's losses
        self.are_means = False  # this rank's so far, so that a further mean needs no check
        self.are_all_means = False  # those of all ranks, so that nothing needs a factor

    def check(self, loss: MicrobatchLoss, share: float, updates: bool) -> None:
        """Check that a microbatch's loss can be trained on exactly.

        Args:
            share: the microbatch's fraction of the minibatch's samples.
            updates: False inside `no_sync`.

        Raises:
            ValueError: it cannot, or an earlier loss was of the other kind.
        """
        self._own.see(loss.is_weighted)
        self.are_means = not loss.is_weighted
        if self.are_means:
            return
        if not updates:
            raise ValueError(
                "no_sync makes no sense with a loss that returns (sum, weight): its sums are divided by the "
                "weights of one minibatch; pass all samples to one train_step"
            )
        if self._plan.is_asynchronous and share != 1:
            raise ValueError(
                "a loss that returns (sum, weight) needs the weights of a whole minibatch, which nobody has "
                f"in time under {self._plan.schedule}: use microbatch_size = minibatch_size or a synchronous "
                "schedule"
            )

    def weigh(self, losses: Mapping[int, MicrobatchLoss], sizes: Sequence[int]) -> "Weighed":
        """Return the factor on the gradients of an update.

        Collective over the ranks that update together, unless all of them know that the factor is 1. Without
        an exchange, other ranks do not learn of a sole weight of 0.

        Args:
            losses: this rank's, by microbatch.
            sizes: samples of each microbatch of the minibatch or, under an asynchronous schedule, the stream.

        Raises:
            ValueError: some losses are weighted and others are not.
        """
        if self.are_all_means or len(sizes) == 1 or self._plan.is_asynchronous:
            return Weighed(1.0, all(loss.weight != 0 for loss in losses.values()))
        numbers = np.zeros(len(sizes) + 1)
        for m, loss in losses.items():
            numbers[m] = loss.weight or 0.0
            numbers[-1] += loss.is_weighted
        *weights, num_weighted = self._add_up(numbers).tolist()
        if num_weighted not in (0, len(sizes)):
            raise both_kinds()
        self._own.see(num_weighted > 0)
        if num_weighted == 0:
            self.are_all_means = True
            return EQUAL
        total = sum(weights)
        return Weighed(sum(sizes) / total, True) if total else Weighed(0.0, False)
