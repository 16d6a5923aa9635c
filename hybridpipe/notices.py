"""Notices: remarks to the user in passing, printed at once and kept for the run's report.

Each process keeps its own. Not known here: who collects them. Invariant: every notice is printed; of those
kept, the first KEPT stay, and the others are counted.
"""

import sys

KEPT = 100  # an update that is left out is told each time


class Notices:
    """The notices of one process."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._num_more = 0

    def say(self, what: str) -> None:
        """Print a line on standard error that is no notice: all is as it should be."""
        print(f"hybridpipe: {what}", file=sys.stderr, flush=True)

    def tell(self, what: str) -> None:
        """Print a notice of one line on standard error, and keep it."""
        self.say(what)
        if len(self._first) < KEPT:
            self._first.append(what)
        else:
            self._num_more += 1

    def lines(self) -> list[str]:
        """Return what was said, in order."""
        more = [f"and {self._num_more} more like these"] if self._num_more else []
        return [*self._first, *more]


notices = Notices()
