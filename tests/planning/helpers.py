"""Small models, machines and plans to reason about by hand."""

from collections.abc import Sequence
from typing import Any

from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.schedules import instructions
from hybridpipe.planning.schedules.generators import forward_program
from hybridpipe.planning.search import partition as partition_module
from hybridpipe.planning.search import search as search_module


def layer(forward=1.0, backward=2.0, parameters=0, output=0, activation=0, update=0.0) -> LayerProfile:
    return LayerProfile("layer", forward, backward, parameters, output, activation, update)


def model(*layers: LayerProfile, samples: int = 1, state_factor: float = 0.0) -> ModelProfile:
    return ModelProfile(layers, samples, state_factor=state_factor)


def plan(
    replicas: Sequence[int], num_microbatches: int, schedule: str = "1f1b", chunks: int = 1, **options: Any
) -> Plan:
    """One layer a stage; with chunks, `replicas` are those of the first stages, which the others repeat."""
    stages = tuple(StageSpec(i, i + 1, m) for i, m in enumerate([*replicas] * chunks))
    return Plan(stages, schedule, num_microbatches, chunks=chunks, **options)


def free(num_ranks: int) -> Cluster:
    """Ranks between which messages cost nothing."""
    return Cluster.flat(num_ranks, bandwidth=1e300, latency_seconds=0.0)


def times(timeline, rank, kind):
    """Start and end of each of the rank's instructions of a kind."""
    return [
        approx((event.start_seconds, event.end_seconds))
        for event in timeline.events[rank]
        if isinstance(event.instruction, kind)
    ]


def parse(line: str) -> instructions.Program:
    """The inverse of `instructions.text`."""
    return tuple(map(instructions.parse, line.split()))


def forward_programs(plan: Plan, num_microbatches: int) -> dict[int, instructions.Program]:
    """The program of every rank in an evaluation."""
    return {rank: forward_program(plan, plan.place(rank), num_microbatches) for rank in plan.ranks}


def search(profile, cluster, num_microbatches, num_ranks=None, **asked):
    """`search.search`, with the fields of a request by name."""
    return search_module.search(profile, cluster, num_microbatches, PlanRequest(**asked), num_ranks)


def search_sizes(profile, cluster, minibatch, **asked):
    """`search.search_sizes`, with the fields of a request by name."""
    return search_module.search_sizes(profile, cluster, minibatch, PlanRequest(**asked))


def partition(profile, cluster, *, num_microbatches, ranks=None, max_replicas=None, **asked):
    """`partition.partition`, with the fields of a request by name."""
    request = PlanRequest(**asked)
    return partition_module.partition(
        profile, cluster, num_microbatches, request, ranks=ranks, max_replicas=max_replicas
    )
