"""Search: gather candidate plans, let the simulator judge them, keep the best.

`partition` is exact for a closed formula; the simulator also sees shared processors, queues at ports and
which all-reduce hides behind what. So the exact plan for every number of ranks competes, beside plain
data parallelism and the straight pipeline, which always compete; ranks that do not help stay unused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost import peak_memory_bytes
from hybridpipe.planning.partition import partition
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.simulate import predict


class NoPlanFits(ValueError):
    """Every plan needs more memory than a rank has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its prediction, and what proposed it: "exact", "dp" or "straight"."""

    origin: str
    plan: Plan

    @property
    def seconds(self) -> float:
        """Predicted time of a minibatch."""
        assert self.plan.predicted is not None
        return self.plan.predicted.minibatch_seconds


def data_parallel(
    profile: ModelProfile, cluster: Cluster, num_ranks: int, num_microbatches: int, schedule: str
) -> Plan:
    """One stage on all ranks, with its prediction; it is judged even where it does not fit into memory."""
    plan = Plan.data_parallel(profile.num_layers, num_ranks, num_microbatches, schedule)
    return replace(plan, predicted=predict(plan, profile, cluster)[1])


def straight(
    profile: ModelProfile, cluster: Cluster, num_ranks: int, num_microbatches: int, schedule: str
) -> Plan | None:
    """The best pipeline with one rank a stage, with its prediction; None if it does not fit into memory."""
    plan = partition(
        profile,
        cluster,
        num_ranks=min(num_ranks, profile.num_layers),
        num_microbatches=num_microbatches,
        schedule=schedule,
        max_replicas=1,
    )
    return plan and replace(plan, predicted=predict(plan, profile, cluster)[1])


def search(
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    schedule: str = "1f1b",
) -> list[Candidate]:
    """All candidates that fit into memory, best prediction first; ties go to fewer ranks and stages.

    Args:
        profile: of one microbatch.
        num_ranks: how many ranks may be used, at most; defaults to all of the cluster's.

    Raises:
        NoPlanFits: no candidate fits into `cluster.memory_bytes`.
        ValueError: more ranks are asked for than the cluster has.
    """
    ranks = num_ranks or cluster.num_ranks
    if ranks > cluster.num_ranks:
        raise ValueError(f"ranks must be at most the cluster's {cluster.num_ranks}, got {ranks}")
    candidates: dict[Plan, Candidate] = {}
    for origin, plan in _proposals(profile, cluster, num_microbatches, ranks, schedule):
        candidates.setdefault(plan, Candidate(origin, plan))
    fitting = [
        candidate
        for candidate in candidates.values()
        if cluster.memory_bytes is None or max(_predicted(candidate.plan)) <= cluster.memory_bytes
    ]
    if not fitting:
        raise NoPlanFits(_how_far(profile, cluster, num_microbatches, ranks, schedule))
    return sorted(fitting, key=lambda c: (c.seconds, c.plan.num_ranks, c.plan.num_stages))


def _proposals(
    profile: ModelProfile, cluster: Cluster, num_microbatches: int, ranks: int, schedule: str
) -> Iterator[tuple[str, Plan]]:
    yield "dp", data_parallel(profile, cluster, ranks, num_microbatches, schedule)
    if (plan := straight(profile, cluster, ranks, num_microbatches, schedule)) is not None:
        yield "straight", plan
    for used in range(1, ranks + 1):
        exact = partition(
            profile, cluster, num_ranks=used, num_microbatches=num_microbatches, schedule=schedule
        )
        if exact is not None:
            yield "exact", replace(exact, predicted=predict(exact, profile, cluster)[1])


def _predicted(plan: Plan) -> tuple[int, ...]:
    assert plan.predicted is not None
    return plan.predicted.peak_memory_bytes


def _how_far(
    profile: ModelProfile, cluster: Cluster, num_microbatches: int, ranks: int, schedule: str
) -> str:
    """One line: what the straight pipeline, which spreads the weights furthest, would still need."""
    plan = straight(profile, replace(cluster, memory_bytes=None), ranks, num_microbatches, schedule)
    assert plan is not None
    need = max(peak_memory_bytes(profile, plan))
    return (
        f"no plan fits into memory_bytes = {cluster.memory_bytes}: the straight pipeline on "
        f"{plan.num_ranks} ranks needs {need} on one rank; smaller microbatches or more ranks would help"
    )
