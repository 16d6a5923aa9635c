"""Search: candidate plans from several sources, compared by the simulator.

`partition` is exact for a closed formula. The simulator also sees queues at links, shared processors and the
work that hides an all-reduce. Candidates are the few best of `partition`, the best straight pipeline, plain
data parallelism on all ranks and, where machines have several, on fewer of each. Under interleaved-1f1b the
few best of `interleave` compete. Invariant: only plans that fit into memory are returned. Where none does,
`NoPlanFits` says by how much and names a remedy.

The schedule "auto" stands for all synchronous ones and, where the request allows them, for the asynchronous
ones, which change the mathematics.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cluster_transform import with_ranks
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import compute_share, measured_speed, stage_costs, stage_speed
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, Prediction, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import AUTO, DEFAULT_REQUEST, PlanRequest
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.planning.schedules.registry import DEFAULT, SCHEDULES, TRAITS
from hybridpipe.planning.search.bound import least_seconds
from hybridpipe.planning.search.interleave import interleaved_plans
from hybridpipe.planning.search.partition import partition
from hybridpipe.planning.search.refine import refine
from hybridpipe.planning.cost.estimate import estimates
from hybridpipe.planning.search.placement import dealt
from hybridpipe.planning.sharing import may_run
from hybridpipe.planning.simulator.predict import is_simulated, predict

# Beyond these limits a search would take minutes; far beyond, the input is a mistake.
MAX_RANKS = 4096
MAX_LAYERS = 100_000
MAX_PRODUCT = 2**23  # of layers and ranks: half a minute
MAX_STRAIGHT = 256  # ranks of a straight pipeline; partition takes minutes for one of 1024
# The number of partition's plans that are simulated, without those that cannot be the best (`bound`). The
# formula sees neither the queues of asynchronous pipelines nor stages taking turns on a rank, so these need
# more: with 16 instead of 32, asynchronous plans of 240 problems were 3 % slower in the mean, one by 89 %.
NUM_EXACT, NUM_EXACT_ASYNCHRONOUS, NUM_INTERLEAVED = 8, 32, 6
MAX_ADVISED = 10_000  # layers times ranks; trying remedies for a larger problem takes minutes
NUM_BISECTIONS = 6  # of a factor: within 4 % where the first guess is ten times off
MAX_NAMED = 20  # stages of a plan whose name lists its replica counts
TIE = 1e-9  # relative: times that differ by less are equal


class NoPlanFits(ValueError):
    """Every plan needs more memory than a rank has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its prediction.

    Args:
        origin: its source: "exact", "dp", "straight", "interleaved" or "search".
        samples: of its microbatches.
    """

    origin: str
    plan: Plan
    samples: int

    @property
    def seconds(self) -> float:
        """Predicted time of a minibatch."""
        assert self.plan.predicted is not None
        return self.plan.predicted.minibatch_seconds


@dataclass(frozen=True, slots=True)
class _Problem:
    """The input of a search under one schedule: a model in microbatches, machines, and the request.

    Raises:
        ValueError: more ranks are requested than the cluster has, or the model or the cluster is too large.
    """

    profile: ModelProfile
    cluster: Cluster
    num_microbatches: int
    num_ranks: int
    request: PlanRequest  # under one schedule
    is_alternative: bool = False  # to the simplest schedule

    def __post_init__(self) -> None:
        if self.num_ranks > self.cluster.num_ranks:
            raise ValueError(
                f"ranks must be at most the cluster's {self.cluster.num_ranks}, got {self.num_ranks}"
            )
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"ranks must be at most {MAX_RANKS} to be planned, got {self.num_ranks}")
        if self.profile.num_layers > MAX_LAYERS:
            raise ValueError(
                f"layers must be at most {MAX_LAYERS} to be planned, got {self.profile.num_layers}"
            )
        if self.size > MAX_PRODUCT:
            raise ValueError(
                f"layers times ranks must be at most {MAX_PRODUCT} to be planned, got {self.size}"
            )

    @property
    def size(self) -> int:
        return self.profile.num_layers * self.num_ranks

    def recomputing(self, recompute: bool) -> PlanRequest:
        return replace(self.request, recompute=recompute)


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
        _problems(profile, cluster, minibatch, {profile.samples: num_microbatches}, request, num_ranks)
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
    return _searched(_problems(profile, cluster, minibatch, counts, request, num_ranks))


def _problems(
    profile: ModelProfile,
    cluster: Cluster,
    minibatch: int,
    sizes: Mapping[int, int],
    request: PlanRequest,
    num_ranks: int | None,
) -> list[_Problem]:
    """Return one problem for each requested schedule and size; `sizes` maps samples to microbatches."""
    return [
        _Problem(
            profile.scaled_to(samples),
            cluster,
            count,
            cluster.num_ranks if num_ranks is None else num_ranks,
            request.under(schedule),
            is_alternative=schedule != request.schedules[0],
        )
        for schedule in request.schedules
        for samples, count in ({minibatch: 1} if TRAITS[schedule].whole_minibatch else sizes).items()
    ]


def _searched(problems: Sequence[_Problem]) -> list[Candidate]:
    found: list[Candidate] = []
    for problem in problems:
        found += _candidates(problem, min((c.seconds for c in found), default=math.inf))
    if not found:
        raise NoPlanFits(_how_far(problems[0]))
    import os
    if os.environ.get("ALLN"):
        for n in range(problems[0].num_ranks - 1, 0, -1):
            best = min(c.seconds for c in found)
            if all(_least_work(problem, n) >= best for problem in problems):
                break
            for problem in problems:
                if _least_work(problem, n) < best:
                    best = min(c.seconds for c in found)
                    found += _candidates(replace(problem, num_ranks=n), best, True)
    if not os.environ.get("NOREFINE"):
      for problem in problems:
        mine = {replace(c.plan, predicted=None): c.seconds for c in found if c.plan.schedule == problem.request.schedule and c.samples == problem.profile.samples}
        if not mine: continue
        if min(mine.values()) > 1.15 * min(c.seconds for c in found): continue
        def expect(plan):
            return estimates(plan, stage_costs(problem.profile, plan, measured_speed(problem.profile, problem.cluster)), problem.cluster).closely
        made = {}
        def simulate(plan):
            made[plan] = with_prediction(plan, problem.profile, problem.cluster, min(mine.values()) * 1.15)
            return made[plan].predicted.minibatch_seconds
        for plan in refine(mine, problem.profile, problem.cluster, range(problem.num_ranks), fits=lambda p: fits(p, problem.profile, problem.cluster), expect=expect, simulate=simulate):
            if mine[plan] < math.inf: found.append(Candidate("near", made[plan], problem.profile.samples))
    return ranked(found)


def _least_work(problem, n):
    speeds = sorted(problem.cluster.speed(r) for r in range(problem.num_ranks))[-n:]
    w = sum(l.forward_seconds + l.backward_seconds for l in problem.profile.layers)
    return w * problem.num_microbatches / sum(speeds)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return best predictions first; equal ones by simpler schedule, fewer ranks, fewer stages."""
    rest = sorted(candidates, key=lambda candidate: candidate.seconds)
    order: list[Candidate] = []
    while rest:
        num_equal = sum(candidate.seconds <= rest[0].seconds * (1 + TIE) for candidate in rest)
        order += sorted(rest[:num_equal], key=_simplicity)
        rest = rest[num_equal:]
    return order


