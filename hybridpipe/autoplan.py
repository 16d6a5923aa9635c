"""Autoplan: from a plan's name to a plan: measure the model, measure the machines, search, agree.

Effects at the edge: rank 0 measures and decides, all ranks probe, everyone gets the same answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridpipe.config import SOURCES
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.search import Candidate, NoPlanFits, data_parallel, search, straight
from hybridpipe.probe import idle_barrier, probe

if TYPE_CHECKING:
    from mpi4py import MPI

@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, what it was chosen from (best first), and the measurements behind it."""

    plan: Plan
    candidates: tuple[Candidate, ...]
    profile: ModelProfile
    cluster: Cluster


def autoplan(
    name: str, world: "MPI.Comm", measure: Callable[[], ModelProfile], num_microbatches: int, schedule: str
) -> Choice:
    """The plan that `name` stands for, the same on every rank. Collective over `world`.

    Args:
        name: one of SOURCES.
        measure: called on rank 0.
    """
    profile = measure() if world.rank == 0 else None
    idle_barrier(world)  # a blocking call would take cores from the rank that measures
    cluster = probe(world)
    choice: Choice | ValueError | None = None
    if profile is not None:
        try:
            choice = choose(name, profile, cluster, num_microbatches, schedule)
        except ValueError as error:  # such as NoPlanFits: every rank is to raise it, none to wait
            choice = error
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
    schedule: str,
    num_ranks: int | None = None,
) -> Choice:
    """The plan that `name` stands for.

    Raises:
        ValueError: the name is unknown, or nothing fits into memory.
    """
    if name not in SOURCES:
        raise ValueError(f"plan must be a Plan, a path or one of {', '.join(SOURCES)}, got {name!r}")
    ranks = num_ranks or cluster.num_ranks
    candidates = tuple(search(profile, cluster, num_microbatches, num_ranks=ranks, schedule=schedule))
    plan: Plan | None = candidates[0].plan
    if name == "dp":
        plan = data_parallel(profile, cluster, ranks, num_microbatches, schedule)
    elif name == "straight":
        plan = straight(profile, cluster, ranks, num_microbatches, schedule)
        if plan is None:
            raise NoPlanFits(f"no straight pipeline fits into memory_bytes = {cluster.memory_bytes}")
    assert plan is not None
    return Choice(plan, candidates, profile, cluster)
