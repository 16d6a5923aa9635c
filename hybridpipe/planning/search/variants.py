"""Variants: for every stage of a plan the way to run it, so that the plan is fast and fits into memory.

Not known here: where cuts and ranks come from. Invariant: no other choice for the same cuts and ranks that
fits takes less by `estimate`.

A rank's memory depends on the ways in which its own stages run, and on no other rank's. So each rank has a
set of choices, of time and memory, of which those that fit into its memory count.

A choice adds to the formula's sum and to its maximum. Those that are beaten in both count no more, which
leaves one where stages only differ in their updates. Of the others none need be the best for all plans of the
other ranks: one has the least sum, another the least maximum. As in `partition` a bound on maxima falls from
plan to plan, and under each bound every rank takes the least sum, which also has the least waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import product

import numpy as np

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import Between, group_parts
from hybridpipe.planning.cost.formula import StageCost, StageTerms, measured_speed, plan_terms, stage_costs
from hybridpipe.planning.cost.layer_costs import may_be_faster, undominated
from hybridpipe.planning.cost.links import Floats, Ints
from hybridpipe.planning.cost.memory import group_peaks
from hybridpipe.planning.plan import Plan, Variant
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.shared_parameters import may_run, without_vain_experts

Choice = tuple[Variant, ...]  # of a rank's stages, by chunk
MOST_CHOICES = 256  # of a rank's stages, of which all are looked at
SAME = 1e-12  # relative: times that differ by less are equal
TERMS = [each.name for each in fields(StageTerms)]


def fitted(
    plan: Plan, profile: ModelProfile, cluster: Cluster, variants: Sequence[Variant] = (Variant(),)
) -> Plan | None:
    """Return the plan with its stages run the fastest way that fits into memory; None if none does.

    Args:
        variants: the ways to run a stage, the simplest first (`PlanRequest.variants`).
    """
    if not may_run(profile, plan):
        return None
    every = _choices(variants, plan.chunks)

    def made(choices: Sequence[Choice]) -> Plan:
        """Return the plan in which group g of ranks makes the choice `choices[g]`."""
        stages = range(plan.num_stages)
        run = plan.running([choices[plan.group_of(s)][plan.chunk_of(s)] for s in stages])
        return without_vain_experts(profile, run) if profile.has_experts else run

    simplest = made([every[0]] * plan.num_groups)
    has_rivals = max(plan.replicas) > 1 and any(any(map(may_be_faster, each, every[0])) for each in every[1:])
    if not has_rivals and fits_memory(simplest, profile, cluster):
        return simplest
    allowed = np.ones((len(every), plan.num_groups), dtype=np.bool_)
    if cluster.memory_bytes is not None:
        limits = [min(map(cluster.memory, stage.ranks)) for stage in plan.stages[: plan.num_groups]]
        peaks = [group_peaks(profile, made([each] * plan.num_groups)) for each in every]
        allowed = np.array(peaks) <= limits
    if not allowed.any(axis=0).all():
        return None
    sums, maxima, between = _parts(plan, made, every, variants, profile, cluster)
    sums, maxima = (np.where(allowed, each, np.inf) for each in (sums, maxima))
    chosen = least_together(np.where(undominated(sums, maxima), sums, np.inf), maxima, between)
    return made([every[number] for number in chosen])


def fits_memory(plan: Plan, profile: ModelProfile, cluster: Cluster) -> bool:
    """True if every rank has the memory that it needs at its peak."""
    if cluster.memory_bytes is None:
        return True
    peaks = zip(plan.stages, group_peaks(profile, plan), strict=False)
    return all(peak <= cluster.memory(rank) for stage, peak in peaks for rank in stage.ranks)


def _choices(variants: Sequence[Variant], chunks: int) -> list[Choice]:
    """Return the choices for the stages of one rank, the simplest first; its stages share one update.

    They are all where these are few, else those in which the first stages run leanest.
    """
    found: list[Choice] = []
    for shared in dict.fromkeys(variant[1:] for variant in variants):
        ways = [variant for variant in variants if variant[1:] == shared]
        if len(ways) ** chunks <= MOST_CHOICES:
            found += product(ways, repeat=chunks)
        else:
            first, *_, last = ways
            found += [(last,) * lean + (first,) * (chunks - lean) for lean in range(chunks + 1)]
    return found


def _parts(
    plan: Plan,
    made: Callable[[Sequence[Choice]], Plan],
    choices: Sequence[Choice],
    variants: Sequence[Variant],
    profile: ModelProfile,
    cluster: Cluster,
) -> tuple[Floats, Floats, Between]:
    """Return the sum and the maximum of each choice in each group of ranks, and what lies between them."""
    stages = range(plan.num_stages)
    alike = [made([(variant,) * plan.chunks] * plan.num_groups) for variant in variants]
    costs: list[Sequence[StageCost]] = [
        stage_costs(profile, each, measured_speed(profile, cluster)) for each in alike
    ]
    terms = [plan_terms(each, of_each, cluster) for each, of_each in zip(alike, costs, strict=True)]
    between = Between.of(alike[0], costs[0], cluster)
    parts = []
    for choice in choices:
        taken = [terms[variants.index(choice[plan.chunk_of(s)])] for s in stages]
        mixed = StageTerms(*(np.array([getattr(taken[s], name)[s] for s in stages]) for name in TERMS))
        summed, slowest = group_parts(plan, mixed)
        if not plan.traits.interleaves:
            slowest = np.maximum(slowest, between.ports + (0.0 if plan.is_asynchronous else mixed.after))
        parts.append((summed, slowest))
    sums, maxima = np.array(parts).swapaxes(0, 1)
    return sums, maxima, between


def least_together(sums: Floats, maxima: Floats, between: Between) -> Ints:
    """Return the choice of each group that together take least (`Between.seconds`).

    Args:
        sums, maxima: seconds of each choice, shape (choices, groups). Sums are infinite where a choice is not
            allowed; each group has one that is.
    """
    bound, least = np.inf, np.inf
    chosen: Ints = np.argmin(sums, axis=0)
    while True:
        allowed = np.where(maxima < bound, sums, np.inf)
        here = np.argmin(allowed, axis=0)
        taken, slowest = (np.take_along_axis(each, here[None], axis=0)[0] for each in (allowed, maxima))
        if not np.isfinite(taken).all() or (not between.is_asynchronous and not taken.sum() < least):
            return chosen  # further choices have no lesser sum
        seconds = between.seconds(taken, slowest)
        if seconds < least * (1 - SAME):
            chosen, least = here, seconds
        bound = float(slowest.max())
        if bound <= between.busiest:
            return chosen
