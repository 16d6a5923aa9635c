"""Search: gather candidate plans, let the simulator judge them, keep the best.

`partition` is exact for a closed formula; the simulator also sees queues at links, shared processors and
which all-reduce hides behind what. So the few best of `partition` compete, beside the best straight pipeline
and plain data parallelism on all ranks and, where ranks share processors, on fewer. Only plans that fit into
memory are returned; where none does, `NoPlanFits` says by how much and what would help.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost import compute_share, estimate, measured_speed, stage_costs, stage_speed
from hybridpipe.planning.memory import peak_memory_bytes
from hybridpipe.planning.partition import partition
from hybridpipe.planning.placement import dealt
from hybridpipe.planning.plan import ASYNCHRONOUS, Plan, Prediction, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules import ceil_div
from hybridpipe.planning.simulate import is_simulated, predict
from hybridpipe.planning.whatif import with_ranks

# Beyond these an answer would take minutes; far beyond, the input is a slip of the pen.
MAX_RANKS = 4096
MAX_LAYERS = 100_000
MAX_PRODUCT = 2**23  # of layers and ranks: half a minute
MAX_STRAIGHT = 256  # ranks of a straight pipeline; partition takes minutes for one of 1024
# Of partition's plans so many are simulated. The formula says less of an asynchronous pipeline, where it sees
# no queues.
NUM_EXACT, NUM_EXACT_ASYNCHRONOUS = 4, 16
MAX_ADVISED = 5_000  # layers times ranks; what would help a larger problem takes minutes to find out
NUM_BISECTIONS = 6  # of a factor: within 4 % where the first guess is ten times off
MAX_NAMED = 20  # stages of a plan that is called by its replica counts
TIE = 1e-9  # relative: times that differ by less are equal


class NoPlanFits(ValueError):
    """Every plan needs more memory than a rank has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its prediction.

    Args:
        origin: what proposed it: "exact", "dp", "straight" or "search".
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
    """What a plan is looked for: a model in microbatches, machines, and what is allowed."""

    profile: ModelProfile
    cluster: Cluster
    num_microbatches: int
    num_ranks: int
    schedule: str
    recompute: bool

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


def search(
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    schedule: str = "1f1b",
    recompute: bool = False,
) -> list[Candidate]:
    """All candidates that fit into memory, best prediction first; ties go to fewer ranks, then fewer stages.

    Args:
        profile: of one microbatch.
        num_ranks: how many ranks may be used, the first ones; defaults to all of the cluster's.
        recompute: plans that recompute activations compete too.

    Raises:
        NoPlanFits: no candidate fits into `cluster.memory_bytes`.
        ValueError: more ranks are asked for than the cluster has, or the model or the cluster is too large.
    """
    ranks = cluster.num_ranks if num_ranks is None else num_ranks
    problem = _Problem(profile, cluster, num_microbatches, ranks, schedule, recompute)
    found = ranked(_candidates(problem))
    if not found:
        raise NoPlanFits(_how_far(problem))
    return found


