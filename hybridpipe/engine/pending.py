"""PendingLosses: the numbers of a minibatch on their way to all ranks, with what travels beside them.

Knows no messages but the one to wait for. Invariant: each number comes from one rank and the others add zero,
so the sum is exact and the same on all ranks.
"""

import numpy as np

from hybridpipe.comm.transport import Pending
from hybridpipe.stage.losses import LossSum

_BESIDE = 3  # numbers of ranks: those that want to end, were asked to stop, and have skipped the update


class PendingLosses:
    """Numbers of microbatches, being summed over all ranks in the background.

    Args:
        carried: the array that is summed in place (`carried`).
        shape: of the numbers.
    """

    def __init__(self, carried: np.ndarray, shape: tuple[int, ...], pending: Pending) -> None:
        self._carried, self._shape, self._pending = carried, shape, pending

    def wait(self) -> np.ndarray:
        """Wait for the sum and return the numbers, in the shape that they were given in."""
        self._pending.wait()
        return self._carried[:-_BESIDE].reshape(self._shape)

    def total(self) -> LossSum:
        """Return the losses' sum in the order of the microbatches: the same floats under every plan."""
        numbers = self.wait().tolist()
        return LossSum(*(float(sum(column)) for column in zip(*numbers, strict=True)))

    def ask_to_end(self) -> bool:
        """Return True if a callback of any rank wanted the training to end; the same on all ranks."""
        self._pending.wait()
        return bool(self._carried[-3])

    def ask_to_stop(self) -> bool:
        """Return True if any rank was asked to stop when it gave its numbers; the same on all ranks."""
        self._pending.wait()
        return bool(self._carried[-2])

    def were_skipped(self) -> bool:
        """Return True if any rank has skipped its update with the minibatch; the same on all ranks."""
        self._pending.wait()
        return bool(self._carried[-1])


def carried(numbers: np.ndarray, wants_to_end: bool, asked_to_stop: bool, skipped: bool) -> np.ndarray:
    """Return one array of a rank's numbers and what travels beside them."""
    return np.append(numbers, [float(wants_to_end), float(asked_to_stop), float(skipped)])


def blank(num_microbatches: int) -> np.ndarray:
    """Return room for the `LossSum` of each microbatch."""
    return np.zeros((num_microbatches, len(LossSum._fields)))