def _simplicity(candidate: Candidate) -> tuple[int, int, int, tuple[int, ...]]:
    plan = candidate.plan
    return SCHEDULES.index(plan.schedule), plan.num_ranks, plan.num_stages, plan.ranks


def data_parallel(
    profile: ModelProfile, cluster: Cluster, num_ranks: int, num_microbatches: int, schedule: str
) -> Plan:
    """Return the plan with one stage on all ranks, with its prediction, even where it does not fit into
    memory.

    Its schedule is 1f1b where the given one is AUTO or needs several stages.
    """
    if schedule == AUTO or TRAITS[schedule].interleaves:
        schedule = DEFAULT
    problem = _Problem(profile, cluster, num_microbatches, num_ranks, PlanRequest(schedule))
    return with_prediction(_data_parallel(problem, range(num_ranks)), profile, cluster)


def straight(
    profile: ModelProfile, cluster: Cluster, num_ranks: int, num_microbatches: int, schedule: str
) -> Plan | None:
    """Return the best pipeline with one replica a stage, with its prediction; None if none fits into memory.

    It may leave ranks unused.
    """
    found = []
    for name in PlanRequest(schedule).schedules:
        problem = _Problem(profile, cluster, num_microbatches, num_ranks, PlanRequest(name))
        for plan in _straight(problem, recompute=False):
            found.append(Candidate("straight", with_prediction(plan, profile, cluster), profile.samples))
    return ranked(found)[0].plan if found else None


def short_name(plan: Plan) -> str:
    """Return the plan's name, or its number of stages where the name would be long."""
    return plan.name if plan.num_stages <= MAX_NAMED else f"{plan.num_stages} stages"


def fits(plan: Plan, profile: ModelProfile, cluster: Cluster) -> bool:
    """True if every rank has the memory that it needs at its peak, and stages share nothing they must not."""
    return may_run(profile, plan) and _excess(plan, profile, cluster) <= 1