def search_sizes(
    profile: ModelProfile,
    cluster: Cluster,
    minibatch: int,
    *,
    num_ranks: int | None = None,
    schedule: str = "1f1b",
    recompute: bool = False,
) -> list[Candidate]:
    """`search` over every size of the microbatch that was measured, for the same minibatch of samples.

    A short last microbatch counts as a whole one. Under an asynchronous schedule a minibatch travels whole.
    """
    ranks = cluster.num_ranks if num_ranks is None else num_ranks
    sizes = [minibatch]
    if schedule not in ASYNCHRONOUS:
        sizes = [samples for samples in profile.sizes if samples <= minibatch] or sizes
    problems = [
        _Problem(profile.scaled_to(n), cluster, ceil_div(minibatch, n), ranks, schedule, recompute)
        for n in sizes
    ]
    found = ranked(candidate for problem in problems for candidate in _candidates(problem))
    if not found:
        raise NoPlanFits(_how_far(problems[0]))
    return found


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Best prediction first; among equal ones fewer ranks, then fewer stages, then lower ranks."""
    rest = sorted(candidates, key=lambda candidate: candidate.seconds)
    order: list[Candidate] = []
    while rest:
        num_equal = sum(candidate.seconds <= rest[0].seconds * (1 + TIE) for candidate in rest)
        order += sorted(rest[:num_equal], key=_simplicity)
        rest = rest[num_equal:]
    return order


def _simplicity(candidate: Candidate) -> tuple[int, int, tuple[int, ...]]:
    return candidate.plan.num_ranks, candidate.plan.num_stages, candidate.plan.ranks


def data_parallel(
    profile: ModelProfile, cluster: Cluster, num_ranks: int, num_microbatches: int, schedule: str
) -> Plan:
    """One stage on all ranks, with its prediction; it is judged even where it does not fit into memory."""
    problem = _Problem(profile, cluster, num_microbatches, num_ranks, schedule, recompute=False)
    return judged(_data_parallel(problem, range(num_ranks)), profile, cluster)


def straight(
    profile: ModelProfile, cluster: Cluster, num_ranks: int, num_microbatches: int, schedule: str
) -> Plan | None:
    """The best pipeline with one rank a stage, with its prediction; None if none fits into memory.

    It may leave ranks unused.
    """
    problem = _Problem(profile, cluster, num_microbatches, num_ranks, schedule, recompute=False)
    plan = _straight(problem, recompute=False)
    return None if plan is None else judged(plan, profile, cluster)


def short_name(plan: Plan) -> str:
    """The plan's name, or how many stages it has where that would be a long list."""
    return plan.name if plan.num_stages <= MAX_NAMED else f"{plan.num_stages} stages"


def fits(plan: Plan, profile: ModelProfile, cluster: Cluster) -> bool:
    """Whether every rank has the memory that it needs at its peak."""
    return _excess(plan, profile, cluster) <= 1


