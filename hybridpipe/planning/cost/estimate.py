"""Estimate: the seconds of a plan by the closed formula of `cost.formula`, and by a closer one.

Not known here: the search. Invariant: `estimate` is what `search.partition` minimises, to rounding; what a
dynamic program over stages cannot know is in `estimate_closely` alone.

Under a synchronous schedule a stage reduces its gradients once its last backward is done, and that is done
when the slowest part of the whole pipeline is, less the way from the stage to the front:

    sum + slowest of all w, x, y and s + max over stages (e + u - way to the front)

x contains what passes in the other direction as well, divided by h: of a few messages that share a link all
arrive at the end, and so do the gradients that answer them, so the directions take turns.

A stage waits not only for the last one but for each behind it, as all keep their order (`_longest_cycle`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.formula import (
    StageCost,
    StageTerms,
    cut_bytes,
    held_until_gradients,
    measured_speed,
    plan_cut_figures,
    plan_terms,
    port_seconds,
    round_trips,
    stage_costs,
    stage_parts,
)
from hybridpipe.planning.cost.links import Floats
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules.generators import UNLIMITED, ceil_div, until_backward
from hybridpipe.planning.shards import pooled


def estimate(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the seconds of a minibatch by the closed formula, which `partition` minimises.

    Every rank of the plan is taken to compute all the time. Ranks that share a machine's processors
    therefore have the speed of all of them computing at once.
    """
    plan, profile, cluster = pooled(plan, profile, cluster)
    return estimates(plan, stage_costs(profile, plan, measured_speed(profile, cluster)), cluster).seconds


class Estimates(NamedTuple):
    """Seconds of a minibatch.

    Args:
        seconds: `estimate`.
        closely: with all-reduces behind the whole pipeline.
        unhindered: without waiting for gradients; an asynchronous pipeline hardly is faster.
        late: the part of `closely` behind the pipeline.
    """

    seconds: float
    closely: float
    unhindered: float
    late: float = 0.0


