"""Scale: a model and machines with all bytes divided by one number.

Pure: profiles and clusters in, profiles and clusters out. Invariant: bytes over bandwidth, latencies, and all
other times stay as they are.
"""

from dataclasses import replace

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.profile import LayerProfile, ModelProfile


def scaled_profile(profile: ModelProfile, scale: float) -> ModelProfile:
    """Return the profile of a replay: every size divided by `scale`, and every time unchanged."""
    layers = tuple(_layer(layer, scale) for layer in profile.layers)
    return replace(profile, layers=layers, shared=(), others=())  # the layers of a replay share nothing


def scaled_cluster(cluster: Cluster, scale: float) -> Cluster:
    """Return the cluster with bandwidths divided by `scale`, and a byte's processor time multiplied."""
    return replace(
        cluster,
        levels=tuple(_level(level, scale) for level in cluster.levels),
        message_seconds_per_byte=cluster.message_seconds_per_byte * scale,
    )


def _layer(layer: LayerProfile, scale: float) -> LayerProfile:
    returned, split = layer.gradient_bytes, layer.split_bytes
    return replace(
        layer,
        parameter_bytes=round(layer.parameter_bytes / scale),
        output_bytes=round(layer.output_bytes / scale),
        activation_bytes=round(layer.activation_bytes / scale),
        gradient_bytes=None if returned is None else round(returned / scale),
        split_bytes=None if split is None else round(split / scale),
        workspace_bytes=None,  # a replay sleeps instead of computing: it needs no memory for that,
        largest_bytes=round(layer.largest_parameter_bytes / scale),
        frozen_bytes=None,  # nor has it weights beside those that are reduced
        joined=None,  # neither joins products nor accumulates
        accumulate_seconds=0.0,
    )


def _level(level: Level, scale: float) -> Level:
    level = level.with_collectives(lambda each: replace(each, bandwidth=each.bandwidth / scale))
    return replace(
        level,
        bandwidth=level.bandwidth / scale,
        shared_bandwidth=level.shared_bandwidth and level.shared_bandwidth / scale,
        burst_bytes=level.burst_bytes and level.burst_bytes / scale,
    )
