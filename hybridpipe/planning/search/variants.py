"""Variants: for every stage of a plan the way to run it, the fastest of those that fit into memory.

Not known here: where cuts and ranks come from. Invariant: no other choice for the same cuts and ranks that
fits takes less by `estimate`.

A rank's memory depends on the ways in which its own stages run, and on no other rank's. So each rank has a
set of choices, of time and memory, of which those that fit into its memory count.

A rank with one stage runs it the first of the request's ways that fits, as no later one is faster.
Recomputing adds a forward f to the work. That hides up to f more of an all-reduce. So the formula's maximum
falls by at most f where its sum grows by f, and waits for gradients grow with the sum. An asynchronous
schedule has no sum, but the work and the all-reduce are in one term of its maximum.

A rank with several stages may recompute some of them, and none of its choices need be the best for all plans
of the other ranks: one has the least sum, another the least maximum. As in `partition` a bound on maxima
falls from plan to plan, and under each bound every rank takes the least sum.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import busiest_cut, group_parts
from hybridpipe.planning.cost.formula import StageTerms, measured_speed, plan_terms, stage_costs
from hybridpipe.planning.cost.links import Floats, Ints
from hybridpipe.planning.cost.memory import group_peaks
from hybridpipe.planning.plan import Plan, Variant
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.sharing import may_run

Choice = tuple[Variant, ...]  # of a rank's stages, by chunk
MOST_CHOICES = 256  # of a rank's stages, of which all are looked at
TERMS = [each.name for each in fields(StageTerms)]


def fitted(
    plan: Plan, profile: ModelProfile, cluster: Cluster, variants: Sequence[Variant] = (Variant(),)
) -> Plan | None:
    """Return the plan with its stages run the fastest way that fits into memory; None if none does.

    Args:
        variants: the ways to run a stage, the fastest first (`PlanRequest.variants`).
    """
    if not may_run(profile, plan):
        return None
    every = _choices(variants, plan.chunks)

    def made(choices: Sequence[Choice]) -> Plan:
        """Return the plan in which group g of ranks makes the choice `choices[g]`."""
        each = (choices[s % plan.num_groups][s // plan.num_groups] for s in range(plan.num_stages))
        return plan.running(list(each))

    if cluster.memory_bytes is None:
        return made([every[0]] * plan.num_groups)
    limits = [min(map(cluster.memory, stage.ranks)) for stage in plan.stages[: plan.num_groups]]

    @cache
    def fits(choice: Choice) -> NDArray[np.bool_]:
        peaks = group_peaks(profile, made([choice] * plan.num_groups))
        return np.array(peaks) <= limits

    if fits(every[0]).all():
        return made([every[0]] * plan.num_groups)
    if not fits(every[-1]).all():
        return None
    allowed = np.array(list(map(fits, every)))
    if plan.chunks == 1:
        chosen: Ints = np.argmax(allowed, axis=0)
    else:
        sums, maxima, floor = _parts(plan, variants, every, profile, cluster)
        chosen = least_together(np.where(allowed, sums, np.inf), maxima, floor)
    return made([every[number] for number in chosen])


def _choices(variants: Sequence[Variant], chunks: int) -> list[Choice]:
    """Return the choices for the stages of one rank, the fastest first and the leanest last.

    They are all where these are few, else those in which the first stages run leanest.
    """
    if len(variants) ** chunks <= MOST_CHOICES:
        return list(product(variants, repeat=chunks))
    first, *_, last = variants
    return [(last,) * lean + (first,) * (chunks - lean) for lean in range(chunks + 1)]


def _parts(
    plan: Plan,
    variants: Sequence[Variant],
    choices: Sequence[Choice],
    profile: ModelProfile,
    cluster: Cluster,
) -> tuple[Floats, Floats, float]:
    """Return the sum and the maximum of each choice in each group of ranks, and the maximum's least value."""
    stages = range(plan.num_stages)
    alike = [plan.running([variant] * plan.num_stages) for variant in variants]
    costs = [stage_costs(profile, each, measured_speed(profile, cluster)) for each in alike]
    terms = [plan_terms(each, of_each, cluster) for each, of_each in zip(alike, costs, strict=True)]
    parts = []
    for choice in choices:
        taken = [terms[variants.index(choice[s // plan.num_groups])] for s in stages]
        mixed = (np.array([getattr(taken[s], name)[s] for s in stages]) for name in TERMS)
        parts.append(group_parts(plan, StageTerms(*mixed)))
    sums, maxima = np.array(parts).swapaxes(0, 1)
    return sums, maxima, busiest_cut(alike[0], costs[0], cluster)


def least_together(sums: Floats, maxima: Floats, floor: float) -> Ints:
    """Return the choice of each group with the least sum over the groups plus the maximum.

    Args:
        sums, maxima: seconds of each choice, shape (choices, groups). Sums are infinite where a choice is not
            allowed; each group has one that is.
        floor: the least that the maximum can be.
    """
    bound, least = np.inf, np.inf
    chosen: Ints = np.argmin(sums, axis=0)
    while True:
        allowed = np.where(maxima < bound, sums, np.inf)
        here = np.argmin(allowed, axis=0)
        total = allowed.min(axis=0).sum()
        if not total < least:
            return chosen  # further choices have no lesser sum
        bound = float(np.take_along_axis(maxima, here[None], axis=0).max())
        if total + max(bound, floor) < least:
            chosen, least = here, total + max(bound, floor)
        if bound <= floor:
            return chosen
