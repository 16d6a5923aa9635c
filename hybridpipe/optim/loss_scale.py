"""LossScale: the factor on losses that keeps float16 gradients from vanishing, and from overflowing.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2, with the numbers of
torch.amp.GradScaler. Invariant: it is the same on all ranks, since they agree on every overflow.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
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

    def after(self, overflowed: bool, under: "LossScale | None" = None) -> "LossScale":
        """Return the scale after an update, or after one that was skipped for an overflow.

        Args:
            under: the scale of the update's losses; by default this one. Another one says nothing of this.
        """
        if not self.changes or (under is not None and under.value != self.value):
            return self
        if overflowed:
            return LossScale(max(self.value / 2, 1.0), 0, True)
        if self.updates + 1 == PATIENCE:
            return LossScale(self.value * 2, 0, True)
        return LossScale(self.value, self.updates + 1, True)


UNSCALED = LossScale()
DYNAMIC = LossScale(INITIAL, 0, True)


class LossScales:
    """The scales of minibatches of which several are in flight, under an asynchronous schedule.

    Minibatch b's scale follows from the overflows of minibatches up to b - lag, which all ranks know by then:

        scale(b) = scale(b - 1).after(overflow(b - lag), under scale(b - lag))

    Args:
        scale: of the first `lag` minibatches.
        lag: at least the most minibatches in flight.
    """

    def __init__(self, scale: LossScale, lag: int) -> None:
        self._window = deque([scale] * lag)  # from minibatch `_first` on
        self._first = 0
        self._overflows = deque[Callable[[], bool]]()  # from minibatch `_first` on

    def begin(self, minibatch: int) -> None:
        """Say which minibatch comes next; none is in flight."""
        self.window()
        self._first = minibatch

    def restore(self, window: Sequence[LossScale]) -> None:
        """Continue with the window of an earlier run; of one with another lag, the newest scale holds."""
        lag = len(self._window)
        self._window = deque(window if len(window) == lag else [*window[-1:]] * lag)
        self._overflows.clear()

    def note(self, overflows: Iterable[Callable[[], bool]]) -> None:
        """Note an update with the next minibatches.

        Args:
            overflows: return True if any stage has skipped its update; they may wait for other ranks.
        """
        self._overflows.extend(overflows)

    def of(self, minibatch: int) -> LossScale:
        """Return the scale of a minibatch in flight; waits for the overflows that it follows from."""
        while minibatch >= self._first + len(self._window):
            self._advance()
        return self._window[minibatch - self._first]

    def window(self) -> tuple[LossScale, ...]:
        """Return the scales from the next minibatch on; waits for the overflows of all that were noted."""
        while self._overflows:
            self._advance()
        return tuple(self._window)

    def _advance(self) -> None:
        overflowed = self._overflows.popleft()()
        under = self._window.popleft()
        newest = self._window[-1] if self._window else under
        self._window.append(newest.after(overflowed, under))
        self._first += 1
