"""Search: the plans that may be best, compared by the simulator.

1. `proposals` names plans; the best of a closed formula, exactly, are among them (`partition`).
2. Those that may be the best by their bounds are simulated, and all straight pipelines where these are few.
3. `refine` simulates neighbours of the best.
4. The plans for fewer ranks compete as well: for every number up to `EVERY_NUMBER`, for powers of two above,
   unless so few ranks could not compute as fast.

Under a memory limit the plans of the same search without one compete where they fit. Invariants: only plans
that fit into memory are returned; where none does, `NoPlanFits` says by how much and names a remedy. No plan
is slower than the one for fewer ranks of 4., nor than the plan without a memory limit where that fits.

Where the profile knows what shards take, plans whose stages all have as many compete too: each number is
searched for by itself, on ranks that stand for all shards of a replica (`planning.shards`).

The schedule "auto" stands for all synchronous ones and, where the request allows them, for the asynchronous
ones, which change the mathematics.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import compute_share, measured_speed, stage_costs, stage_speed
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, Prediction
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import AUTO, DEFAULT_REQUEST, PlanRequest
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.planning.schedules.registry import DEFAULT, SCHEDULES, TRAITS
from hybridpipe.planning.search.advice import how_far
from hybridpipe.planning.search.bound import FASTER, least_seconds
from hybridpipe.planning.search.fill import filled, tuned
from hybridpipe.planning.search.problem import Problem, fits, problems_of, short_name
from hybridpipe.planning.search.proposals import (
    every_straight,
    one_stage,
    partition_plans,
    proposals,
    straight_plans,
)
from hybridpipe.planning.search.refine import FAR, refine
from hybridpipe.planning.shards import pooled, unpooled
from hybridpipe.planning.simulator.predict import is_simulated, predict

__all__ = [
    "Candidate",
    "NoPlanFits",
    "data_parallel",
    "fits",
    "ranked",
    "search",
    "search_sizes",
    "short_name",
    "straight",
    "with_prediction",
]

EVERY_NUMBER = 16  # of ranks, below which the plans for all smaller numbers are searched for, too
NUM_FILLED = 12  # plans that split backwards whose numbers are chosen, for each number of ranks
NUM_FILLED_OF_V = 2  # whose orders take longer to make; 1 of a large problem, whose simulations take seconds
SMALL = 1500  # layers times ranks; beyond, twice the programs take twice the time
TIGHT, NUM_TIGHT = 0.9, 8  # part of the best plan's memory, and plans that need less
TIE = 1e-9  # relative: times that differ by less are equal


class NoPlanFits(ValueError):
    """Every plan needs more memory than a rank has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its prediction.

    Args:
        origin: its source: "exact", "dp", "straight", "interleaved", "near" or "search".
        samples: of its microbatches.
    """

    origin: str
    plan: Plan
    samples: int

    @property
    def seconds(self) -> float:
        """Predicted time of a minibatch."""
        return seconds_of(self.plan)

    @property
    def seconds_without_bubble(self) -> float:
        """The least time of a minibatch in which the ranks compute as much, however it is scheduled."""
        assert self.plan.predicted is not None
        return self.seconds * (1 - self.plan.predicted.bubble_fraction)


def search(
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    request: PlanRequest = DEFAULT_REQUEST,
    num_ranks: int | None = None,
) -> list[Candidate]:
    """Return all candidates that fit into memory, best prediction first; ties go to the simplest (`ranked`).

    Args:
        profile: of one microbatch.
        num_microbatches: of a minibatch.
        num_ranks: ranks that may be used, the first ones. None: all.

    Raises:
        NoPlanFits: no candidate fits into `cluster.memory_bytes`.
        ValueError: more ranks are requested than the cluster has, or the model or the cluster is too large.
    """
    minibatch = profile.samples * num_microbatches
    return _searched(
        problems_of(profile, cluster, minibatch, {profile.samples: num_microbatches}, request, num_ranks)
    )


def search_sizes(
    profile: ModelProfile,
    cluster: Cluster,
    minibatch: int,
    request: PlanRequest = DEFAULT_REQUEST,
    num_ranks: int | None = None,
) -> list[Candidate]:
    """Return the candidates of `search` over every measured size of the microbatch.

    A short last microbatch counts as a whole one. Under pipedream a minibatch travels whole.

    Args:
        minibatch: samples of a minibatch, the same for all sizes.
    """
    sizes = [samples for samples in profile.sizes if samples <= minibatch] or [minibatch]
    counts = {samples: ceil_div(minibatch, samples) for samples in sizes}
    return _searched(problems_of(profile, cluster, minibatch, counts, request, num_ranks))


def _searched(groups: Iterable[Sequence[Problem]]) -> list[Candidate]:
    """Return the candidates, best first.

    Args:
        groups: one for each number of shards, of problems that differ in schedule and size.
    """
    simplest, *others = groups
    found: list[Candidate] = []
    outlook = _Outlook()
    for problems in (simplest, *others):
        for each in _found(problems, outlook) if problems else ():
            found.append(replace(each, plan=unpooled(each.plan, problems[0].cluster.shards)))
    if not found:
        raise NoPlanFits(how_far(simplest[0]))
    return ranked(found)


def _filled(problem: Problem, candidates: Sequence[Candidate], outlook: "_Outlook") -> Iterator[Candidate]:
    """Yield the best plans that split backwards with their numbers chosen, where they may then be the best.

    The numbers change the order: of eight ranks with 1 Gbit/s some plans behind the first gain a fifth.
    """
    takes_lags = problem.request.traits.takes_lags
    count = 1 if problem.is_large else NUM_FILLED if takes_lags else NUM_FILLED_OF_V
    several = (each for each in candidates if each.plan.num_stages > 1 and is_simulated(each.plan))
    for each in sorted(several, key=lambda each: each.seconds)[:count]:
        if each.seconds_without_bubble >= outlook.best:
            continue
        plan = filled(each.plan, problem.profile, problem.cluster, problem.fits)
        if plan is not None:
            if takes_lags and seconds_of(plan) < outlook.best and not problem.is_large:
                plan = tuned(plan, problem.profile, problem.cluster, problem.fits)
            outlook.best = min(outlook.best, seconds_of(plan))
            yield replace(each, plan=plan)


def _found(problems: Sequence[Problem], outlook: "_Outlook") -> list[Candidate]:
    """Return the candidates, with the best for fewer ranks, that may be as fast as the outlook.

    Those are left out where so few ranks cannot compute as fast as the best plan. Beyond `EVERY_NUMBER` they
    are lower powers of two, and left out too where no estimate is faster: fewer ranks allow fewer plans.
    """
    found = _within_memory(problems, outlook)
    num_ranks, fewest = problems[0].num_ranks, 1 + problems[0].request.traits.interleaves
    while num_ranks > fewest:
        num_ranks = num_ranks - 1 if num_ranks <= EVERY_NUMBER else 1 << (num_ranks - 1).bit_length() - 1
        fewer = [replace(problem, num_ranks=num_ranks) for problem in problems]
        least = min(problem.least_seconds() for problem in fewer)
        if num_ranks > EVERY_NUMBER:
            least = max(least, outlook.promised)
        if outlook.best < math.inf and least >= outlook.best * (1 - TIE):
            break
        known = {each.plan for each in found}
        found += [each for each in ranked(_within_memory(fewer, _Outlook()))[:1] if each.plan not in known]
        outlook.best = min([outlook.best, *(each.seconds for each in found)])
    return found


@dataclass
class _Outlook:
    """The seconds of the best plan so far, and those of the best that the closer estimate promises."""

    best: float = math.inf
    promised: float = math.inf


def _within_memory(problems: Sequence[Problem], outlook: _Outlook) -> list[Candidate]:
    """Return the candidates that fit. Without a limit of memory they are searched for first.

    There schedules that spare memory are no alternative.
    """
    if not problems[0].is_limited:
        return _all_candidates(problems, outlook)
    profiles = {problem.profile.samples: problem.profile for problem in problems}
    usual = [each for each in problems if not (each.is_alternative and each.request.traits.spares_memory)]
    before = outlook.best
    free = _all_candidates([each.without_limit() for each in usual], outlook)
    found = [each for each in free if fits(each.plan, profiles[each.samples], problems[0].cluster)]
    if found and min(each.seconds for each in found) == outlook.best:
        return found
    outlook.best = min([before, *(each.seconds for each in found)])
    known = {each.plan for each in found}
    return [*found, *(each for each in _all_candidates(problems, outlook) if each.plan not in known)]


def _all_candidates(problems: Sequence[Problem], outlook: _Outlook) -> list[Candidate]:
    """Return the candidates of all problems; those of one that is far behind are not refined."""
    found = [list(_candidates(problem, outlook)) for problem in problems]
    for problem, candidates in zip(problems, found, strict=True):
        least = min((each.seconds for each in candidates), default=math.inf)
        if not problem.is_large and least <= FAR * outlook.best < math.inf:
            candidates += _tight(problem, candidates, outlook)
            candidates += _refined(problem, candidates)
            outlook.best = min(outlook.best, *(each.seconds for each in candidates))
    for problem, candidates in zip(problems, found, strict=True):
        if problem.request.traits.splits_backward:  # first where equal: their pace is higher
            candidates[:0] = list(_filled(problem, candidates, outlook))
    return [each for candidates in found for each in candidates]


def _tight(problem: Problem, candidates: Sequence[Candidate], outlook: _Outlook) -> Iterator[Candidate]:
    """Yield plans that need less memory than the best one, where memory is not limited.

    They are the formula's best among other plans. It errs alike for those that are much alike, so of the
    runners-up without a limit many are slow where the first one is.
    """
    traits = problem.request.traits
    if problem.is_limited or problem.size > SMALL:
        return
    if not traits.has_warm_up or traits.interleaves or traits.splits_backward:
        return
    best = min(candidates, key=lambda each: each.seconds)
    pipelines = (each.seconds for each in candidates if each.plan.num_stages > 1)
    if min(pipelines, default=math.inf) > FASTER * best.seconds:
        return
    assert best.plan.predicted is not None
    peak = max(best.plan.predicted.peak_memory_bytes)
    known = {replace(each.plan, predicted=None) for each in candidates}
    limited = replace(problem.cluster, memory_bytes=max(1, int(TIGHT * peak)))
    for plan in partition_plans(replace(problem, cluster=limited), NUM_TIGHT, briefly=True):
        candidate = None if plan in known else _judged(problem, "exact", plan, outlook.best)
        if candidate is not None:
            outlook.best = min(outlook.best, candidate.seconds)
            yield candidate


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return best predictions first; equal ones by simpler schedule, no shards, fewer ranks and stages, less
    zero.
    """
    rest = sorted(candidates, key=lambda candidate: candidate.seconds)
    order: list[Candidate] = []
    while rest:
        num_equal = sum(candidate.seconds <= rest[0].seconds * (1 + TIE) for candidate in rest)
        order += sorted(rest[:num_equal], key=_simplicity)
        rest = rest[num_equal:]
    return order


