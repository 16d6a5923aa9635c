"""Changed clusters for what-if questions: a measured cluster with another link or another number of ranks.

Pure: clusters in, clusters out. Invariant: measured figures that do not follow from the change are kept.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from hybridpipe.planning.checks import MAX_RANKS, positive_int
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.plan import Plan

NETWORK_LATENCY_SECONDS = 5e-5  # between machines, where none is given
FIGURES = ("plan", "ranks used", "microbatches", "minibatch", "samples/s", "bubble", "most memory")
T = TypeVar("T")

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of "100Gbit", "1.2GB/s", or a plain number of bytes per second.

    Raises:
        ValueError: the text has none of these forms.
    """
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) ?(?:([kMGT]?)(bit|B)(?:/s)?)?", text)
    value = float(match[1]) * PREFIXES[match[2] or ""] / (8 if match[3] == "bit" else 1) if match else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"must be such as 100Gbit, 12.5GB or 1.25e10 bytes per second, got {text!r}")
    return value


def parse_seconds(text: str) -> float:
    """Return the seconds of "5us", "0.1ms", or a plain number of seconds.

    Raises:
        ValueError: the text has none of these forms.
    """
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) ?(s|ms|us|µs|ns|)", text)
    value = float(match[1]) * SECONDS[match[2]] if match else math.inf
    if math.isinf(value):
        raise ValueError(f"must be such as 5us, 0.1ms or 5e-6 seconds, got {text!r}")
    return value


def figures(plans: Mapping[str, Plan]) -> str:
    """Return a table of the predictions of plans, with one named column for each plan."""
    rows = [("", *plans), *zip(FIGURES, *map(_figures, plans.values()), strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _figures(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    assert predicted is not None
    yield plan.name
    yield str(plan.num_ranks)
    yield str(plan.num_microbatches)
    yield f"{predicted.minibatch_seconds * 1e3:.2f} ms"
    yield f"{predicted.samples_per_second:,.0f}"
    yield f"{predicted.bubble_fraction:.0%}"
    yield f"{max(predicted.peak_memory_bytes) / 1e6:,.0f} MB"


def changed(
    cluster: Cluster, bandwidth: float | None, latency_seconds: float | None, num_ranks: int | None
) -> Cluster:
    """Return the cluster with all requested changes; None leaves a figure as it is.

    More ranks than one machine has are on further machines like it, which a network of this bandwidth and
    latency (NETWORK_LATENCY_SECONDS if None) connects.

    Raises:
        ValueError: as `with_ranks`; one machine is to grow, and the bandwidth is None.
    """
    if num_ranks is not None:
        latency = NETWORK_LATENCY_SECONDS if latency_seconds is None else latency_seconds
        network = None if bandwidth is None else Level("network", 1, bandwidth, latency, bandwidth)
        cluster = with_ranks(cluster, num_ranks, network)
    if bandwidth is not None:
        cluster = with_bandwidth(cluster, bandwidth)
    return cluster if latency_seconds is None else with_latency(cluster, latency_seconds)


def with_bandwidth(cluster: Cluster, bandwidth: float) -> Cluster:
    """Return the cluster with another outermost bandwidth; shared links and collectives scale with it."""
    level = cluster.levels[-1]
    ratio = bandwidth / level.bandwidth
    shared = level.shared_bandwidth and level.shared_bandwidth * ratio
    level = level.with_collectives(lambda each: replace(each, bandwidth=each.bandwidth * ratio))
    return _outermost(cluster, replace(level, bandwidth=bandwidth, shared_bandwidth=shared))


def with_latency(cluster: Cluster, seconds: float) -> Cluster:
    """Return the cluster with another outermost latency; those of measured collectives scale with it."""
    level = cluster.levels[-1]
    if level.latency_seconds:
        ratio = seconds / level.latency_seconds
        level = level.with_collectives(
            lambda each: replace(each, latency_seconds=each.latency_seconds * ratio)
        )
    return _outermost(cluster, replace(level, latency_seconds=seconds))


def with_ranks(cluster: Cluster, num_ranks: int, network: Level | None = None) -> Cluster:
    """Return the cluster with as many units of its outermost level as hold `num_ranks`.

    New ranks repeat the measured ones in turn. The figures of the links stay, also those of an all-reduce
    over more ranks.

    Args:
        network: what connects further machines to a cluster that is one; it gets the ranks.

    Raises:
        ValueError: the cluster is one machine whose ranks share its processors, and no network is known.
    """
    positive_int("ranks", num_ranks)
    if num_ranks > MAX_RANKS:
        raise ValueError(f"ranks must be an integer <= {MAX_RANKS}, got {num_ranks}")
    levels = cluster.levels
    if num_ranks > cluster.num_ranks <= (cluster.node_ranks or 0):
        if network is None:
            raise ValueError(
                f"ranks must be at most {cluster.num_ranks}, got {num_ranks}: the cluster is one machine; "
                "a second needs a network: give its bandwidth, or write a level for it into the cluster file"
            )
        levels = (*levels, network)
    unit = levels[-2].ranks if len(levels) > 1 else 1
    count = math.ceil(num_ranks / unit) * unit
    memory, speed = cluster.memory_bytes, cluster.relative_speed
    return replace(
        cluster,
        levels=(*levels[:-1], replace(levels[-1], ranks=count)),
        memory_bytes=_repeated(memory, count) if isinstance(memory, tuple) else memory,
        relative_speed=speed and _repeated(speed, count),
    )


def _repeated(figures: tuple[T, ...], count: int) -> tuple[T, ...]:
    return tuple(figures[i % len(figures)] for i in range(count))


def _outermost(cluster: Cluster, level: Level) -> Cluster:
    return replace(cluster, levels=(*cluster.levels[:-1], level))