def with_prediction(plan: Plan, profile: ModelProfile, cluster: Cluster, limit: float = math.inf) -> Plan:
    """Return the plan with the simulator's prediction, or the formula's where simulating takes long."""
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


def _candidates(problem: _Problem, best: float = math.inf, fewer: bool = False) -> list[Candidate]:
    """Return every distinct proposal that fits and may be the best, with its prediction.

    An alternative schedule needs a simulation and more than one stage: with one stage all synchronous
    schedules are the same.
    """
    origins: dict[Plan, str] = {}
    for origin, plan in _fitting(problem):
        is_one = plan.num_stages == 1 and not plan.is_asynchronous
        if not problem.is_alternative or (not is_one and is_simulated(plan)):
            origins.setdefault(plan, origin)
    profile, cluster = problem.profile, problem.cluster
    found: list[Candidate] = []
    for plan, origin in origins.items():
        bounds = least_seconds(plan, profile, cluster)
        if (origin == "exact" or fewer or problem.is_alternative) and any(least > best * (1 + TIE) for least in bounds):
            continue
        limit = best * 1.15 if origin == "exact" else math.inf
        found.append(Candidate(origin, with_prediction(plan, profile, cluster, limit), profile.samples))
        best = min(best, found[-1].seconds)
    return [c for c in found if c.seconds < math.inf]


def _fitting(problem: _Problem) -> Iterator[tuple[str, Plan]]:
    for origin, plan in _proposals(problem):
        if fits(plan, problem.profile, problem.cluster):
            yield origin, plan


def _proposals(problem: _Problem) -> Iterator[tuple[str, Plan]]:
    # Recomputing trades time for memory, which helps only where memory is limited.
    limited = problem.cluster.memory_bytes is not None
    for recompute in (False, True) if problem.request.recompute and limited else (False,):
        for origin, plan in _proposed(problem, recompute):
            yield origin, _where_needed(plan, problem) if recompute else plan


def _proposed(problem: _Problem, recompute: bool) -> Iterator[tuple[str, Plan]]:
    if problem.request.traits.interleaves:
        yield from (("interleaved", plan) for plan in _interleaved(problem, recompute))
        return
    for one_stage in _data_parallel_plans(problem):
        yield "dp", replace(one_stage, recompute=recompute)
    in_line = _straight(problem, recompute)
    yield from (("straight", plan) for plan in in_line[:1])
    count = NUM_EXACT_ASYNCHRONOUS if problem.request.traits.is_asynchronous else NUM_EXACT
    for exact in _partition(problem, recompute)[:count] + in_line[1:]:
        yield "exact", exact


def _where_needed(plan: Plan, problem: _Problem) -> Plan:
    """Return the plan with recomputation only in stages that do not fit into memory without."""
    peaks = zip(plan.ranks, peak_memory_bytes(problem.profile, replace(plan, recompute=False)), strict=True)
    beyond = {rank for rank, peak in peaks if peak > problem.cluster.memory(rank)}
    if beyond.issuperset(plan.ranks):
        return plan
    stages = tuple(replace(stage, recompute=not beyond.isdisjoint(stage.ranks)) for stage in plan.stages)
    return replace(plan, stages=stages, recompute=False)


def _partition(problem: _Problem, recompute: bool, max_replicas: int | None = None) -> list[Plan]:
    ranks = range(problem.num_ranks)
    request = problem.recomputing(recompute)
    return partition(
        problem.profile,
        problem.cluster,
        problem.num_microbatches,
        request,
        ranks=ranks,
        max_replicas=max_replicas,
        closely=True,
    )


def _interleaved(problem: _Problem, recompute: bool, max_replicas: int | None = None) -> list[Plan]:
    """Return the best plans that fit, or all where none does."""
    if not problem.is_alternative and (problem.num_ranks < 2 or problem.profile.num_layers < 4):
        raise ValueError(
            f"schedule {problem.request.schedule} needs at least 2 ranks and 4 layers, "
            f"got {problem.num_ranks} and {problem.profile.num_layers}"
        )
    ranks, request = range(problem.num_ranks), problem.recomputing(recompute)
    plans = interleaved_plans(
        problem.profile, problem.cluster, problem.num_microbatches, request, ranks, max_replicas
    )
    if not plans and not problem.is_alternative:
        raise ValueError(
            f"schedule {problem.request.schedule} needs 4 layers that a cut may separate, and "
            "layers that share tensors must stay together: use schedule 1f1b"
        )
    fitting = (plan for plan in plans if fits(plan, problem.profile, problem.cluster))
    return list(islice(fitting, NUM_INTERLEAVED)) or plans


