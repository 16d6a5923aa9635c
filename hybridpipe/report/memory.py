"""Memory of ranks, as text: what a plan is predicted to need beside what there is, and what was used.

Not known here: how limits are found and memory is predicted. Invariant: a message shows the figures that it
follows from.
"""

from collections.abc import Iterator, Sequence

from hybridpipe.environment.memory_limits import RESERVE, RankMemory
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.quantities import size
from hybridpipe.report.table import table
from hybridpipe.report.tables import Row


def predicted_bytes(plan: Plan, rank: int) -> int | None:
    """Return the predicted memory of a rank's stage; 0 for an unused rank, None without a prediction."""
    if plan.predicted is None:
        return None
    return dict(zip(plan.ranks, plan.predicted.peak_memory_bytes, strict=True)).get(rank, 0)


def misfit(plan: Plan, ranks: Sequence[RankMemory]) -> str | None:
    """Return a line about the rank that lacks most for the plan; None if it fits or has no prediction."""
    lacking = [
        (predicted - memory.left_bytes, rank, predicted)
        for rank, memory in enumerate(ranks)
        if (predicted := predicted_bytes(plan, rank)) and memory.left_bytes is not None
    ]
    most, rank, predicted = max(lacking, default=(0, 0, 0))
    if most <= 0:
        return None
    memory = ranks[rank]
    assert memory.limit_bytes is not None
    return (
        f"plan {plan.name} does not fit into memory by prediction: rank {rank} has {size(memory.held_bytes)} "
        f"and needs {size(predicted)} more, its limit is {size(memory.limit_bytes)} ({memory.origin})"
    )


def least_left(ranks: Sequence[RankMemory]) -> str:
    """Return a line about the rank that has least for its stage, all of which are limited."""
    rank = min(range(len(ranks)), key=lambda rank: ranks[rank].stage_bytes or 0)
    memory = ranks[rank]
    return (
        f"rank {rank} has {size(memory.stage_bytes or 0)} for its stage: its limit is "
        f"{size(memory.limit_bytes or 0)} ({memory.origin}), its process has {size(memory.held_bytes)}, "
        f"and {RESERVE - 1:.0%} of a prediction are kept for its errors"
    )


def memory_table(
    plan: Plan, peak: Sequence[int], before: Sequence[int], limit: Sequence[int | None], origin: Sequence[str]
) -> str:
    """Return the `memory_rows` as text."""
    return table(memory_rows(plan, peak, before, limit, origin))


def memory_rows(
    plan: Plan, peak: Sequence[int], before: Sequence[int], limit: Sequence[int | None], origin: Sequence[str]
) -> list[Row]:
    """Rows of the memory of each used rank's process, its prediction and its limit.

    Args:
        peak: bytes of each rank at most.
        before: bytes of each rank before training.
        limit: the most bytes that each rank may have; None: not limited.
        origin: the name of each rank's limit.
    """
    peaks = plan.predicted.peak_memory_bytes if plan.predicted else ()
    predicted = dict(zip(plan.ranks, peaks, strict=False))
    return [
        {
            "rank": str(rank),
            "before training": size(before[rank]),
            "predicted for the stage": size(predicted[rank]) if predicted else "-",
            "together": size(before[rank] + predicted[rank]) if predicted else "-",
            "memory at most": size(peak[rank]),
            "limit": "-" if (most := limit[rank]) is None else f"{size(most)} ({origin[rank]})",
        }
        for rank in sorted(plan.ranks)
    ]


def beyond_limit(
    peak: Sequence[int], before: Sequence[int], limit: Sequence[int | None], origin: Sequence[str]
) -> Iterator[str]:
    """Yield a line for each rank that had more than its limit; arguments as for `memory_table`."""
    for rank, most in enumerate(limit):
        if most is not None and peak[rank] > most:
            yield f"rank {rank} had {size(peak[rank])}, more than its limit of {size(most)} ({origin[rank]})"
