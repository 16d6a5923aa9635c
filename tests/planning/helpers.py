"""Small models, machines and plans to reason about by hand."""

from collections.abc import Sequence
from typing import Any

from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile


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
