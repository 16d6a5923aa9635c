"""Refine: the simulated plans that are best, and those that differ from them in one thing.

The estimate errs by about as much for a plan and for its neighbour. So a neighbour is expected to take the
plan's simulated time, times the ratio of the two estimates, and only those that are expected to be about as
fast or faster are simulated. Not known here: where the first plans come from. Invariant: every plan that is
returned fits into memory and is simulated; the same input gives the same plans; at most `MAX_EXPANDED` plans
have their neighbours looked at, and at most `NUM_TRIED` neighbours of each are simulated.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.search.placement import renumbered

MAX_EXPANDED, NUM_TRIED = 8, 4
WORTH_TRYING = 1.02  # factor of the plan's time that a neighbour may be expected to take
NUM_IDLE = 2  # plans in a row whose neighbours are no better, after which it is enough

Seconds = Callable[[Plan], float]


def refine(
    simulated: dict[Plan, float],
    profile: ModelProfile,
    cluster: Cluster,
    ranks: Sequence[int],
    *,
    fits: Callable[[Plan], bool],
    expect: Seconds,
    simulate: Seconds,
) -> Iterator[Plan]:
    """Yield neighbours of the best plans that were simulated, best plan first.

    Args:
        simulated: seconds of plans, to which those of neighbours are added.
        ranks: that may be used.
        expect: returns the estimate of a plan.
        simulate: returns the seconds of a plan.
    """
    expanded: set[Plan] = set()
    idle = 0
    traffic = [0.0, *(float(layer.output_bytes + layer.returned_bytes) for layer in profile.layers)]
    while len(expanded) < MAX_EXPANDED and idle < NUM_IDLE:
        open_plans = [plan for plan in simulated if plan not in expanded and plan.chunks == 1]
        if not open_plans:
            return
        best = min(simulated.values())
        here = min(open_plans, key=lambda plan: simulated[plan])
        if simulated[here] > best * 1.15:
            return
        expanded.add(here)
        error = math.sqrt(simulated[here] / (expect(here) or 1.0))
        near = {plan: None for plan in neighbours(here, traffic, cluster, ranks) if plan not in simulated}
        expected = sorted((error * expect(plan), i, plan) for i, plan in enumerate(near) if fits(plan))
        for seconds, _, plan in expected[:NUM_TRIED]:
            if seconds > best * WORTH_TRYING:
                break
            simulated[plan] = simulate(plan)
            yield plan
        idle = 0 if min(simulated.values()) < best * (1 - 1e-3) else idle + 1


def neighbours(
    plan: Plan, traffic: Sequence[float], cluster: Cluster, ranks: Sequence[int]
) -> Iterator[Plan]:
    """Yield the plans that differ in one cut, one rank's stage, or one stage more or less.

    Args:
        traffic: bytes over a cut at each edge, both ways.
    """
    edges = [0, *(stage.stop for stage in plan.stages)]
    groups = [sorted(stage.ranks) for stage in plan.stages]
    again = [stage.recompute for stage in plan.stages]
    idle = sorted(set(ranks).difference(plan.ranks))
    for moved in _with_a_cut_moved(edges, traffic):
        yield _plan(plan, moved, groups, again, cluster, ranks)
    for others in _with_a_rank_moved(groups, idle):
        yield _plan(plan, edges, others, again, cluster, ranks)
    for s in range(len(groups) - 1):
        merged = [*groups[:s], groups[s] + groups[s + 1], *groups[s + 2 :]]
        both = [*again[:s], again[s] or again[s + 1], *again[s + 2 :]]
        yield _plan(plan, edges[: s + 1] + edges[s + 2 :], merged, both, cluster, ranks)
    for s, group in enumerate(groups):
        inside = range(edges[s] + 1, edges[s + 1])
        if len(group) > 1 and inside:
            third = len(inside) // 3
            cut = min(inside[third : len(inside) - third], key=lambda edge: traffic[edge])
            half = (len(group) + 1) // 2
            parts = [*groups[:s], group[:half], group[half:], *groups[s + 1 :]]
            twice = [*again[: s + 1], *again[s:]]
            yield _plan(plan, [*edges[: s + 1], cut, *edges[s + 1 :]], parts, twice, cluster, ranks)


def _with_a_cut_moved(edges: list[int], traffic: Sequence[float]) -> Iterator[list[int]]:
    """Yield the edges with one moved: by a layer, and to the cheapest at twice the distance, and so on."""
    for i in range(1, len(edges) - 1):
        ways = range(edges[i] - 1, edges[i - 1], -1), range(edges[i] + 1, edges[i + 1])
        for way in ways:
            for k in range(len(way).bit_length()):
                goal = min(way[2**k - 1 : 2 ** (k + 1) - 1], key=lambda edge: traffic[edge])
                yield [*edges[:i], goal, *edges[i + 1 :]]


def _with_a_rank_moved(groups: list[list[int]], idle: list[int]) -> Iterator[list[list[int]]]:
    """Yield the groups with one rank of one moved to the next or the one before, used or no longer used."""
    for s, t in [(s, t) for s, t in pairwise(range(len(groups)))] + [
        (t, s) for s, t in pairwise(range(len(groups)))
    ]:
        if len(groups[s]) > 1:
            others = list(groups)
            others[s], others[t] = groups[s][:-1], [*groups[t], groups[s][-1]]
            yield others
    for s, group in enumerate(groups):
        if len(group) > 1:
            yield [*groups[:s], group[:-1], *groups[s + 1 :]]
        if idle:
            yield [*groups[:s], [*group, idle[0]], *groups[s + 1 :]]


def _plan(
    plan: Plan,
    edges: Sequence[int],
    groups: Sequence[Sequence[int]],
    again: Sequence[bool],
    cluster: Cluster,
    ranks: Sequence[int],
) -> Plan:
    placed = renumbered(cluster, ranks, groups)
    stages = tuple(
        StageSpec(start, stop, len(own), own, recompute)
        for (start, stop), own, recompute in zip(pairwise(edges), placed, again, strict=True)
    )
    return replace(plan, stages=stages, predicted=None)