def estimates(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> Estimates:
    """Return the estimates of a plan, given `stage_costs`."""
    terms = plan_terms(plan, costs, cluster)
    cuts = _cuts(plan, costs, cluster)
    if plan.traits.interleaves:
        sums, each = group_parts(plan, terms)
        seconds = float(sums.sum() + cuts.ways.sum() + max(each.max(), cuts.busiest))
        return Estimates(seconds, seconds, seconds)
    sums, maxima = group_parts(plan, terms)
    to_the_end = np.cumsum((sums + cuts.ways)[::-1])[::-1]
    closer = np.cumsum((sums + cuts.apart)[::-1])[::-1]
    ports, after = _ports(plan, costs, cluster), terms.after
    waits = float((_of_stages(plan, round_trips) * to_the_end).max())
    if plan.is_asynchronous:
        unhindered = float(max(maxima.max(), ports.max(), cuts.busiest))
        replicas = np.array(plan.replicas)
        updates = replicas if plan.traits.whole_minibatch else 1  # minibatches of an update
        pause = after + np.minimum(terms.reduction, ports * replicas * updates) / 2 * (terms.exposed > 0)
        cycle = _longest_cycle(plan, sums, cuts.apart + cuts.meeting, pause)
        closely = max(unhindered, cycle, float((ports + terms.reduction / updates).max()))
        return Estimates(max(unhindered, waits), closely, unhindered)
    cycle = _longest_cycle(plan, sums, cuts.apart + cuts.meeting, np.zeros(plan.num_stages))
    fill = to_the_end[0]
    unhindered = max(float(np.maximum(maxima, ports + after).max()), cuts.busiest)
    pace = max(float(np.maximum(maxima - after, ports).max()), cuts.in_turns, cycle)
    late = max(0.0, float((after - (closer[0] - closer) / 2).max()))
    seconds = fill + max(unhindered, waits)
    return Estimates(float(seconds), float(closer[0] + pace + late), float(fill + unhindered), late)


def _longest_cycle(plan: Plan, sums: Floats, ways: Floats, pause: Floats) -> float:
    """Return the most seconds of a minibatch that a stage waits because ranks keep the order of their passes.

    A replica with h microbatches on their way computes a backward after the forward of the h - 1st behind it.
    So a forward goes from stage i to stage j, and lets the backward of an earlier one pass there. That goes
    back to i, and lets a later forward pass. In this cycle i has passed h_i m_i - (h_j - 1) m_j microbatches.
    Under a flush a stage that forwards all before its first backward waits for none.

    Args:
        sums: of each stage, a microbatch's forward and backward.
        ways: over the cut behind each stage and back.
        pause: of each stage, between its backward and a forward in a new update.
    """
    traits, replicas = plan.traits, np.array(plan.replicas)
    if not traits.has_warm_up:
        return 0.0
    held = np.array(until_backward(plan, UNLIMITED if plan.is_asynchronous else plan.num_microbatches))
    passed = (held * replicas)[:, None] - (held - 1) * replicas
    cycles = plan.num_microbatches / np.maximum(passed, 1)  # of a minibatch
    if not plan.is_asynchronous:
        cycles = (cycles - 1) * (held * replicas < plan.num_microbatches)[:, None]
    starts = np.cumsum(sums + ways) - sums - ways
    pauses = pause[:, None] * (cycles if traits.whole_minibatch else 1.0)
    return float(np.triu(cycles * (starts + sums - starts[:, None]) + pauses).max())


def _of_stages(plan: Plan, formula: Callable[[str, int, int, int, int | None], float]) -> Floats:
    """Return `round_trips` or `held_until_gradients` of each stage."""
    schedule, count, most = plan.schedule, plan.num_microbatches, plan.max_in_flight
    behind = plan.num_ranks - np.cumsum(plan.replicas)
    each = zip(plan.replicas, behind.tolist(), strict=True)
    values = [formula(schedule, count, replicas, ranks, most) for replicas, ranks in each]
    return np.array(values, dtype=float)


def _ports(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> Floats:
    """Return `port_seconds` of each stage."""
    moved = np.zeros((2, plan.num_stages + 1))
    moved[0, 1:-1] = [cost.output_bytes for cost in costs[:-1]]
    moved[1, 1:-1] = [cost.gradient_bytes for cost in costs[:-1]]
    sent, returned = moved
    outgoing, incoming = sent[1:] + returned[:-1], sent[:-1] + returned[1:]
    replicas = np.array(plan.replicas)
    return port_seconds(plan.schedule, plan.num_microbatches, replicas, cluster, outgoing, incoming)


def _together(plan: Plan) -> int:
    """Return the most microbatches that leave a stage at once."""
    return max(plan.replicas) if plan.is_asynchronous else plan.num_microbatches


class _Cuts(NamedTuple):
    """Seconds of a plan's messages; of arrays, those of the cut behind each stage, 0 behind the last.

    Args:
        ways: of a microbatch's way there and back.
        apart: the same looked at closely: replicas behind a stage with fewer do not end forwards at once.
        meeting: its delay by messages of the cuts before and behind, of which it meets about half.
        busiest: of a minibatch on the busiest link.
        in_turns: the same looked at closely: messages of the two directions wait for each other.
    """

    ways: Floats
    apart: Floats
    meeting: Floats
    busiest: float
    in_turns: float


def _cuts(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> _Cuts:
    ways, apart, meeting = np.zeros((3, plan.num_stages))
    if plan.num_stages == 1:
        return _Cuts(ways, apart, meeting, 0.0, 0.0)
    sent, returned = np.array([(cost.output_bytes, cost.gradient_bytes) for cost in costs[:-1]]).T
    latency, per_byte, busy_per_byte, alone = plan_cut_figures(plan, cluster, plan.is_asynchronous)
    moving = per_byte * (sent + returned)
    replicas = np.minimum(plan.replicas, _together(plan))
    at_once, fewer = (-(-each[:-1] // replicas[1:]) for each in (replicas, np.minimum.accumulate(replicas)))
    ways[:-1], apart[:-1] = 2 * latency + moving, 2 * latency + moving * fewer / at_once
    beside = np.pad(alone * (sent + returned), 1)
    met = np.maximum(beside[:-2] / plan.replicas[:-1], beside[2:] / plan.replicas[1:])
    meeting[:-1] = np.minimum(apart[:-1], met / 2)
    num_bytes = cut_bytes(plan.schedule, sent, returned)
    held = _of_stages(plan, held_until_gradients)
    taking_turns = num_bytes + (sent + returned - num_bytes) / np.maximum(held[:-1], 1)
    group = np.array(plan.groups)
    links = 2 * group[:-1] + (group[1:] < group[:-1])  # cuts between the same ranks share links
    busiest, in_turns = (np.bincount(links, busy_per_byte * each).max() for each in (num_bytes, taking_turns))
    return _Cuts(ways, apart, meeting, float(busiest), float(in_turns))


def group_parts(plan: Plan, terms: StageTerms[Floats]) -> tuple[Floats, Floats]:
    """Return what each group of ranks adds to the sum and to the maximum, without ports and cuts."""
    if not plan.traits.interleaves:
        filling, maxima = stage_parts(
            plan.schedule,
            plan.num_microbatches,
            np.array(plan.replicas),
            terms.work,
            terms.weight,
            terms.after,
            terms.between,
        )
        return filling + terms.held_up, maxima
    group = np.array(plan.groups)
    parts = terms.work, terms.after, terms.held_up
    work, after, held_up = (np.bincount(group, each).astype(np.float64) for each in parts)
    rounds = ceil_div(plan.num_microbatches, plan.replicas[0]) - 1 / plan.chunks
    return work / plan.chunks + held_up, rounds * work + after


class Between(NamedTuple):
    """The part of a plan's estimate that does not depend on the ways in which its stages run.

    Args:
        ways: over the cut behind each stage.
        ports: `port_seconds` of each stage; 0 where ranks hold several.
        trips: `round_trips` of each stage; 0 where ranks hold several.
        busiest: seconds of the busiest link, which the maximum is never below.
    """

    ways: Floats
    ports: Floats
    trips: Floats
    busiest: float
    is_asynchronous: bool

    @classmethod
    def of(cls, plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> "Between":
        """Return that of a plan, given `stage_costs`."""
        cuts = _cuts(plan, costs, cluster)
        if plan.traits.interleaves:
            ways, none = np.append(np.zeros(plan.num_groups - 1), cuts.ways.sum()), np.zeros(plan.num_groups)
            return cls(ways, none, none, cuts.busiest, is_asynchronous=False)
        ports, trips = _ports(plan, costs, cluster), _of_stages(plan, round_trips)
        return cls(cuts.ways, ports, trips, cuts.busiest, plan.is_asynchronous)

    def seconds(self, sums: Floats, maxima: Floats) -> float:
        """Return `estimate`, given the part of each group of ranks in the sum and, with ports, in the
        maximum.
        """
        to_the_end = np.cumsum((sums + self.ways)[::-1])[::-1]
        slowest = max(float(maxima.max()), float((self.trips * to_the_end).max()), self.busiest)
        return slowest if self.is_asynchronous else slowest + float(to_the_end[0])