def _simplicity(candidate: Candidate) -> tuple[int, bool, int, int, int, tuple[int, ...]]:
    plan = candidate.plan
    sharded = sum(map(plan.zero_of, range(plan.num_stages)))
    simpler = SCHEDULES.index(plan.schedule), plan.splits_tensors
    return *simpler, plan.num_ranks, plan.num_stages, sharded, plan.ranks


def data_parallel(
    profile: ModelProfile, cluster: Cluster, num_ranks: int, num_microbatches: int, schedule: str
) -> Plan:
    """Return the plan with one stage on all ranks, with its prediction, even where it does not fit into
    memory.

    Its schedule is 1f1b where the given one is AUTO or needs several stages.
    """
    if schedule == AUTO or TRAITS[schedule].interleaves:
        schedule = DEFAULT
    problem = Problem(profile, cluster, num_microbatches, num_ranks, PlanRequest(schedule))
    return with_prediction(one_stage(problem, range(num_ranks)), profile, cluster)


def straight(
    profile: ModelProfile,
    cluster: Cluster,
    num_ranks: int,
    num_microbatches: int,
    schedule: str,
    recompute: bool = False,
) -> Plan | None:
    """Return the best pipeline with one replica a stage, with its prediction; None if none fits into memory.

    It may leave ranks unused. With `recompute`, stages recompute that must to fit.
    """
    found: list[Candidate] = []
    names = PlanRequest(schedule).compared(cluster.memory_bytes is not None)
    for name in names:
        request = PlanRequest(name, recompute=recompute)
        is_alternative = name != names[0]  # one that has no plan for so few ranks or layers is left out
        problem = Problem(profile, cluster, num_microbatches, num_ranks, request, is_alternative)
        for plan in straight_plans(problem):
            found.append(Candidate("straight", with_prediction(plan, profile, cluster), profile.samples))
        for least, plan in every_straight(problem):
            best = min((each.seconds for each in found), default=math.inf)
            if least > best:
                break
            if (candidate := _judged(problem, "straight", plan, best)) is not None:
                found.append(candidate)
        own = [each for each in found if each.plan.schedule == name]
        found += _refined(problem, own, max_replicas=1) if own and not problem.is_large else []
    return ranked(found)[0].plan if found else None


