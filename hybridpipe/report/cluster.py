"""Report on a cluster: the measurements of the machines as text. Takes data, returns text."""

from collections.abc import Iterator

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.fit import doubling
from hybridpipe.planning.quantities import duration, size
from hybridpipe.report.table import table

ROUGH = 1.0  # error of predictions, relative to what was measured, from which on they are doubtful


def describe(cluster: Cluster, num_cores: int | None = None) -> str:
    """Describe links, all-reduces and the processors that the ranks of a machine share.

    Args:
        num_cores: cores of a machine, if known.
    """
    return "\n".join([table(level_rows(cluster)), "", *facts(cluster, num_cores), *rough(cluster)])


def level_rows(cluster: Cluster) -> list[dict[str, str]]:
    """Rows of the levels of the machines, from the inside out: links and all-reduces."""
    return [*map(_row, cluster.levels)]


def facts(cluster: Cluster, num_cores: int | None = None) -> list[str]:
    """Lines about the processors that the ranks of a machine share. Args as for `describe`."""
    lines = []
    ranks = cluster.node_ranks or 1
    lines.append(f"{cluster.num_ranks} rank(s), {ranks} on a machine")
    if cluster.sync is not None:
        lines.append(f"gradients are summed by {cluster.sync}")
    if cluster.compute_speeds is not None:
        speeds = ", ".join(f"{n}: {cluster.compute_speeds[n - 1]:.0%}" for n in doubling(1, ranks))
        lines.append(f"speed of each rank of a machine, by how many compute at once: {speeds}")
    if num_cores is not None and ranks > num_cores:
        lines.append(f"{ranks} ranks on the {num_cores} core(s) of a machine: their compute contends")
    if any(cluster.wakeup_seconds):
        numbers = doubling(1, len(cluster.wakeup_seconds))
        each = ", ".join(f"{n}: {cluster.wakeup_seconds[n - 1] * 1e3:.1f}" for n in numbers)
        lines.append(f"processor time to wake a waiting rank, in ms, by how many compute then: {each}")
    if cluster.relative_speed is not None:
        lines.append("relative speed of the ranks: " + ", ".join(f"{s:.2f}" for s in cluster.relative_speed))
    lines.append(
        f"a message takes {cluster.message_seconds * 1e6:.0f} us and "
        f"{cluster.message_seconds_per_byte * 1e9:.2f} ns a byte of processor time at either end; "
        f"a rank of a replicated stage has {cluster.replicated_speed:.0%} of the speed of another, and "
        f"{cluster.overlap:.0%} of an all-reduce overlaps with computing at no cost"
    )
    return lines


def rough(cluster: Cluster) -> Iterator[str]:
    """Yield a line about each level where predictions of messages or all-reduces are doubtful."""
    for level in cluster.levels:
        reduced = level.allreduce.fit_error if level.allreduce else None
        for what, error in (("messages", level.fit_error), ("all-reduces", reduced)):
            if error is not None and error > ROUGH:
                yield (
                    f"predictions of {what} over the level {level.name} are doubtful: at one size they take "
                    f"{1 + error:.1f} times as long as measured; the measurements were uneven, as where "
                    "other programs or the network are busy: measure again when they are not "
                    "(hybridpipe probe; for a training, remove machines.json)"
                )


def _row(level: Level) -> dict[str, str]:
    reduced = level.allreduce
    return {
        "level": level.name,
        "ranks": str(level.ranks),
        "bandwidth": _bandwidth(level.bandwidth),
        "latency": duration(level.latency_seconds),
        "fit": _error(level.fit_error),
        "at once": size(level.burst_bytes) if level.burst_bytes else "-",
        "a host's ranks together": _bandwidth(level.shared_bandwidth) if level.shared_bandwidth else "-",
        "all-reduce": _bandwidth(reduced.bandwidth) if reduced else "-",
        "its latency": duration(reduced.latency_seconds) if reduced else "-",
        "and wait": duration(reduced.wait_seconds) if reduced else "-",
        "its fit": _error(reduced.fit_error) if reduced else "-",
        "reduce-scatter": _bandwidth(level.reduce_scatter.bandwidth) if level.reduce_scatter else "-",
        "all-gather": _bandwidth(level.all_gather.bandwidth) if level.all_gather else "-",
    }


def _bandwidth(bytes_per_second: float) -> str:
    return f"{size(bytes_per_second)}/s"


def _error(relative: float | None) -> str:
    return "-" if relative is None else f"±{relative:.0%}"
