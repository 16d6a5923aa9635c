"""Routes: which ranks of two neighbouring stages exchange messages, where their replicas have shards.

Pure. Knows plans; no tensors. Invariant: each shard of a stage gets each message once, and from the same rank
that it sends to on the way back, since all shards of a replica have the same outputs and gradients of inputs.
"""

from hybridpipe.planning.plan import Plan


def source_of(plan: Plan, stage: int, microbatch: int, shard: int) -> int:
    """Return the rank of `stage` that sends to a shard of the stage behind or before it."""
    return plan.rank_of(stage, microbatch, shard % plan.stages[stage].tensor)


def targets_of(plan: Plan, stage: int, microbatch: int, shard: int, count: int) -> list[int]:
    """Return the ranks of `stage` that take from a shard of the stage before or behind it.

    Args:
        count: the shards of that stage.
    """
    return [plan.rank_of(stage, microbatch, each) for each in range(shard, plan.stages[stage].tensor, count)]


def pairs_over(plan: Plan, stage: int, microbatch: int) -> set[tuple[int, int]]:
    """Return the pairs of ranks of `stage` and of the next that exchange a microbatch's messages."""
    here, there = (range(plan.stages[s].tensor) for s in (stage, stage + 1))
    ahead = {(plan.rank_of(stage, microbatch, i), source_of(plan, stage + 1, microbatch, i)) for i in here}
    back = {(source_of(plan, stage, microbatch, j), plan.rank_of(stage + 1, microbatch, j)) for j in there}
    return ahead | back