def with_prediction(plan: Plan, profile: ModelProfile, cluster: Cluster, limit: float = math.inf) -> Plan:
    """Return the plan with the simulator's prediction, or the formula's where simulating takes long."""
    if plan.splits_tensors:
        few, split, machines = pooled(plan, profile, cluster)
        return unpooled(with_prediction(few, split, machines, limit), plan.stages[0].tensor)
    if is_simulated(plan):
        return replace(plan, predicted=predict(plan, profile, cluster, limit)[1])
    seconds = estimate(plan, profile, cluster)
    rate = profile.samples * plan.num_microbatches / seconds if seconds else 0.0
    bubble = 1 - _busy_seconds(plan, profile, cluster) / (seconds * plan.num_ranks) if seconds else 0.0
    return replace(plan, predicted=Prediction(seconds, rate, bubble, peak_memory_bytes(profile, plan)))


def _busy_seconds(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the seconds that all ranks together compute, each at the speed of its stage's slowest."""
    share = compute_share(cluster, plan.ranks)
    return sum(
        (
            plan.num_microbatches * (cost.forward_seconds + cost.backward_seconds)
            + stage.replicas * (cost.products_seconds + cost.update_seconds)
        )
        / stage_speed(cluster, stage.ranks, share)
        for stage, cost in zip(
            plan.stages, stage_costs(profile, plan, measured_speed(profile, cluster)), strict=True
        )
    )


def seconds_of(plan: Plan) -> float:
    """Return a plan's predicted time of a minibatch."""
    assert plan.predicted is not None
    return plan.predicted.minibatch_seconds


def _candidates(problem: Problem, outlook: _Outlook) -> Iterator[Candidate]:
    """Yield every distinct proposal that fits and may be the best, with its prediction.

    An alternative schedule needs a simulation and more than one stage: with one stage all synchronous
    schedules are the same.
    """
    known: set[Plan] = set()
    promised = math.inf
    for origin, plan in proposals(problem):
        is_one = plan.num_stages == 1 and not plan.is_asynchronous
        if plan in known or (problem.is_alternative and (is_one or not is_simulated(plan))):
            continue
        known.add(plan)
        if origin in ("exact", "interleaved") and promised == math.inf:  # the first is the most promising
            promised = problem.estimates(plan).closely
            outlook.promised = min(outlook.promised, promised)
        is_baseline = origin in ("dp", "straight") and not problem.is_alternative
        candidate = _judged(problem, origin, plan, math.inf if is_baseline else outlook.best)
        if candidate is not None:
            outlook.best = min(outlook.best, candidate.seconds)
            yield candidate
    for least, plan in every_straight(problem):
        if least > outlook.best * (1 + TIE):
            return
        if plan not in known and (candidate := _judged(problem, "exact", plan, outlook.best)) is not None:
            outlook.best = min(outlook.best, candidate.seconds)
            yield candidate


def _judged(problem: Problem, origin: str, plan: Plan, best: float) -> Candidate | None:
    """Return a plan that fits, with its prediction; None if it is far behind the best."""
    profile, cluster = problem.profile, problem.cluster
    if best < math.inf:
        least = least_seconds(plan, profile, cluster, problem.estimates(plan))
        if least > best * (1 + TIE):
            return None
    candidate = Candidate(origin, _predicted(problem, plan, FAR * best), profile.samples)
    return candidate if candidate.seconds < math.inf else None


def _predicted(problem: Problem, plan: Plan, limit: float) -> Plan:
    """Return `with_prediction`, simulated at most once but for a larger limit."""
    until, found = problem.figures.simulated.get(plan, (-math.inf, plan))
    if until < limit and (found.predicted is None or seconds_of(found) == math.inf):
        found = with_prediction(plan, problem.profile, problem.cluster, limit)
        problem.figures.simulated[plan] = limit, found
    return found


def _refined(
    problem: Problem, candidates: Sequence[Candidate], max_replicas: float = math.inf
) -> list[Candidate]:
    """Return the neighbours of the best candidates that `refine` simulates."""
    found: list[Candidate] = []

    def expect(plan: Plan) -> float:
        return problem.estimates(plan).closely if max(plan.replicas) <= max_replicas else math.inf

    def simulate(plan: Plan, limit: float) -> float:
        candidate = Candidate("near", _predicted(problem, plan, limit), problem.profile.samples)
        found.append(candidate)
        return candidate.seconds

    seconds = {replace(each.plan, predicted=None): each.seconds for each in candidates}
    refine(seconds, problem, expect, simulate)
    return [candidate for candidate in found if candidate.seconds < math.inf]
