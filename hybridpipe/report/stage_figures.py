"""Stage figures: what each stage and each cut of a plan costs, and which of them is the bottleneck.

Takes data, returns numbers; not known here: their form for people. Invariant: the terms are those of
`planning.cost`, by which plans are compared.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.formula import (
    StageCost,
    StageTerms,
    measured_speed,
    plan_cut_figures,
    plan_terms,
    stage_costs,
)
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.planning.shards import pooled


@dataclass(frozen=True, slots=True)
class StageFigures:
    """Costs of a stage to each of its ranks, and of the cut behind it, by the terms of `estimate.estimate`.

    Args:
        work_seconds: forward, backward and message handling of a microbatch.
        sent_bytes: of a microbatch, over the cuts at both ends.
        received_bytes: of a microbatch, over the cuts at both ends.
        allreduce_seconds: of one all-reduce without overlap.
        compute_seconds: work and update of a minibatch.
        exposed_seconds: the part of a minibatch's all-reduce that no backward hides.
        link_seconds: occupation of the busiest link of the cut behind by a minibatch, in one direction.
    """

    work_seconds: float
    sent_bytes: float
    received_bytes: float
    allreduce_seconds: float
    compute_seconds: float
    exposed_seconds: float
    link_seconds: float


def stage_figures(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[StageFigures, ...]:
    """Return the figures of each stage of the plan."""
    plan, profile, cluster = pooled(plan, profile, cluster)
    none = StageCost(0.0, 0.0)
    costs = stage_costs(profile, plan, measured_speed(profile, cluster))
    over_cuts = [none, *costs[:-1], none]
    terms = plan_terms(plan, costs, cluster)
    # As if asynchronous: all messages of the minibatch count, not only those after the first.
    busy_per_byte = [*plan_cut_figures(plan, cluster, asynchronous=True)[2].tolist(), 0.0]
    return tuple(
        _figures(plan, s, terms.of_stage(s), over_cuts[s], over_cuts[s + 1], busy_per_byte[s])
        for s in range(plan.num_stages)
    )


def _figures(
    plan: Plan, s: int, terms: StageTerms[float], before: StageCost, behind: StageCost, busy_per_byte: float
) -> StageFigures:
    replicas = plan.stages[s].replicas
    # Under pipedream the replicas take turns, and each minibatch is on one replica only.
    takes_turns = replicas if plan.traits.whole_minibatch else 1
    rounds = ceil_div(plan.num_microbatches, replicas)
    work = rounds * terms.work + terms.products
    return StageFigures(
        work_seconds=terms.work,
        sent_bytes=behind.output_bytes + before.gradient_bytes,
        received_bytes=before.output_bytes + behind.gradient_bytes,
        allreduce_seconds=terms.reduction,
        compute_seconds=(work + terms.update) / takes_turns,
        exposed_seconds=((rounds - 1) * terms.between + terms.exposed + terms.gather) / takes_turns,
        link_seconds=busy_per_byte * max(behind.output_bytes, behind.gradient_bytes),
    )


def bottleneck(
    figures: Sequence[StageFigures], minibatch_seconds: float, groups: Sequence[int] = ()
) -> tuple[str, float]:
    """The largest part of a minibatch's time, as text, and its seconds.

    Parts are a stage's computing, the exposed part of an all-reduce, the traffic of a cut, and the time left
    beside the busiest stage or cut. Stages that share their ranks count together.

    Args:
        groups: the group of ranks that holds each stage; by default each stage has its own.
    """
    groups = groups or range(len(figures))
    one, many = ("stage", "stages") if len(set(groups)) == len(groups) else ("the stages of group", "groups")
    computing, exposed, traffic = (defaultdict[str, float](float) for _ in range(3))
    for each, group in zip(figures, groups, strict=True):
        computing[f"{one} {group}"] += each.compute_seconds
        exposed[f"{one} {group}"] += each.exposed_seconds
    for each, ends in zip(figures, pairwise(groups), strict=False):
        traffic["{} {} and {}".format(many, *sorted(ends))] += each.link_seconds
    terms = [(f"computing in {of}", seconds) for of, seconds in computing.items()]
    terms += [(f"the all-reduce of {of}", seconds) for of, seconds in exposed.items()]
    terms += [(f"the traffic between {cuts}", seconds) for cuts, seconds in traffic.items()]
    busiest = max(*(seconds + exposed[of] for of, seconds in computing.items()), 0.0, *traffic.values())
    terms.append(("filling, draining and waiting", minibatch_seconds - busiest))
    return max(terms, key=lambda term: term[1])
