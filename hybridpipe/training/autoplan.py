"""Autoplan: from a plan's name and a model's profile to a plan: measure the machines, search, agree.

Effects at the edge: all ranks probe, rank 0 decides, everyone gets the same answer.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridpipe.comm.status import rank_status
from hybridpipe.config import SOURCES
from hybridpipe.measure.probe import probe
from hybridpipe.planning.cluster import NO_COMPRESSION, Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import AUTO, DEFAULT_REQUEST, PlanRequest
from hybridpipe.planning.schedules.registry import TRAITS
from hybridpipe.planning.search.search import (
    Candidate,
    NoPlanFits,
    data_parallel,
    ranked,
    search_sizes,
    straight,
    with_prediction,
)
from hybridpipe.planning.simulator.predict import predict

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, what it was chosen from (best first), and the measurements behind it.

    `profile` is of the plan's microbatch.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    profile: ModelProfile
    cluster: Cluster


def autoplan(
    plan: Plan | str,
    world: "MPI.Comm",
    profile: ModelProfile,
    num_microbatches: int,
    request: PlanRequest,
    work: Callable[[], object] | None = None,
    *,
    compression: str = NO_COMPRESSION,
    progress_thread: bool = True,
    cluster: Cluster | None = None,
) -> Choice:
    """The plan that is meant, with its prediction, the same on every rank. Collective over `world`.

    Args:
        plan: one of SOURCES, or a plan that is only to be predicted; then there are no candidates.
        profile: the model's; that of rank 0 counts.
        request: of a plan that is searched for.
        compression: of gradients (`Cluster.compressing`).
        progress_thread: of the transport that will train (`probe`).
        work: computes something of the model's, for how ranks that compute at once hamper each other.
        cluster: the machines as measured before, if that was with as many ranks; else they are measured now.
            That of rank 0 counts.
    """
    cluster = world.bcast(cluster)
    if cluster is None or cluster.num_ranks != world.size:
        if cluster is not None and world.rank == 0:
            what = f"the cluster given has {cluster.num_ranks} ranks, and there are {world.size}"
            print(f"hybridpipe: {what}: the machines are measured now", file=sys.stderr)
        gradient_bytes = world.bcast(sum(layer.parameter_bytes for layer in profile.layers))
        cluster = probe(world, work, gradient_bytes, progress_thread)
    cluster = cluster.compressing(compression, profile.dtype)
    choice: Choice | ValueError | None = None
    if world.rank == 0:
        try:
            if isinstance(plan, Plan):
                predicted = replace(plan, predicted=predict(plan, profile, cluster)[1])
                choice = Choice(predicted, (), profile, cluster)
            else:
                choice = choose(plan, profile, cluster, num_microbatches, request)
        except ValueError as error:  # such as NoPlanFits: every rank is to raise it, none to wait
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
) -> Choice:
    """The plan that `name` stands for; data parallelism also where it does not fit into memory.

    "auto" is free to choose among the sizes of the microbatch that `profile` has, for as many samples.

    Where recomputation is asked for, "auto" recomputes where it must, and the others in every stage.

    Raises:
        ValueError: the name is unknown, or the schedule cannot do what is asked.
        NoPlanFits: into memory.
    """
    if name not in SOURCES:
        raise ValueError(f"plan must be a Plan, a path or one of {', '.join(SOURCES)}, got {name!r}")
    candidates = tuple(search_sizes(profile, cluster, profile.samples * num_microbatches, request))
    best = candidates[0]
    if name == AUTO:
        return Choice(best.plan, candidates, profile.scaled_to(best.samples), cluster)
    ranks, schedule = cluster.num_ranks, request.schedule
    if schedule != AUTO and TRAITS[schedule].whole_minibatch:  # a minibatch travels whole
        profile, num_microbatches = profile.scaled_to(profile.samples * num_microbatches), 1
    plan: Plan | None
    if name == "dp":
        plan = data_parallel(profile, cluster, ranks, num_microbatches, schedule)
    else:
        plan = straight(profile, cluster, ranks, num_microbatches, schedule)
        if plan is None:
            raise NoPlanFits("no straight pipeline fits into memory")
    if (asked := request.applied_to(plan)) != plan:
        plan = with_prediction(asked, profile, cluster)
    if plan not in (candidate.plan for candidate in candidates):
        candidates = tuple(ranked([*candidates, Candidate(name, plan, profile.samples)]))
    return Choice(plan, candidates, profile, cluster)
