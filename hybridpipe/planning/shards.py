"""Shards: plans and machines in which one rank stands for all shards of a replica, which do the same.

Pure. Knows plans, profiles and clusters; no search and no simulation, which see ranks without shards.
Invariant: what is predicted of a pooled plan is what its shards take, each beside the others.
"""

from dataclasses import replace
from typing import TypeVar

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.plan import Plan, Prediction
from hybridpipe.planning.profile import ModelProfile

Figure = TypeVar("Figure", int, float)


def can_pool(cluster: Cluster, tensor: int) -> bool:
    """True if the shards of a replica fit into one innermost unit, and its ranks into whole replicas."""
    are_neighbours = cluster.node_ranks in (None, 1) or cluster.node_ranks % tensor == 0
    return cluster.levels[0].ranks % tensor == 0 and are_neighbours


def pooled_cluster(cluster: Cluster, tensor: int) -> Cluster:
    """Return the machines in which each rank stands for `tensor` neighbours of one innermost unit.

    It is as fast as the slowest of them, and has the memory of the one with least. Each sends its own copy of
    a message: over its own port where it has one, over a part of a link that the unit's ranks share.

    Raises:
        ValueError: the innermost unit has no multiple of as many ranks (`can_pool`).
    """
    if tensor == 1:
        return cluster
    if not can_pool(cluster, tensor):
        unit = cluster.levels[0]
        raise ValueError(
            f"tensor must divide the {unit.ranks} ranks of {unit.name!r}, the innermost level, got {tensor}"
        )
    inner, *outer = cluster.levels
    memory, speed, shares = cluster.memory_bytes, cluster.relative_speed, (cluster.node_ranks or 1) > 1
    return replace(
        cluster,
        levels=(
            replace(inner, ranks=inner.ranks // tensor),
            *(replace(_shared(each, tensor), ranks=each.ranks // tensor) for each in outer),
        ),
        memory_bytes=_least(memory, tensor) if isinstance(memory, tuple) else memory,
        relative_speed=speed and _least(speed, tensor),
        node_ranks=cluster.node_ranks and max(1, cluster.node_ranks // tensor),
        compute_speeds=cluster.compute_speeds if shares else None,
        wakeup_seconds=cluster.wakeup_seconds[tensor - 1 :: tensor] or cluster.wakeup_seconds[-1:],
        shards=cluster.shards * tensor,
    )


def _shared(level: Level, tensor: int) -> Level:
    """Return a level whose links into units carry the messages of all shards at once."""
    if level.shared_bandwidth is None:
        return level
    collectives = level.with_collectives(lambda each: replace(each, bandwidth=each.bandwidth / tensor))
    burst = level.burst_bytes and level.burst_bytes / tensor
    return replace(collectives, shared_bandwidth=level.shared_bandwidth / tensor, burst_bytes=burst)


def _least(figures: tuple[Figure, ...], tensor: int) -> tuple[Figure, ...]:
    return tuple(min(figures[i : i + tensor]) for i in range(0, len(figures), tensor))


def pooled(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Plan, ModelProfile, Cluster]:
    """Return a plan of leaders, and the shards' profile and machines; all as they are without shards.

    Raises:
        ValueError: stages have different numbers of shards, or shards that are no neighbours; or the profile
            or the cluster has none such.
    """
    if not plan.splits_tensors:
        return plan, profile, cluster
    counts = sorted({stage.tensor for stage in plan.stages})
    if len(counts) > 1:
        raise ValueError(f"tensor must be the same in all stages of a plan to be predicted, got {counts}")
    [tensor] = counts
    for s, stage in enumerate(plan.stages):
        for leader, ranks in zip(stage.leaders, _shards_of(stage.leaders, tensor), strict=True):
            place = stage.ranks.index(leader)
            if leader % tensor or stage.ranks[place : place + tensor] != ranks:
                told = f"must be neighbours, the first a multiple of {tensor}, to be predicted"
                raise ValueError(f"stages[{s}].ranks of the shards of a replica {told}, got {stage.ranks}")
    stages = (
        replace(stage, ranks=tuple(rank // tensor for rank in stage.leaders), tensor=1)
        for stage in plan.stages
    )
    few = replace(plan, stages=tuple(stages), predicted=None)
    return few, profile.split_over(tensor), pooled_cluster(cluster, tensor)


def _shards_of(leaders: tuple[int, ...], tensor: int) -> list[tuple[int, ...]]:
    return [tuple(range(leader, leader + tensor)) for leader in leaders]


def unpooled(plan: Plan, tensor: int) -> Plan:
    """Return the plan of all shards for which the ranks of a plan stand, with its prediction."""
    if tensor == 1:
        return plan
    stages = []
    for stage in plan.stages:
        replicas = _shards_of(tuple(rank * tensor for rank in stage.ranks), tensor)
        stages.append(replace(stage, ranks=sum(replicas, ()), tensor=tensor))
    predicted = plan.predicted and of_shards(plan.predicted, tensor)
    return replace(plan, stages=tuple(stages), predicted=predicted)


def of_shards(predicted: Prediction, tensor: int) -> Prediction:
    """Return the figures of all shards, whose ranks need as much memory each."""
    peaks = tuple(peak for peak in predicted.peak_memory_bytes for _ in range(tensor))
    return replace(predicted, peak_memory_bytes=peaks)
