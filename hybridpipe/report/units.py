"""Units: numbers, sizes and sets of ranks as short texts for people.

Pure, and not known here: what the numbers are of. Invariant: three digits, and a unit that fits.
"""

from collections.abc import Sequence

MAX_LISTED = 8  # items of a list of cuts, or of ranges of ranks


def size(num_bytes: float) -> str:
    """Format a number of bytes, such as "1.25 MB"."""
    return _scaled(num_bytes, 1e3, "B", "kB", "MB", "GB", "TB")


def duration(seconds: float) -> str:
    """Format a number of seconds, such as "12.5 ms"."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return _scaled(seconds * 1e6, 1e3, "us", "ms", "s")


def _scaled(value: float, step: float, *units: str) -> str:
    unit, *larger = units
    for each in larger:
        if value < step * (1 - 5e-4):  # 999.6 would be shown as 1e+03
            break
        value, unit = value / step, each
    return f"{value:.3g} {unit}" if value < step else f"{value:,.0f} {unit}"


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
