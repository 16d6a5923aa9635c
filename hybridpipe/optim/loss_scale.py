"""LossScale: the factor on losses that keeps float16 gradients from vanishing, and from overflowing.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2, with the numbers of
torch.amp.GradScaler. Invariant: it is the same on all ranks, since they agree on every overflow.
"""

from typing import NamedTuple

INITIAL = 2.0**16
PATIENCE = 2000  # updates without an overflow, after which the scale doubles


class LossScale(NamedTuple):
    """The scale between two updates.

    Args:
        value: each loss is multiplied by this before its backward, and each gradient divided by it.
        updates: without an overflow since it last changed.
        changes: False where losses are never scaled.
    """

    value: float = 1.0
    updates: int = 0
    changes: bool = False

    @property
    def explains_overflow(self) -> bool:
        """True if a smaller scale may keep gradients finite."""
        return self.changes and self.value > 1

    def after(self, overflowed: bool) -> "LossScale":
        """Return the scale after an update, or after one that was skipped for an overflow."""
        if not self.changes:
            return self
        if overflowed:
            return LossScale(max(self.value / 2, 1.0), 0, True)
        if self.updates + 1 == PATIENCE:
            return LossScale(self.value * 2, 0, True)
        return LossScale(self.value, self.updates + 1, True)


UNSCALED = LossScale()
DYNAMIC = LossScale(INITIAL, 0, True)
