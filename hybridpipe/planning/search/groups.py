"""Groups: what copies of a plan that exchange weights now and then would take, beside one plan on all ranks.

Not known here: what groups learn. Invariant: nothing is chosen here, as groups train something else.
"""

import math
from dataclasses import dataclass, replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import search_sizes

MEMORY_FACTOR = 3.0  # in units of the weights: centre, momentum and what is on its way, as under "diloco"


@dataclass(frozen=True, slots=True)
class GroupsForecast:
    """The predicted time of groups.

    Args:
        count: number of groups.
        every: minibatches between two exchanges.
        plan: of each group, with its prediction of a minibatch's share.
        exchange_seconds: of all weights, while nothing is computed.
        exchanged_bytes: that each group sends to the others in an exchange.
    """

    count: int
    every: int
    plan: Plan
    exchange_seconds: float
    exchanged_bytes: float

    @property
    def minibatch_seconds(self) -> float:
        """Seconds of a minibatch of all groups together, with its part of an exchange."""
        assert self.plan.predicted is not None
        return self.plan.predicted.minibatch_seconds + self.exchange_seconds / self.every


def forecast_groups(
    profile: ModelProfile, cluster: Cluster, minibatch: int, request: PlanRequest, count: int, every: int
) -> GroupsForecast:
    """Return the best plan for each group, on its part of the ranks and of the minibatch, and its time.

    Args:
        minibatch: samples of all groups together.

    Raises:
        ValueError: the groups do not divide ranks or minibatch, or no plan fits (`search_sizes`).
    """
    for name, number in (("ranks of the cluster", cluster.num_ranks), ("samples of a minibatch", minibatch)):
        if number % count:
            raise ValueError(f"groups must divide the {number} {name}, got {count}")
    part = first_ranks(cluster, cluster.num_ranks // count)
    kept = replace(profile, state_factor=profile.state_factor + MEMORY_FACTOR)
    plan = search_sizes(kept, part, minibatch // count, request)[0].plan
    seconds, sent = exchange(plan, profile, cluster, count)
    return GroupsForecast(count, every, plan, seconds, sent)


def first_ranks(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the first ranks of a cluster as one."""
    inside = [level for level in cluster.levels if level.ranks < num_ranks]
    around = cluster.levels[len(inside)]
    memory, speed = cluster.memory_bytes, cluster.relative_speed
    return replace(
        cluster,
        levels=(*inside, replace(around, ranks=num_ranks)),
        memory_bytes=memory[:num_ranks] if isinstance(memory, tuple) else memory,
        relative_speed=speed and speed[:num_ranks],
    )


def exchange(plan: Plan, profile: ModelProfile, cluster: Cluster, count: int) -> tuple[float, float]:
    """Return the seconds of an exchange between groups under a plan, and the bytes that a group sends.

    Each replica sums its part of the stage's weights with the ranks at its place, by a reduce-scatter and an
    all-gather. All places exchange at once, and those of a unit share its link.
    """
    size, sent = cluster.num_ranks // count, 2 * (count - 1) / count
    level = cluster.levels[cluster.level_index(0, cluster.num_ranks - 1)]
    weights = [
        sum(layer.parameter_bytes for layer in profile.layers[stage.start : stage.stop])
        for stage in plan.stages
    ]
    of_rank = [sent * number / stage.replicas for number, stage in zip(weights, plan.stages, strict=True)]
    seconds = max(of_rank) / level.bandwidth
    if level.shared_bandwidth is not None:
        below = next((each.ranks for each in reversed(cluster.levels[:-1])), 1)
        units = math.ceil(size / below) or 1  # of a group, each with a link of its own
        seconds = max(seconds, sent * sum(weights) / units / level.shared_bandwidth)
    return 2 * (count - 1) * level.latency_seconds + seconds, sent * sum(weights)
