"""Words: counts, lists and sets of numbers as short texts for people.

Pure, and not known here: what the numbers are of. Invariant: a long list is cut, and shows that it is.
"""

from collections.abc import Sequence
from datetime import timedelta

from hybridpipe.planning.quantities import duration

MAX_LISTED = 8  # items of a list of cuts, or of ranges of ranks


def ranges(ranks: Sequence[int]) -> str:
    """Format a set of numbers in ascending order, such as "0-3,8"; the order of replicas is lost."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return few([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs], ",")


def few(items: Sequence[str], separator: str) -> str:
    """Join items; of a long list, the first ones and the last."""
    shown = items if len(items) <= MAX_LISTED else [*items[: MAX_LISTED - 1], "..", items[-1]]
    return separator.join(shown)


def counted(number: int, one: str, many: str = "") -> str:
    """Format a number of things, such as "2 ranks"; `many` is the plural if it does not end with a mere s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def spell(seconds: float) -> str:
    """Format the duration of a training, such as "12.5 s" or "1:02:03"."""
    return duration(seconds) if seconds < 60 else str(timedelta(seconds=round(seconds)))


def rounded(value: float) -> str:
    """Format a figure with four decimals, or with four significant digits if below 0.01."""
    return f"{value:.4g}" if 0 < abs(value) < 0.01 else f"{value:.4f}"
