"""Planner: the time that `search` takes, simulations included, by numbers of layers and ranks.

    python benchmarks/run.py planner                       a minute and a half

VGG-16 and ResNet-50 are PipeDream's published profiles (see published.py); they are left out if these are
missing. The other models are made up: layers of unequal work whose weights grow and whose outputs shrink from
front to back, as in a convolutional network. Figures are processor seconds, which depend little on other
load; a search of less than a second is the median of three.
"""

import random
from collections.abc import Iterator, Sequence

import results
from cases.published import PROFILES, planned, profile_of
from jobs import Run
from results import Row, number

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.search.search import short_name

MICROBATCHES_PER_RANK = 4
SCHEDULES = ("1f1b", "pipedream")
CASES = [  # a published model or a number of layers, ranks, ranks of a node (0: one switch for all)
    ("vgg16", 16, 0),
    ("vgg16", 16, 4),
    ("resnet50", 16, 0),
    ("resnet50", 16, 4),
    (176, 128, 8),
    (1250, 16, 4),
    (1250, 1024, 0),
    (1250, 1024, 8),
]


def measure(run: Run) -> Iterator[Row]:
    """Plan every case under every schedule."""
    for source, num_ranks, node in CASES:
        name = source if isinstance(source, str) else f"made up, {source} layers"
        group = f"{name}, {num_ranks} ranks, {f'nodes of {node}' if node else 'flat'}"
        wanted = [schedule for schedule in SCHEDULES if run.wants(group, schedule)]
        if wanted and isinstance(source, str) and not PROFILES.exists():
            print(f"{source} left out: no {PROFILES}", flush=True)
            continue
        for schedule in wanted:
            profile = profile_of(source) if isinstance(source, str) else model(source)
            count = 1 if schedule == "pipedream" else MICROBATCHES_PER_RANK * num_ranks
            plan, seconds = planned(profile, cluster(num_ranks, node), count, schedule)
            figures = {"seconds": seconds, "layers": profile.num_layers, "plan": short_name(plan)}
            yield Row(group, schedule, run.round, figures)


def model(num_layers: int, seed: int = 0) -> ModelProfile:
    """Make up a convolutional network: outputs shrink and weights grow with depth; `seed` determines it."""
    draw = random.Random(seed)
    layers = []
    for i in range(num_layers):
        depth = i / num_layers
        forward = draw.uniform(0.2, 1.0) * 1e-3
        layers.append(
            LayerProfile(
                name=f"layer {i}",
                forward_seconds=forward,
                backward_seconds=2 * forward,
                parameter_bytes=round(draw.random() * 1e6 * 30**depth),
                output_bytes=round(draw.uniform(0.5, 1.0) * 2e7 / 30**depth),
                activation_bytes=round(draw.uniform(0.5, 1.0) * 2e7 / 30**depth),
                update_seconds=1e-6,
            )
        )
    return ModelProfile(tuple(layers), samples=8)


def cluster(num_ranks: int, node: int) -> Cluster:
    """Return one switch of 10 Gbit/s, or nodes with 80 Gbit/s inside and a shared link of 24 Gbit/s each."""
    if not node:
        return Cluster.flat(num_ranks, 1.25e9, 2e-5)
    return Cluster(
        (Level("node", node, 1e10, 5e-6), Level("network", num_ranks, 3e9, 2e-5, shared_bandwidth=3e9))
    )


def report(rows: Sequence[Row]) -> str:
    """Return the table, medians over the rounds."""
    return results.table(
        {
            "model, ranks, network": group,
            "layers": str(results.last(rows, group, schedule)["layers"]),
            "schedule": schedule,
            "seconds": number(results.median(rows, group, schedule)),
            "plan": results.last(rows, group, schedule)["plan"],
        }
        for group in results.groups(rows)
        for schedule in results.ways(rows, group)
    )
