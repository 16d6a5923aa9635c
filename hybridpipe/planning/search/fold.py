"""Fold: cuts of a chain of layers into pairs of stages, of which a group of ranks holds one from each end.

Not known here: plans and traffic. Invariant: every stage has a layer. A chain is taken from both ends, group
by group, and of each left edge only the least right edge that is reached is followed. So no pairs are missed
but some in which a stage must have a layer that it has no room for.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hybridpipe.planning.cost.links import Floats, Ints

NUM_BISECTIONS = 14  # to a thousandth of a group of sixteen
MAX_CELLS = 2**20  # layers squared times groups; more take seconds


def folded_edges(done: Floats, speeds: Sequence[float], share: float) -> list[int] | None:
    """Return the edges of two stages a group whose slowest group takes least.

    Args:
        done: work of the layers before each edge, at full speed.
        speeds: of each group.
        share: the most that a stage may have of the slowest group's time.

    Returns:
        None where there are too many layers to try, or too few.
    """
    num_layers = len(done) - 1
    if num_layers < 2 * len(speeds) or num_layers**2 * len(speeds) > MAX_CELLS:
        return None
    low, high = done[-1] / sum(speeds), done[-1] / min(speeds) / min(share, 1.0)
    found = _within(done, speeds, high, share)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        edges = _within(done, speeds, middle, share)
        low, high = (middle, high) if edges is None else (low, middle)
        found = edges or found
    return found


def _within(done: Floats, speeds: Sequence[float], bound: float, share: float) -> list[int] | None:
    """Return edges with which no group takes longer than the bound, and no stage than its share of it."""
    num_layers = len(done) - 1
    # For each left edge, the least right edge; too large: none.
    right = np.full(num_layers + 1, num_layers + 1)
    right[0] = num_layers
    tables: list[tuple[Ints, Ints]] = []
    for group, speed in enumerate(speeds[:-1]):
        left = np.flatnonzero(right <= num_layers)
        if not len(left):
            return None
        of_left = done[None, :] - done[left, None]  # work of the left stage, by where it begins and ends
        of_right = np.minimum(bound * speed - of_left, share * bound * speed)
        ends = right[left][:, None]
        reached = np.searchsorted(done, done[ends] - of_right)
        most = np.arange(num_layers + 1) + 2 * (len(speeds) - 1 - group)  # a layer for each later stage
        reached = np.maximum(reached, most)
        allowed = (of_left <= share * bound * speed) & (np.arange(num_layers + 1) > left[:, None])
        reached = np.where(allowed & (of_right >= 0) & (reached < ends), reached, num_layers + 1)
        best = np.argmin(reached, axis=0)
        tables.append((left[best], right))
        right = reached[best, np.arange(num_layers + 1)]
    return _turned(done, right, tables, bound * speeds[-1], share)


def _turned(
    done: Floats, right: Ints, tables: Sequence[tuple[Ints, Ints]], room: float, share: float
) -> list[int] | None:
    """Return the edges where the last group has room for all that is left, cut near its middle."""
    for left in np.flatnonzero(right <= len(done) - 1).tolist():
        end = int(right[left])
        cuts = np.arange(left + 1, end)
        larger = np.maximum(done[cuts] - done[left], done[end] - done[cuts])
        if done[end] - done[left] > room or not len(cuts) or larger.min() > share * room:
            continue
        lefts, rights = [left], [end]
        for before, ends in reversed(tables):
            lefts.append(int(before[lefts[-1]]))
            rights.append(int(ends[lefts[-1]]))
        edges = [*reversed(lefts), int(cuts[np.argmin(larger)]), *rights]
        assert all(a < b for a, b in pairwise(edges))
        return edges
    return None
