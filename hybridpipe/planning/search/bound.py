"""Bound: a lower bound of a plan's simulated seconds, by which a search skips plans that cannot be the best.

Not known here: which plans are compared. Invariant: hardly any simulation is faster than the bound.
"""

from dataclasses import replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import Estimates, estimates
from hybridpipe.planning.cost.formula import measured_speed, stage_costs
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile

# A plan may be faster than the formula by this factor, and hardly ever by more, under other schedules and
# where ranks share processors only at times or links let bursts pass.
FASTER = 1.25


def least_seconds(plan: Plan, profile: ModelProfile, cluster: Cluster, estimated: Estimates) -> float:
    """Return a lower bound of a plan's simulated seconds of a minibatch.

    `estimate` overstates a cut with fast and slow routes, as it takes all for slow: of 461 problems a search
    lost one plan to that, by 1.2 %. Where ranks wait for their messages, the bound is that without waiting:
    the formula counts at both ends what ranks spend together.

    Args:
        estimated: the plan's estimates.
    """
    if cluster.waits_for_messages:
        cluster = replace(cluster, waits_for_messages=False)
        costs = stage_costs(profile, plan, measured_speed(profile, cluster))
        estimated = estimates(plan, costs, cluster)
    has_bursts = any(level.burst_bytes for level in cluster.levels)
    if not plan.traits.whole_minibatch or has_bursts or not cluster.are_processors_private:
        return estimated.closely / FASTER
    return estimated.unhindered
