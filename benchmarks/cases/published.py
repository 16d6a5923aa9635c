"""Published: our plan beside the one that PipeDream published, both predicted by the same simulator.

    python benchmarks/run.py published                     half a minute

The layer graphs that PipeDream published are read from ../shared/profiles or $PROFILES; they are not part of
this repository. The schedule is that of the paper: an asynchronous pipeline in which a microbatch is a whole
minibatch, so that the slowest stage sets the pace (SOSP 2019, section 3.1). "dp" then updates once in a
round, after as many minibatches as there are ranks.

Only the replica counts of a published plan are known. Its cuts are the fastest in the simulator among the few
that are fastest by the closed formula, and for a straight pipeline those of `search.straight`. The published
plans "dp" and "straight" are taken for 4 ranks, too. "planned in" is in processor time, with simulations.
"""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import results
from jobs import ROOT, Run
from results import Row, milliseconds

from hybridpipe.files import read_costs
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.placement import dealt
from hybridpipe.planning.search.search import data_parallel, search, straight, with_prediction

PROFILES = Path(os.environ.get("PROFILES", ROOT / "../shared/profiles"))
SCHEDULE = "pipedream"
NUM_SIMULATED = 8

TEN_GBIT = 1.25e9
WITHIN_A_SERVER = Level("server", 4, 1e10, 1e-5)
CLUSTERS = {
    # Four GPUs of a server that send at once have a quarter of its link each, as in the published runs.
    "4×4, 10 Gbit/s a server, a quarter each": Cluster(
        (WITHIN_A_SERVER, Level("network", 16, TEN_GBIT / 4, 5e-5))
    ),
    # The same link, used by one ring at a time: an all-reduce crosses it once.
    "4×4, 10 Gbit/s a server, shared": Cluster(
        (WITHIN_A_SERVER, Level("network", 16, TEN_GBIT, 5e-5, shared_bandwidth=TEN_GBIT))
    ),
    "16, 10 Gbit/s each": Cluster.flat(16, TEN_GBIT, 5e-5),
    "4, 10 Gbit/s each": Cluster.flat(4, TEN_GBIT, 5e-5),
}
SAMPLES = {"vgg16": 128, "resnet50": 128, "alexnet": 256, "resnet18": 256, "squeezenet1_0": 256, "gnmt": 64}
# Plans on 16 workers from the paper's table 1; those of the other models were not published.
PUBLISHED = {"vgg16": "15-1", "alexnet": "15-1", "resnet50": "dp", "gnmt": "straight"}


def profile_of(model: str) -> ModelProfile:
    """Read the published profile of a model.

    Raises:
        SystemExit: there are no profiles.
    """
    if not PROFILES.exists():
        raise SystemExit(f"no published profiles in {PROFILES}; $PROFILES names another folder")
    return read_costs(PROFILES / model / "graph.txt", SAMPLES[model])


def measure(run: Run) -> Iterator[Row]:
    """Plan every profile on every cluster."""
    for model in SAMPLES:
        for name, cluster in CLUSTERS.items():
            if run.wants(model, name):
                yield Row(model, name, run.round, compared(model, cluster))


def compared(model: str, cluster: Cluster) -> dict[str, object]:
    """Return the names of the plans and their predicted seconds a minibatch."""
    profile = profile_of(model)
    ours, planning_seconds = planned(profile, cluster, 1, SCHEDULE)
    theirs = published(model, profile, cluster)
    on_all = data_parallel(profile, cluster, cluster.num_ranks, 1, SCHEDULE)
    return {
        "ours": ours.name,
        "seconds": _seconds(ours),
        "published": theirs.name if theirs else None,
        "published_seconds": _seconds(theirs) if theirs else None,
        "dp_seconds": _seconds(on_all),
        "planning_seconds": planning_seconds,
    }


def planned(
    profile: ModelProfile, cluster: Cluster, num_microbatches: int, schedule: str
) -> tuple[Plan, float]:
    """Return the best plan, and the processor seconds of `search`: the median of three if under a second."""
    taken: list[float] = []
    while not taken or (taken[0] < 1 and len(taken) < 3):
        began = time.process_time()
        best = search(profile, cluster, num_microbatches, PlanRequest(schedule))[0]
        taken.append(time.process_time() - began)
    return best.plan, statistics.median(taken)


def published(model: str, profile: ModelProfile, cluster: Cluster) -> Plan | None:
    """Return the published plan for this number of ranks; None: there is none."""
    match PUBLISHED.get(model):
        case None:
            return None
        case "dp":
            return data_parallel(profile, cluster, cluster.num_ranks, 1, SCHEDULE)
        case "straight":
            return straight(profile, cluster, cluster.num_ranks, 1, SCHEDULE)
        case replicas if sum(map(int, replicas.split("-"))) == cluster.num_ranks:
            return _best_cuts(tuple(map(int, replicas.split("-"))), profile, cluster)
    return None


def _best_cuts(replicas: tuple[int, ...], profile: ModelProfile, cluster: Cluster) -> Plan:
    """Return the plan with these replica counts whose cuts are the fastest in the simulator."""
    edges = [sum(replicas[:i]) for i in range(len(replicas) + 1)]
    ranks = [dealt(cluster, range(*edge)) for edge in pairwise(edges)]
    plans = [
        Plan(tuple(map(StageSpec, (0, *cuts), (*cuts, profile.num_layers), replicas, ranks)), SCHEDULE)
        for cuts in combinations(range(1, profile.num_layers), len(replicas) - 1)
    ]
    plans.sort(key=lambda plan: estimate(plan, profile, cluster))
    return min((with_prediction(plan, profile, cluster) for plan in plans[:NUM_SIMULATED]), key=_seconds)


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.minibatch_seconds


def report(rows: Sequence[Row]) -> str:
    """Return the table."""
    return results.table(map(_line, rows))


def _line(row: Row) -> dict[str, str]:
    theirs = row["published_seconds"]
    return {
        "model": row.group,
        "cluster": row.way,
        "ours": row["ours"],
        "a minibatch": f"{milliseconds(row['seconds'], 1)} ms",
        "published": row["published"] or "-",
        "a minibatch ": f"{milliseconds(theirs, 1)} ms" if theirs else "-",
        "ours is faster by": f"{theirs / row['seconds']:.2f}×" if theirs else "-",
        "than dp by": f"{row['dp_seconds'] / row['seconds']:.2f}×",
        "planned in": f"{milliseconds(row['planning_seconds'])} ms",
    }
