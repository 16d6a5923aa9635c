"""Memory limits: the plans under limits with recomputation where it is needed, and without any.

    python benchmarks/run.py memory_limits                 some 15 minutes, most of them for auto

A transformer (`BLOCKS` equal blocks between an embedding and a head, see `transformer`) and PipeDream's
published profiles (see published.py) on 4, 8 and 16 ranks of one switch of 10 Gbit/s, 50 us a message, four
microbatches a rank. The limits of the transformer are in GiB; those of the others are parts of the largest
peak of the best plan without a limit; under auto, all are parts of that of the best pipeline under 1f1b.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import results
from cases.published import PROFILES, SAMPLES, profile_of
from jobs import Run
from results import Row, milliseconds, number

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import NoPlanFits, search, short_name, straight

RANKS = {"1f1b": (4, 8, 16), "interleaved-1f1b": (4, 8, 16), "pipedream": (4, 8, 16), "auto": (4, 8)}
GIBS = (2.0, 3.0, 4.0, 6.0)
PARTS = (0.75, 0.5, 0.35)
BLOCKS = 24
MICROBATCHES_PER_RANK = 4
MIB, GIB = 2**20, 2**30


def transformer() -> ModelProfile:
    """Return a GPT-2 medium in round figures: four sequences of 1024 tokens a microbatch, float32, Adam."""
    block = LayerProfile("block", 0.06, 0.12, 50 * MIB, 16 * MIB, 400 * MIB, 0.004)
    embedding = LayerProfile("embedding", 0.004, 0.006, 206 * MIB, 16 * MIB, 16 * MIB, 0.016)
    head = LayerProfile("head", 0.09, 0.18, 206 * MIB, 0, 800 * MIB, 0.016)
    return ModelProfile((embedding, *[block] * BLOCKS, head), 4, state_factor=2.0)


def measure(run: Run) -> Iterator[Row]:
    """Plan every model on every number of ranks, under every schedule and limit."""
    models = {"transformer": transformer()}
    if PROFILES.is_dir():
        models |= {model: profile_of(model) for model in SAMPLES}
    for model, profile in models.items():
        for schedule, num_ranks in ((name, count) for name, counts in RANKS.items() for count in counts):
            cluster = Cluster.flat(num_ranks, 1.25e9, 50e-6)
            group = f"{model}, {num_ranks} ranks, {schedule}"
            if run.wants(group, ""):
                count = 1 if schedule == "pipedream" else MICROBATCHES_PER_RANK * num_ranks
                yield from _rows(run, group, profile, cluster, count, schedule)


def _rows(
    run: Run, group: str, profile: ModelProfile, cluster: Cluster, count: int, schedule: str
) -> Iterator[Row]:
    free = search(profile, cluster, count, PlanRequest(schedule))[0].plan
    assert free.predicted is not None
    whole = straight(profile, cluster, cluster.num_ranks, count, "1f1b") if schedule == "auto" else free
    assert whole is not None and whole.predicted is not None
    peak = max(whole.predicted.peak_memory_bytes)
    in_gib = group.startswith("transformer") and schedule != "auto"
    limits = [gib * GIB for gib in GIBS] if in_gib else [part * peak for part in PARTS]
    for limit in map(int, limits):
        limited = replace(cluster, memory_bytes=limit)
        figures: dict[str, Any] = {"limit": limit, "free_seconds": free.predicted.minibatch_seconds}
        for name, recompute in (("", True), ("without_", False)):
            request = PlanRequest(schedule, recompute=recompute)
            figures |= _planned(name, profile, limited, count, request)
        yield Row(group, f"{limit / GIB:.3g} GiB", run.round, figures)


def _planned(
    name: str, profile: ModelProfile, cluster: Cluster, count: int, request: PlanRequest
) -> Mapping[str, Any]:
    """Return the plan, its seconds a minibatch and the processor seconds of planning, if a plan fits."""
    began = time.process_time()
    try:
        plan = search(profile, cluster, count, request)[0].plan
    except NoPlanFits:
        return {f"{name}planning_seconds": time.process_time() - began}
    assert plan.predicted is not None
    return {
        f"{name}planning_seconds": time.process_time() - began,
        f"{name}plan": _told(plan),
        f"{name}seconds": plan.predicted.minibatch_seconds,
    }


def _told(plan: Plan) -> str:
    """Return the plan's name and schedule, with its recomputing stages."""
    stages = ", ".join(str(s) for s in range(plan.num_stages) if plan.recomputes(s))
    return f"{short_name(plan)}, {plan.schedule}" + f" ({stages})" * bool(stages)


def report(rows: Sequence[Row]) -> str:
    """Return a table of the problems in which some plan fits."""
    return results.table(map(_line, (row for row in rows if row["seconds"])))


def _line(row: Row) -> dict[str, str]:
    without = row["without_seconds"]
    return {
        "problem": row.group,
        "limit": row.way,
        "no limit": f"{milliseconds(row['free_seconds'])} ms",
        "plan, schedule (recomputing stages)": row["plan"],
        "a minibatch": f"{milliseconds(row['seconds'])} ms",
        "without recomputation": f"{milliseconds(without)} ms" if without else "does not fit",
        "planned in": f"{number(row['planning_seconds'])} s",
    }
