"""Axes: which way to divide the work is fastest by prediction, per model, network and memory.

    python benchmarks/run.py axes [--measured DIR]        DIR: the --out of a run of split_stages

The profiles are those of the last round that split_stages has measured. Hosts have four ranks with a
processor each, which reach each other with 10 GB/s; the hosts' links have the rate. Limited memory is a part
of what a rank needs under data parallelism. A dash: there is no such plan among the candidates, which leave
out hopeless ones.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import results
from jobs import Run
from results import Row, milliseconds

from hybridpipe.files import read_profile
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import NoPlanFits, search

MODELS = ("tensors", "experts")
HOSTS, RANKS = (1, 2), 4
GBITS = (10, 1)
MEMORY = {"ample": None, "1/2": 0.5, "1/4": 0.25}
MICROBATCHES = 8
DATA, STAGES, ZERO, EXPERTS, SHARDS = "replicas", "stages", "zero", "experts", "shards"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    default = Path("runs") / "split_stages"
    parser.add_argument("--measured", type=Path, default=default, metavar="DIR", help="--out of split_stages")


def measure(run: Run) -> Iterator[Row]:
    """Yield a row for each model, machines and memory, with the best plan that uses each axis."""
    for model, hosts, gbit, memory in product(MODELS, HOSTS, GBITS, MEMORY):
        group = f"{model}, {hosts} × {RANKS} ranks, {gbit} Gbit/s, memory {memory}"
        if not run.wants(group, "all") or (hosts == 1 and gbit != GBITS[0]):
            continue
        folder = run.options.measured / f"{model}-1gbit"
        measured = sorted(folder.glob("round*/profile.json"))
        if not measured:
            raise SystemExit(f"axes: no profile in {folder}; --measured names the --out of split_stages")
        profile = read_profile(measured[-1]).of_one_size
        yield Row(group, "all", run.round, best_of(profile, machines(profile, hosts, gbit, MEMORY[memory])))


def machines(profile: ModelProfile, hosts: int, gbit: float, part: float | None) -> Cluster:
    """Return the cluster; `part` is of the bytes that a rank needs under data parallelism."""
    levels = [Level("host", RANKS, 1e10, 5e-6)]
    if hosts > 1:
        rate = gbit * 1e9 / 8
        levels.append(Level("network", RANKS * hosts, rate, 5e-5, shared_bandwidth=rate))
    whole = Plan.data_parallel(profile.num_layers, RANKS * hosts, MICROBATCHES)
    limit = None if part is None else int(part * max(peak_memory_bytes(profile, whole)))
    return Cluster(tuple(levels), memory_bytes=limit)


def best_of(profile: ModelProfile, cluster: Cluster) -> dict[str, object]:
    """Return, for each axis, the seconds and the name of the best candidate that uses it."""
    try:
        candidates = search(profile, cluster, MICROBATCHES, PlanRequest("1f1b", zero="auto"))
    except NoPlanFits:
        return {}
    found: dict[str, object] = {}
    for each in candidates:  # best first
        for axis in ("fastest", axis_of(each.plan)):
            found.setdefault(axis, (each.seconds, each.plan.name))
    return found


def axis_of(plan: Plan) -> str:
    """Return the last of the axes along which a plan divides the work."""
    stages = range(plan.num_stages)
    used = {
        SHARDS: plan.splits_tensors,
        EXPERTS: any(map(plan.splits_experts, stages)),
        ZERO: any(map(plan.zero_of, stages)),
        STAGES: plan.num_stages > 1,
    }
    return next((axis for axis, is_used in used.items() if is_used), DATA)


def report(rows: Sequence[Row]) -> str:
    """Return the table."""
    return results.table(lines(rows))


def lines(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a line for each model, machines and memory."""
    for row in rows:
        yield {
            "model, machines, memory": row.group,
            **{axis: _told(row[axis]) for axis in ("fastest", DATA, STAGES, ZERO, EXPERTS, SHARDS)},
        }


def _told(found: tuple[float, str] | None) -> str:
    return "–" if found is None else f"{milliseconds(found[0])} ({found[1]})"
