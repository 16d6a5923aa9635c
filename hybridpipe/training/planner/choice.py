"""Choice: the choice of a plan by name, from a model's profile and a measurement of the machines.

All ranks probe, rank 0 decides. Invariant: every rank gets the same plan, or raises the same error.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from hybridpipe.comm.status import rank_status
from hybridpipe.config.options import SOURCES
from hybridpipe.measure.probe import CPU, probe
from hybridpipe.notices import notices
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import AUTO, DEFAULT_REQUEST, PlanRequest
from hybridpipe.planning.schedules.registry import DEFAULT, TRAITS
from hybridpipe.planning.search.search import (
    Candidate,
    NoPlanFits,
    data_parallel,
    ranked,
    search_sizes,
    straight,
    with_prediction,
)
from hybridpipe.planning.search.variants import fitted
from hybridpipe.planning.simulator.predict import predict

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen plan and the reasons for it.

    Args:
        plan: the plan with its prediction.
        candidates: the plans it was chosen from, best first; empty for a given plan.
        profile: the model's layers at the plan's microbatch size.
        cluster: the machines with the memory of this training.
        machines: the machines as they were measured, or given; None: as `cluster`.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    profile: ModelProfile
    cluster: Cluster
    machines: Cluster | None = None


def measured_cluster(
    world: "MPI.Comm",
    profile: ModelProfile,
    backends: Callable[[], Sequence[str]],
    work: Callable[[], object] | None = None,
    *,
    progress_thread: bool = True,
    cluster: Cluster | None = None,
    device: "torch.device | None" = None,
    with_sharding: bool = True,
) -> Cluster:
    """Return the machines, the same on every rank. Collective over `world`.

    Args:
        profile: the model's profile; rank 0's is used.
        backends: returns those that may sum gradients, the default first. It is called for a measurement
            only, as a look at Horovod takes memory.
        work: runs a part of the model, to measure how ranks that compute at once slow each other down.
        progress_thread: True if the transport of the training has one (`probe`).
        cluster: an earlier measurement of as many ranks, which saves a new one; rank 0's is used.
        device: on which this rank computes; by default the CPU.
        with_sharding: measure what only plans with `zero` need as well.

    Raises:
        ValueError: the ranks cannot be measured (`probe`); raised on every rank.
    """
    cluster = world.bcast(cluster)
    if cluster is None or cluster.num_ranks != world.size:
        if cluster is not None and world.rank == 0:
            what = f"the given cluster has {cluster.num_ranks} ranks, and there are {world.size}"
            notices.tell(f"{what}: the machines are measured now")
        gradient_bytes = world.bcast(sum(layer.parameter_bytes for layer in profile.layers))
        on = device or CPU
        cluster = probe(world, backends(), work, gradient_bytes, progress_thread, on, with_sharding)
    return cluster


def _allow_all(plan: Plan) -> None:
    """Allow any plan."""


def choose_on_rank_0(
    plan: Plan | str,
    world: "MPI.Comm",
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    request: PlanRequest,
    check: Callable[[Plan], object] = _allow_all,
) -> Choice:
    """Choose or predict a plan; every rank returns the same choice. Collective over `world`.

    Args:
        plan: one of SOURCES, or a given plan, which is only predicted.
        profile, cluster: the model and the machines; rank 0's are used.
        num_microbatches: microbatches of a minibatch, at the profile's microbatch size.
        request: requirements for a searched plan.
        check: raises ValueError for a plan that the model forbids.

    Raises:
        ValueError: no plan fits, or the given one cannot be predicted; raised on every rank.
    """
    choice: Choice | ValueError | None = None
    if world.rank == 0:
        try:
            if isinstance(plan, Plan):
                predicted = replace(plan, predicted=predict(plan, profile, cluster)[1])
                choice = Choice(predicted, (), profile, cluster)
            else:
                choice = choose(plan, profile, cluster, num_microbatches, request, check)
        except ValueError as error:  # raised on every rank below, so that none waits
            choice = error
    with rank_status.waiting("rank 0's choice of a plan", (0,)):
        choice = world.bcast(choice)
    if isinstance(choice, ValueError):
        raise choice
    assert choice is not None
    return choice


def choose(
    name: str,
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    request: PlanRequest = DEFAULT_REQUEST,
    check: Callable[[Plan], object] = _allow_all,
) -> Choice:
    """Choose a plan by name.

    "auto" chooses among the profile's microbatch sizes, for as many samples. With `request.recompute` stages
    recompute where memory requires it, and with `request.zero` replicas shard their update. "dp" is
    returned even if it does not fit into memory, if another plan does.

    Args:
        num_microbatches: microbatches of a minibatch, at the profile's microbatch size.
        check: raises ValueError for a plan that the model forbids.

    Raises:
        ValueError: the name is unknown, the model forbids all plans that were found, or the schedule
            contradicts the request.
        NoPlanFits: no plan fits into memory.
    """
    if name not in SOURCES:
        raise ValueError(f"plan must be a Plan, a path or one of {', '.join(SOURCES)}, got {name!r}")
    candidates = tuple(search_sizes(profile, cluster, profile.samples * num_microbatches, request))
    if name == AUTO:
        schedule = DEFAULT if request.schedule == AUTO else request.schedule
        fewer = (
            data_parallel(profile, cluster, ranks, num_microbatches, schedule)
            for ranks in range(cluster.num_ranks, 0, -1)
        )
        more = (Candidate("dp", request.applied_to(plan), profile.samples) for plan in fewer)
        candidates = _allowed(candidates, more, check)
        best = candidates[0]
        return Choice(best.plan, candidates, profile.scaled_to(best.samples), cluster)
    ranks, schedule = cluster.num_ranks, request.schedule
    if schedule != AUTO and TRAITS[schedule].whole_minibatch:  # the minibatch is one microbatch
        profile, num_microbatches = profile.scaled_to(profile.samples * num_microbatches), 1
    plan: Plan | None
    if name == "dp":
        plan = data_parallel(profile, cluster, ranks, num_microbatches, schedule)
    else:
        plan = straight(profile, cluster, ranks, num_microbatches, schedule, request.recompute)
        if plan is None:
            raise NoPlanFits("no straight pipeline fits into memory")
    changed = request.applied_to(plan)
    if name == "dp":
        ways = request.under(plan.schedule)
        leanest = changed.running([ways.leanest])
        changed = fitted(changed, profile, cluster, ways.variants) or leanest
    if changed != plan:
        plan = with_prediction(changed, profile, cluster)
    if plan not in (candidate.plan for candidate in candidates):
        candidates = tuple(ranked([*candidates, Candidate(name, plan, profile.samples)]))
    return Choice(plan, candidates, profile, cluster)


def _allowed(
    candidates: Sequence[Candidate], more: Iterable[Candidate], check: Callable[[Plan], object]
) -> tuple[Candidate, ...]:
    """Return the candidates that pass a check; the first of `more` that does if none of them does.

    Raises:
        ValueError: that of the best candidate, if nothing passes.
    """
    errors: list[ValueError] = []

    def passes(each: Candidate) -> bool:
        try:
            check(each.plan)
        except ValueError as error:
            errors.append(error)
            return False
        return True

    allowed = tuple(filter(passes, candidates)) or tuple(islice(filter(passes, more), 1))
    if not allowed:
        raise ValueError(f"no plan that was found can be trained, give a Plan: of the fastest, {errors[0]}")
    return allowed
