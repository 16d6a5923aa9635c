"""Fill: the numbers of plans that split backwards, as large as a bubble needs and memory allows.

Not known here: other plans than the one to be filled. Invariant: with the numbers that are returned every
rank has the memory that it needs. Source: ZB-2p (Qi et al., ICLR 2024, section 3 and appendix B).

A first microbatch takes some time to the last stage and back. The first stage has no bubble if it forwards
others during that time, and the last stage, which starts later, ends no later if it has weight gradients left
for that long. The simulator decides between two lags, since whole microbatches never fit exactly. In a V a
rank with room for more than its schedule needs runs more forwards where it would wait.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
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
from hybridpipe.planning.plan import Plan, Prediction
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules.generators import UNLIMITED, ceil_div, until_backward
from hybridpipe.planning.simulator.predict import predict

# The most microbatches for which ranks of a V get room, by group of ranks; 2 are enough without messages.
WIDEST = 3
# Lags to try beyond the one that is needed, as shares of the number of stages: each stage's is rounded.
BEYOND = (0, 1 / 2)
TIE = 1e-9  # relative: times that differ by less are equal


def filled(plan: Plan, profile: ModelProfile, cluster: Cluster, fits: Callable[[Plan], bool]) -> Plan | None:
    """Return a plan that splits backwards with more in flight and a longer lag, with its prediction.

    Of those that fit it is the one whose slowest rank takes least time, which is the pace of minibatches that
    follow each other. None: no rank takes less time, or there is no memory for more. In a V, where no half
    lags by a number, it is the one whose minibatch takes least time.

    Args:
        fits: True for a plan that every rank has the memory for.
    """
    if plan.traits.least_room:
        return _roomier(plan, profile, cluster, fits)
    in_flight, lag = _needed(plan, profile, cluster)
    usual = max(until_backward(plan, UNLIMITED))
    more = _most(range(usual + 1, in_flight + 1), lambda count: fits(replace(plan, in_flight=count)))
    fuller = replace(plan, in_flight=more, predicted=None)
    fullest = ceil_div(plan.num_microbatches, plan.replicas[-1])
    best, least = None, _slowest_rank(plan, profile, cluster)[0]
    for late in _lags(fuller, lag, fullest, fits):
        made = replace(fuller, weight_lag=late)
        seconds, prediction = _slowest_rank(made, profile, cluster)
        if seconds < least * (1 - TIE):
            best, least = replace(made, predicted=prediction), seconds
    return best


def tuned(plan: Plan, profile: ModelProfile, cluster: Cluster, fits: Callable[[Plan], bool]) -> Plan:
    """Return a plan of `filled` with its numbers changed step by step while its slowest rank gains.

    On slow links the numbers that are needed are not the best: more messages meet, and a late weight gradient
    delays the next forward.
    """
    best, least = plan, _slowest_rank(plan, profile, cluster)[0]
    tried: set[tuple[int, int]] = set()
    while steps := [step for step in _steps(best) if step not in tried]:
        before = least
        for count, late in steps:
            tried.add((count, late))
            made = replace(best, in_flight=count, weight_lag=late, predicted=None)
            if fits(made):
                seconds, prediction = _slowest_rank(made, profile, cluster)
                if seconds < least * (1 - TIE):
                    best, least = replace(made, predicted=prediction), seconds
        if least == before:
            break
    return best


def _roomier(
    plan: Plan, profile: ModelProfile, cluster: Cluster, fits: Callable[[Plan], bool]
) -> Plan | None:
    """Return a plan in a V whose ranks hold more, with its prediction; None if none is faster.

    These have room for as many as fit, for one less, and for what is enough where messages take no time: a
    greedy order does not always gain by more.
    """
    own, enough = plan.room, 2 * plan.num_groups
    most = min(WIDEST * plan.num_groups, plan.chunks * ceil_div(plan.num_microbatches, plan.replicas[0]))
    most = _most(range(own + 1, most + 1), lambda count: fits(replace(plan, in_flight=count)))
    best, least = None, (plan.predicted or predict(plan, profile, cluster)[1]).minibatch_seconds
    for count in sorted({most - 1, most, min(enough, most)}):
        made = replace(plan, in_flight=max(count, own), predicted=None)
        if count > own and fits(made):
            prediction = predict(made, profile, cluster)[1]
            if prediction.minibatch_seconds < least * (1 - TIE):
                best, least = replace(made, predicted=prediction), prediction.minibatch_seconds
    return best


def _steps(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield the plan's two numbers, one of them a quarter less or more, or half of it."""
    count, late = plan.in_flight, plan.weight_lag
    assert count is not None and late is not None
    yield from ((each, late) for each in (max(2, ceil_div(3 * count, 4)), ceil_div(5 * count, 4)))
    yield from ((count, each) for each in (late // 2, late * 3 // 2))


def _slowest_rank(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[float, Prediction]:
    timeline, prediction = predict(plan, profile, cluster)
    return timeline.slowest_rank_seconds, prediction


def _lags(plan: Plan, needed: int, fullest: int, fits: Callable[[Plan], bool]) -> Iterator[int]:
    """Yield the lags to try, each once."""
    longest = needed + int(plan.num_stages * BEYOND[-1])
    most = _most(range(min(longest, fullest) + 1), lambda late: fits(replace(plan, weight_lag=late)))
    wanted = {0, *(needed + int(plan.num_stages * share) for share in BEYOND)}
    yield from sorted({min(late, most) for late in wanted} - {-1})


def _needed(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[int, int]:
    """Return the microbatches in flight in the first stage, and the lag of the last, that leave no bubble."""
    costs = stage_costs(profile, plan, measured_speed(profile, cluster))
    share = compute_share(cluster, plan.ranks)
    speeds = [stage_speed(cluster, stage.ranks, share) for stage in plan.stages]
    forward, backward, weights = np.array(
        [(cost.forward_seconds, cost.backward_seconds, cost.weight_seconds) for cost in costs]
    ).T / np.array(speeds)
    crossing = np.array([cost.output_bytes + cost.gradient_bytes for cost in costs[:-1]])
    latency, per_byte, *_ = plan_cut_figures(plan, cluster, plan.is_asynchronous)
    way = float(forward.sum() + (backward - weights).sum() + (2 * latency + per_byte * crossing).sum())
    behind = way - float(forward[0] + backward[0] - weights[0])
    counts = [ceil_div(plan.num_microbatches, replicas) for replicas in plan.replicas]
    return (
        _times(behind + float(forward[0]), float(forward[0]), counts[0]),
        _times(behind, float(weights[-1]), counts[-1]),
    )


def _times(seconds: float, each: float, most: int) -> int:
    """Return how often `each` fills the seconds, at most `most` times."""
    return most if seconds >= each * most else math.ceil(seconds / each)


def _most(counts: range, fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, as smaller ones do; one less than the first if none does."""
    return counts.start - 1 + bisect_right(counts, False, key=lambda count: not fits(count))
