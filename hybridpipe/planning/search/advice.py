"""Advice: what is printed where no plan fits into memory.

It says by how much the closest plan does not, and the gain of every remedy. Not known here: time.
Invariant: a remedy that is said to help was tried.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cluster_transform import with_ranks
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, Variant
from hybridpipe.planning.quantities import size
from hybridpipe.planning.request import AUTO
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.planning.schedules.registry import DEFAULT
from hybridpipe.planning.search.problem import MAX_RANKS, Problem, excess, short_name
from hybridpipe.planning.search.proposals import proposals

MAX_ADVISED = 10_000  # layers times ranks; trying remedies for a larger problem takes minutes
NUM_BISECTIONS = 6  # of a factor: within 4 % where the first guess is ten times off
ROUGHLY = 2  # bisections for a remedy
MORE_RANKS = (2, 4)  # factors


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a plan needs on the rank that lacks most.

    Args:
        needed, had: bytes.
    """

    plan: Plan
    rank: int
    needed: int
    had: float

    @property
    def fits(self) -> bool:
        """True if no rank lacks memory."""
        return self.needed <= self.had


def how_far(problem: Problem) -> str:
    """Return the excess of the plan that comes closest, the first remedy that works, and what each gives."""
    need = _need(problem, _closest(problem))
    is_large = problem.size > MAX_ADVISED
    closest = "comes closest of the few that were tried" if is_large else "comes closest"
    told = (
        f"no plan fits into memory: {_named(need.plan)} {closest} and needs "
        f"{size(need.needed)} on rank {need.rank}, which has {size(need.had)}; "
    )
    if is_large:
        remedies = ", ".join(text for text, _ in (*_changes(problem), *_more_ranks(problem)))
        return f"{told}these may help: {remedies}"
    tried = [(text, _least_need(eased)) for text, eased in _changes(problem)]
    several = len(tried) > 1
    tried += _on_more_ranks(problem)
    if several and not any(each.fits for _, each in tried):
        tried += _together(problem)
    helps = next((f"{text} would help" for text, each in tried if each.fits), "none of these would help")
    return f"{told}{helps}\n{_table(need, tried)}"


def _named(plan: Plan) -> str:
    """Return a plan's name and how it saves memory."""
    stages = range(plan.num_stages)
    zero = max(map(plan.zero_of, stages))
    saves = ["recomputation"] * any(map(plan.recomputes, stages)) + [f"zero = {zero}"] * (zero > 0)
    return short_name(plan) + (f" with {' and '.join(saves)}" if saves else "")


def _table(need: Need, tried: list[tuple[str, Need]]) -> str:
    """Return aligned lines of what each remedy needs, against what the rank has."""
    rows = [("with", "plan", "rank", "needs", "has", "")]
    for text, each in (("as it is", need), *tried):
        lack = "fits" if each.fits else f"{each.needed / max(each.had, 1):.3g} times as much"
        rows.append((text, short_name(each.plan), str(each.rank), size(each.needed), size(each.had), lack))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _need(problem: Problem, plan: Plan) -> Need:
    peaks = dict(zip(plan.ranks, peak_memory_bytes(problem.profile, plan), strict=True))
    rank = max(peaks, key=lambda r: peaks[r] / max(problem.cluster.memory(r), 1))
    return Need(plan, rank, peaks[rank], problem.cluster.memory(rank))


def _least_need(problem: Problem) -> Need:
    """Return what the first proposal that fits needs, or else the plan that comes closest."""
    return _need(problem, _fitting(problem) or _closest(problem, ROUGHLY))


def _fitting(problem: Problem) -> Plan | None:
    """Return the first proposal that fits; None if none does."""
    return next((plan for _, plan in proposals(problem)), None)


def _closest(problem: Problem, num_bisections: int = NUM_BISECTIONS) -> Plan:
    """Return the plan that fits if the memory of every rank grows by the least factor, found by bisection.

    For a large problem it is the plan for unlimited memory that needs least. Stages recompute that have to.
    """
    leanest = problem.request.leanest

    def needed(plan: Plan) -> float:
        return excess(plan, problem.profile, problem.cluster)

    def lean(plan: Plan) -> Plan:
        return plan.running([leanest] * plan.num_stages)

    closest = min((lean(plan) for _, plan in proposals(problem.without_limit())), key=needed)
    too_little = 1.0
    for _ in range(num_bisections if problem.size <= MAX_ADVISED else 0):
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


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield changes that a user could make on the same ranks, easiest first."""
    if not problem.request.recompute:
        yield "recomputation", _requesting(problem, recompute=True)
    for zero in (1, 2) if problem.request.zero == 0 and problem.num_ranks > 1 else ():
        if zero <= problem.request.most_zero:
            yield f"zero = {zero}", _requesting(problem, zero=zero)
    for samples in _smaller_sizes(problem):
        yield f"microbatches of {samples} sample(s)", _in_microbatches(problem, samples)
    if _may_change_schedule(problem):
        yield f"the schedule {DEFAULT}", _requesting(problem, schedule=DEFAULT)


def _more_ranks(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the problem on more ranks, each with the memory of one of those that there are."""
    for factor in MORE_RANKS:
        cluster, ranks = problem.cluster, factor * problem.num_ranks
        text = f"{ranks} ranks"
        if cluster.num_ranks < ranks and cluster.num_ranks <= (cluster.node_ranks or 0):
            text += f" on {ceil_div(ranks, cluster.num_ranks)} such machines"
            cluster = replace(cluster, node_ranks=None)  # no link of theirs is known, and memory needs none
        if ranks <= MAX_RANKS:
            grown = with_ranks(cluster, max(ranks, cluster.num_ranks))
            yield text, replace(problem, cluster=grown, num_ranks=ranks)


def _on_more_ranks(problem: Problem) -> Iterator[tuple[str, Need]]:
    """Yield what more and more ranks need, until that fits, or twice as many would hardly help."""
    for text, grown in _more_ranks(problem):
        need = _least_need(grown)
        yield text, need
        if need.fits or need.needed > 2 * need.had:
            return


def _together(problem: Problem) -> Iterator[tuple[str, Need]]:
    """Yield what all changes together need, and then on more ranks."""
    zero = problem.request.zero or AUTO
    eased = _requesting(problem, recompute=True, zero=zero)
    if _may_change_schedule(problem):
        eased = _requesting(eased, schedule=DEFAULT)
    for samples in _smaller_sizes(problem)[-1:]:
        eased = _in_microbatches(eased, samples)
    need = _least_need(eased)
    yield "all of them", need
    if not need.fits:
        for text, each in _on_more_ranks(eased):
            yield f"all of them, {text}", each


def _requesting(problem: Problem, **options: Any) -> Problem:
    return replace(problem, request=replace(problem.request, **options))


def _may_change_schedule(problem: Problem) -> bool:
    return problem.request.schedule != DEFAULT and not problem.request.traits.is_asynchronous


def _smaller_sizes(problem: Problem) -> list[int]:
    """Return a half and a quarter of the microbatch's samples, where it can be smaller."""
    if problem.request.traits.whole_minibatch:
        return []
    return [size for size in (problem.profile.samples // 2, problem.profile.samples // 4) if size]


def _in_microbatches(problem: Problem, samples: int) -> Problem:
    minibatch = problem.profile.samples * problem.num_microbatches
    smaller = problem.profile.scaled_to(samples)
    return replace(problem, profile=smaller, num_microbatches=ceil_div(minibatch, samples))
