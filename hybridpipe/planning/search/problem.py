"""Problem: the input of a search under one schedule, what fits it, and what none of its plans undercuts.

Not known here: candidates. Invariant: a problem that exists is small enough to be searched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import Estimates, estimates
from hybridpipe.planning.cost.formula import measured_speed, stage_costs
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.cost.pass_times import with_pass_times
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.schedules.registry import DEFAULT, TRAITS
from hybridpipe.planning.search.variants import fitted
from hybridpipe.planning.shards import can_pool, pooled_cluster
from hybridpipe.planning.shared_parameters import may_run

# Beyond these limits a search would take minutes; far beyond, the input is a mistake.
MAX_RANKS = 4096
MAX_LAYERS = 100_000
MAX_PRODUCT = 2**23  # of layers and ranks: half a minute
LARGE = 10_000  # layers times ranks; beyond, a plan has many neighbours, and simulating one takes long
MAX_NAMED = 20  # stages of a plan whose name lists its replica counts


@dataclass(frozen=True)
class Figures:
    """Figures of plans for one profile and cluster, each computed once; a memory limit changes none of them.

    Args:
        cluster: without a limit.
        simulated: by plan, the limit that its simulation had, and the plan with its prediction.
    """

    profile: ModelProfile
    cluster: Cluster
    estimated: dict[Plan, Estimates] = field(default_factory=dict)
    simulated: dict[Plan, tuple[float, Plan]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
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
    known: Figures | None = field(default=None, repr=False, compare=False)  # see `figures`

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
        unlimited = replace(self.cluster, memory_bytes=None)
        if self.known is None or self.known.profile is not self.profile or self.known.cluster != unlimited:
            object.__setattr__(self, "known", Figures(self.profile, unlimited))

    @property
    def size(self) -> int:
        """Layers times ranks."""
        return self.profile.num_layers * self.num_ranks

    @property
    def is_large(self) -> bool:
        """True if few plans can be simulated in the time that planning may take."""
        return self.size > LARGE

    @property
    def is_limited(self) -> bool:
        """True if ranks have a limit of memory."""
        return self.cluster.memory_bytes is not None

    def without_limit(self) -> "Problem":
        """Return the problem with unlimited memory."""
        return replace(self, cluster=replace(self.cluster, memory_bytes=None))

    @property
    def figures(self) -> Figures:
        """The figures that are known; `replace` keeps them while profile and cluster are the same."""
        assert self.known is not None
        return self.known

    def estimates(self, plan: Plan) -> Estimates:
        """Return the estimates of a plan."""
        if plan not in self.figures.estimated:
            costs = stage_costs(self.profile, plan, measured_speed(self.profile, self.cluster))
            self.figures.estimated[plan] = estimates(plan, costs, self.cluster)
        return self.figures.estimated[plan]

    def fits(self, plan: Plan) -> bool:
        """Return `fits` of a plan for this problem."""
        return fits(plan, self.profile, self.cluster)

    def fitted(self, plan: Plan) -> Plan | None:
        """Return the plan as it is if it fits, or run as it fits (`variants`); None if it does not.

        Where replicas may shard their update, it is run the fastest way in any case.
        """
        ways = self.request.ways(self.profile.has_experts)
        if self.request.zero == 0 and len(ways) == len(self.request.variants) and self.fits(plan):
            return self.timed(plan)
        made = fitted(plan, self.profile, self.cluster, ways)
        return None if made is None else self.timed(made)

    def timed(self, plan: Plan) -> Plan:
        """Return a plan that fits with the times of its passes, where their order follows them.

        With another order a plan may not fit any more; it is then returned as it is.
        """
        made = with_pass_times(plan, self.profile, self.cluster)
        return made if made is plan or self.fits(made) else plan

    def least_seconds(self) -> float:
        """Return seconds that no plan undercuts: those in which all ranks together can compute."""
        schedule = DEFAULT if self.request.traits.interleaves else self.request.schedule
        plan = Plan((StageSpec(0, self.profile.num_layers),), schedule, self.num_microbatches)
        [cost] = stage_costs(self.profile, plan, measured_speed(self.profile, self.cluster))
        count = 1 if self.request.traits.whole_minibatch else self.num_microbatches
        speed = sum(map(self.cluster.speed, range(self.num_ranks)))
        least = min(layer.least_part for layer in self.profile.layers)
        return count * least * (cost.forward_seconds + cost.backward_seconds) / speed


def problems_of(
    profile: ModelProfile,
    cluster: Cluster,
    minibatch: int,
    sizes: Mapping[int, int],
    request: PlanRequest,
    num_ranks: int | None,
) -> Iterator[list[Problem]]:
    """Yield, for each number of shards, one problem for each requested schedule and size.

    Numbers are the profile's, fewest first, and those that neighbours in the cluster allow. With several
    shards there is none under asynchronous schedules.

    Args:
        sizes: microbatches of a minibatch, by their samples.
        num_ranks: ranks that may be used; None: all.
    """
    ranks = cluster.num_ranks if num_ranks is None else num_ranks
    for tensor in profile.tensors:
        more = tensor // cluster.shards
        if tensor % cluster.shards or more > ranks or not can_pool(cluster, more):
            continue
        split, pooled = profile.split_over(tensor), pooled_cluster(cluster, more)
        yield [
            Problem(
                split.scaled_to(samples),
                pooled,
                count,
                ranks // more,
                request.under(schedule),
                is_alternative=schedule != request.schedules[0],
            )
            for schedule in request.compared(cluster.memory_bytes is not None)
            if tensor == 1 or not TRAITS[schedule].is_asynchronous
            for samples, count in ({minibatch: 1} if TRAITS[schedule].whole_minibatch else sizes).items()
        ]


def short_name(plan: Plan) -> str:
    """Return the plan's name, or its number of stages where the name would be long."""
    return plan.name if plan.num_stages <= MAX_NAMED else f"{plan.num_stages} stages"


def fits(plan: Plan, profile: ModelProfile, cluster: Cluster) -> bool:
    """True if every rank has the memory that it needs at its peak, and stages share nothing they must not."""
    return may_run(profile, plan) and excess(plan, profile, cluster) <= 1


def excess(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the largest ratio of a rank's peak to its limit."""
    if cluster.memory_bytes is None:
        return 0.0
    peaks = peak_memory_bytes(profile, plan)
    return max(peak / max(cluster.memory(rank), 1) for rank, peak in zip(plan.ranks, peaks, strict=True))
