"""Advice: the line that is printed where no plan fits into memory.

It says by how much the closest plan does not, and names the first remedy that works. Not known here: time.
Invariant: a remedy that is said to help was tried.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cluster_transform import with_ranks
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, Variant
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.planning.schedules.registry import DEFAULT
from hybridpipe.planning.search.problem import MAX_RANKS, Problem, excess, short_name
from hybridpipe.planning.search.proposals import proposals

MAX_ADVISED = 10_000  # layers times ranks; trying remedies for a larger problem takes minutes
NUM_BISECTIONS = 6  # of a factor: within 4 % where the first guess is ten times off


def how_far(problem: Problem) -> str:
    """Return one line: the excess of the plan that comes closest, and the first remedy that works."""
    plan = _closest(problem)
    peaks = dict(zip(plan.ranks, peak_memory_bytes(problem.profile, plan), strict=True))
    rank = max(peaks, key=lambda r: peaks[r] / max(problem.cluster.memory(r), 1))
    name = short_name(plan) + " with recomputation" * any(map(plan.recomputes, range(plan.num_stages)))
    shared_out = max(map(plan.zero_of, range(plan.num_stages)))
    name += f" {'and' if 'with' in name else 'with'} zero = {shared_out}" * (shared_out > 0)
    closest = "comes closest" if problem.size <= MAX_ADVISED else "comes closest of the few that were tried"
    return (
        f"no plan fits into memory: {name} {closest} and "
        f"needs {peaks[rank]} bytes on rank {rank}, which has {problem.cluster.memory(rank):.0f}; "
        + _advice(problem)
    )


def _fitting(problem: Problem) -> Plan | None:
    """Return the first proposal that fits; None if none does."""
    return next((plan for _, plan in proposals(problem)), None)


def _advice(problem: Problem) -> str:
    """Return the first remedy that works; for a large problem all remedies, untried."""
    remedies = list(_remedies(problem))
    if problem.size > MAX_ADVISED:
        return f"these may help: {', '.join(text for text, _ in remedies)}"
    for text, eased in remedies:
        if _fitting(eased) is not None:
            return f"{text} would help"
    return f"none of these would help: {', '.join(text for text, _ in remedies)}"


def _closest(problem: Problem) -> Plan:
    """Return the plan that fits if the memory of every rank grows by the least factor, found by bisection.

    For a large problem it is the plan for unlimited memory that needs least. Stages recompute that have to.
    """
    leanest = problem.request.variants[-1]

    def needed(plan: Plan) -> float:
        return excess(plan, problem.profile, problem.cluster)

    def lean(plan: Plan) -> Plan:
        return plan.running([leanest] * plan.num_stages)

    closest = min((lean(plan) for _, plan in proposals(problem.without_limit())), key=needed)
    too_little = 1.0
    for _ in range(NUM_BISECTIONS if problem.size <= MAX_ADVISED else 0):
        factor = math.sqrt(too_little * needed(closest))
        eased = replace(problem, cluster=_with_memory(problem.cluster, factor))
        if (found := _fitting(eased)) is None:
            too_little = factor
        else:
            closest = min(closest, lean(found), key=needed)
    just_enough = replace(problem, cluster=_with_memory(problem.cluster, needed(closest)))
    return just_enough.fitted(closest.running([Variant()] * closest.num_stages)) or closest


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with its memory multiplied."""
    match cluster.memory_bytes:
        case None:
            return cluster
        case int(memory):
            return replace(cluster, memory_bytes=math.ceil(memory * factor))
        case memories:
            return replace(cluster, memory_bytes=tuple(math.ceil(memory * factor) for memory in memories))


def _remedies(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield changes that a user could make, easiest first."""
    if not problem.request.recompute:
        yield "recomputation", replace(problem, request=replace(problem.request, recompute=True))
    for zero in (1, 2) if problem.request.zero == 0 else ():
        if problem.num_ranks > 1 and zero <= problem.request.most_zero:
            yield f"zero = {zero}", replace(problem, request=replace(problem.request, zero=zero))
    samples = problem.profile.samples
    minibatch = samples * problem.num_microbatches
    for size in (samples // 2, samples // 4):
        if size and not problem.request.traits.whole_minibatch:
            smaller = problem.profile.scaled_to(size)
            count = ceil_div(minibatch, size)
            yield (
                f"microbatches of {size} sample(s)",
                replace(problem, profile=smaller, num_microbatches=count),
            )
    if problem.request.schedule != DEFAULT and not problem.request.traits.is_asynchronous:
        yield f"the schedule {DEFAULT}", replace(problem, request=replace(problem.request, schedule=DEFAULT))
    for factor in (2, 4):
        ranks = factor * problem.num_ranks
        if ranks <= MAX_RANKS:
            grown = with_ranks(problem.cluster, max(ranks, problem.cluster.num_ranks))
            yield f"{ranks} ranks", replace(problem, cluster=grown, num_ranks=ranks)
