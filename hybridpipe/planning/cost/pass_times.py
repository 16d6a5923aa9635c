"""Pass times: the profiled times of a plan's passes and messages, by which some schedules order them.

Not known here: the orders. Invariant: times are whole numbers, so that all ranks make the same order of them.
"""

from dataclasses import replace

import numpy as np

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.formula import (
    compute_share,
    measured_speed,
    plan_cut_figures,
    stage_costs,
    stage_speed,
)
from hybridpipe.planning.plan import PassTimes, Plan
from hybridpipe.planning.profile import ModelProfile

LONGEST = 1000  # the longest pass, in the unit of the times


def with_pass_times(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """Return the plan with the times of its passes, where their order follows them.

    A plan whose passes take no time is returned as it is.
    """
    if not plan.traits.takes_pass_times:
        return plan
    costs = stage_costs(profile, plan, measured_speed(profile, cluster))
    share = compute_share(cluster, plan.ranks)
    speeds = np.array([stage_speed(cluster, stage.ranks, share) for stage in plan.stages])
    seconds = np.array([(c.forward_seconds, c.backward_seconds, c.weight_seconds, 0.0) for c in costs])
    seconds[:, 1] -= seconds[:, 2]
    seconds /= speeds[:, None]
    longest = seconds.max()
    if not longest:
        return plan
    latency, per_byte, *_ = plan_cut_figures(plan, cluster, plan.is_asynchronous)
    moved = np.array([max(cost.output_bytes, cost.gradient_bytes) for cost in costs[:-1]])
    handling = cluster.occupied_seconds(moved, 1) * [plan.sends(s) for s in range(len(moved))]
    seconds[:-1, 3] = latency + per_byte * moved + handling
    units = np.rint(seconds / longest * LONGEST)
    return replace(
        plan, pass_times=tuple(PassTimes(*map(int, row)) for row in units.tolist()), predicted=None
    )