def _straight(problem: _Problem, recompute: bool) -> list[Plan]:
    """Return the best pipeline with one replica a stage; a single stage only where there is nothing longer.

    For an asynchronous schedule, of which the formula sees less, these are the best few.
    """
    problem = replace(problem, num_ranks=min(problem.num_ranks, MAX_STRAIGHT))
    if problem.request.traits.interleaves:
        plans = _interleaved(problem, recompute, max_replicas=1)
        plans = [plan for plan in plans if fits(plan, problem.profile, problem.cluster)]
    else:
        plans = _partition(problem, recompute, max_replicas=1)
    longer = [plan for plan in plans if plan.num_stages > 1]
    return (longer or plans)[: NUM_EXACT_ASYNCHRONOUS if problem.request.traits.is_asynchronous else 1]


def _data_parallel_plans(problem: _Problem) -> Iterator[Plan]:
    """Yield data parallelism on all ranks and, where machines have several, on the best number of each."""
    a_machine = min(problem.cluster.node_ranks or 1, problem.num_ranks)
    yield _data_parallel(problem, range(problem.num_ranks))
    fewer = [
        _data_parallel(problem, [rank for rank in range(problem.num_ranks) if rank % a_machine < count])
        for count in sorted({a_machine * i // 16 for i in range(1, 16)} - {0})  # every number, up to 16
    ]
    if fewer:
        yield min(fewer, key=lambda plan: estimate(plan, problem.profile, problem.cluster))


def _data_parallel(problem: _Problem, ranks: Sequence[int]) -> Plan:
    stage = StageSpec(0, problem.profile.num_layers, len(ranks), dealt(problem.cluster, ranks))
    return problem.recomputing(False).plan([stage], problem.num_microbatches)


def _how_far(problem: _Problem) -> str:
    """Return one line: the excess of the plan that comes closest, and the first remedy that works."""
    plan = _closest(problem)
    peaks = dict(zip(plan.ranks, peak_memory_bytes(problem.profile, plan), strict=True))
    rank = max(peaks, key=lambda r: peaks[r] / max(problem.cluster.memory(r), 1))
    name = short_name(plan) + " with recomputation" * plan.recompute
    closest = "comes closest" if problem.size <= MAX_ADVISED else "comes closest of the few that were tried"
    return (
        f"no plan fits into memory: {name} {closest} and "
        f"needs {peaks[rank]} bytes on rank {rank}, which has {problem.cluster.memory(rank):.0f}; "
        + _advice(problem)
    )


def _advice(problem: _Problem) -> str:
    """Return the first remedy that works; for a large problem all remedies, untried."""
    remedies = list(_remedies(problem))
    if problem.size > MAX_ADVISED:
        return f"these may help: {', '.join(text for text, _ in remedies)}"
    for text, eased in remedies:
        if any(_fitting(eased)):
            return f"{text} would help"
    return f"none of these would help: {', '.join(text for text, _ in remedies)}"


def _closest(problem: _Problem) -> Plan:
    """Return the plan that fits if the memory of every rank grows by the least factor, found by bisection.

    For a large problem it is the plan for unlimited memory that needs least, recomputing if requested.
    """

    def excess(plan: Plan) -> float:
        return _excess(plan, problem.profile, problem.cluster)

    unlimited = replace(problem, cluster=replace(problem.cluster, memory_bytes=None))
    closest = min(
        (replace(plan, recompute=problem.request.recompute) for _, plan in _proposals(unlimited)), key=excess
    )
    too_little = 1.0
    for _ in range(NUM_BISECTIONS if problem.size <= MAX_ADVISED else 0):
        factor = math.sqrt(too_little * excess(closest))
        eased = replace(problem, cluster=_with_memory(problem.cluster, factor))
        if (found := next(_fitting(eased), None)) is None:
            too_little = factor
        else:
            closest = min(closest, found[1], key=excess)
    return closest


def _excess(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the largest ratio of a rank's peak to its limit."""
    peaks = peak_memory_bytes(profile, plan)
    return max(peak / max(cluster.memory(rank), 1) for rank, peak in zip(plan.ranks, peaks, strict=True))


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with its memory multiplied."""
    match cluster.memory_bytes:
        case None:
            return cluster
        case int(memory):
            return replace(cluster, memory_bytes=math.ceil(memory * factor))
        case memories:
            return replace(cluster, memory_bytes=tuple(math.ceil(memory * factor) for memory in memories))


def _remedies(problem: _Problem) -> Iterator[tuple[str, _Problem]]:
    """Yield changes that a user could make, easiest first."""
    if not problem.request.recompute:
        yield "recomputation", replace(problem, request=replace(problem.request, recompute=True))
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