def judged(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """The plan with its prediction: the simulator's or, where that would take long, the formula's."""
    if is_simulated(plan):
        return replace(plan, predicted=predict(plan, profile, cluster)[1])
    seconds = estimate(plan, profile, cluster)
    rate = profile.samples * plan.num_microbatches / seconds if seconds else 0.0
    bubble = 1 - _busy_seconds(plan, profile, cluster) / (seconds * plan.num_ranks) if seconds else 0.0
    return replace(plan, predicted=Prediction(seconds, rate, bubble, peak_memory_bytes(profile, plan)))


def _busy_seconds(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """What all ranks together compute, each as fast as the slowest of its stage."""
    share = compute_share(cluster, plan.ranks)
    return sum(
        (
            plan.num_microbatches * (cost.forward_seconds + cost.backward_seconds)
            + stage.replicas * cost.update_seconds
        )
        / stage_speed(cluster, stage.ranks, share)
        for stage, cost in zip(
            plan.stages, stage_costs(profile, plan, measured_speed(profile, cluster)), strict=True
        )
    )


def _candidates(problem: _Problem) -> list[Candidate]:
    """Every proposal that fits, once, with its prediction."""
    origins: dict[Plan, str] = {}
    for origin, plan in _fitting(problem):
        origins.setdefault(plan, origin)
    profile, cluster = problem.profile, problem.cluster
    return [
        Candidate(origin, judged(plan, profile, cluster), profile.samples) for plan, origin in origins.items()
    ]


def _fitting(problem: _Problem) -> Iterator[tuple[str, Plan]]:
    for origin, plan in _proposals(problem):
        if fits(plan, problem.profile, problem.cluster):
            yield origin, plan


def _proposals(problem: _Problem) -> Iterator[tuple[str, Plan]]:
    # Recomputing costs time and saves memory: it is of no use where memory is not limited.
    limited = problem.cluster.memory_bytes is not None
    for recompute in (False, True) if problem.recompute and limited else (False,):
        for one_stage in _data_parallel_plans(problem):
            yield "dp", replace(one_stage, recompute=recompute)
        if (plan := _straight(problem, recompute)) is not None:
            yield "straight", plan
        count = NUM_EXACT_ASYNCHRONOUS if problem.schedule in ASYNCHRONOUS else NUM_EXACT
        for exact in _partition(problem, recompute)[:count]:
            yield "exact", exact


def _partition(problem: _Problem, recompute: bool, max_replicas: int | None = None) -> list[Plan]:
    return partition(
        problem.profile,
        problem.cluster,
        num_microbatches=problem.num_microbatches,
        schedule=problem.schedule,
        ranks=range(problem.num_ranks),
        max_replicas=max_replicas,
        recompute=recompute,
    )


def _straight(problem: _Problem, recompute: bool) -> Plan | None:
    """The best pipeline with one rank a stage; a single stage only where there is nothing longer."""
    problem = replace(problem, num_ranks=min(problem.num_ranks, MAX_STRAIGHT))
    plans = _partition(problem, recompute, max_replicas=1)
    return next((plan for plan in plans if plan.num_stages > 1), plans[0] if plans else None)


def _data_parallel_plans(problem: _Problem) -> Iterator[Plan]:
    """On all ranks and, where ranks share a machine's processors, on the best number of ranks a machine."""
    a_machine = min(problem.cluster.node_ranks or 1, problem.num_ranks)
    yield _data_parallel(problem, range(problem.num_ranks))
    fewer = [
        _data_parallel(problem, [rank for rank in range(problem.num_ranks) if rank % a_machine < count])
        for count in sorted({a_machine * i // 16 for i in range(1, 16)} - {0})  # all there are, up to 16
    ]
    if fewer:
        yield min(fewer, key=lambda plan: estimate(plan, problem.profile, problem.cluster))


def _data_parallel(problem: _Problem, ranks: Sequence[int]) -> Plan:
    stage = StageSpec(0, problem.profile.num_layers, len(ranks), dealt(problem.cluster, ranks))
    return Plan((stage,), problem.schedule, problem.num_microbatches)


def _how_far(problem: _Problem) -> str:
    """One line: how far the plan that comes closest is off, and the first remedy that works."""
    plan = _closest(problem)
    peaks = dict(zip(plan.ranks, peak_memory_bytes(problem.profile, plan), strict=True))
    rank = max(peaks, key=lambda r: peaks[r] / max(problem.cluster.memory(r), 1))
    name = short_name(plan) + " with recomputation" * plan.recompute
    return (
        f"no plan fits into memory: {name} comes closest and "
        f"needs {peaks[rank]} bytes on rank {rank}, which has {problem.cluster.memory(rank):.0f}"
        + (f"; {_advice(problem)}" if problem.size <= MAX_ADVISED else "")
    )


def _advice(problem: _Problem) -> str:
    remedies = list(_remedies(problem))
    for text, eased in remedies:
        if any(_fitting(eased)):
            return f"{text} would help"
    return f"none of these would help: {', '.join(text for text, _ in remedies)}"


def _closest(problem: _Problem) -> Plan:
    """The plan that would fit if the memory of every rank grew by the least factor, found by bisection.

    Of a large problem: of the plans for unlimited memory the one that needs least.
    """

    def excess(plan: Plan) -> float:
        return _excess(plan, problem.profile, problem.cluster)

    unlimited = replace(problem, cluster=replace(problem.cluster, memory_bytes=None))
    closest = min((plan for _, plan in _proposals(unlimited)), key=excess)
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
    """Peak over limit, on the rank where that is most."""
    peaks = peak_memory_bytes(profile, plan)
    return max(peak / max(cluster.memory(rank), 1) for rank, peak in zip(plan.ranks, peaks, strict=True))


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with so many times its memory."""
    match cluster.memory_bytes:
        case None:
            return cluster
        case int(memory):
            return replace(cluster, memory_bytes=math.ceil(memory * factor))
        case memories:
            return replace(cluster, memory_bytes=tuple(math.ceil(memory * factor) for memory in memories))


def _remedies(problem: _Problem) -> Iterator[tuple[str, _Problem]]:
    """What a user could change, easiest first."""
    if not problem.recompute:
        yield "recomputation", replace(problem, recompute=True)
    samples = problem.profile.samples
    minibatch = samples * problem.num_microbatches
    for size in (samples // 2, samples // 4):
        if size and problem.schedule not in ASYNCHRONOUS:
            smaller = problem.profile.scaled_to(size)
            count = ceil_div(minibatch, size)
            yield (
                f"microbatches of {size} sample(s)",
                replace(problem, profile=smaller, num_microbatches=count),
            )
    if problem.schedule == "gpipe":
        yield "the schedule 1f1b", replace(problem, schedule="1f1b")
    for factor in (2, 4):
        ranks = factor * problem.num_ranks
        if ranks <= MAX_RANKS:
            grown = with_ranks(problem.cluster, max(ranks, problem.cluster.num_ranks))
            yield f"{ranks} ranks", replace(problem, cluster=grown, num_ranks=ranks)
