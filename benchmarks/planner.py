"""How long `search` takes, simulations included, and how that grows with layers and ranks.

    python benchmarks/planner.py [--out planner.json]        some minutes; the table in docs/planner.md

VGG-16 and ResNet-50 are PipeDream's published profiles (see published.py) and are left out where these are
not there. The other models are made up: layers of unequal work whose weights grow and whose outputs shrink
from front to back, as in a convolutional network. Figures are processor seconds, the median of three where
one takes less than a second, so that what else runs on the machine counts little.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from published import PROFILES, SAMPLES, planned
from tabulate import tabulate

from hybridpipe.files import read_costs
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.search.search import short_name

MICROBATCHES_A_RANK = 4
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


def model(num_layers: int, seed: int = 0) -> ModelProfile:
    """Layers as in a convolutional network: outputs shrink and weights grow with depth; reproducible."""
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
    """One switch of 10 Gbit/s, or nodes of 80 Gbit/s inside that share a link of 24 Gbit/s each."""
    if not node:
        return Cluster.flat(num_ranks, 1.25e9, 2e-5)
    return Cluster(
        (Level("node", node, 1e10, 5e-6), Level("network", num_ranks, 3e9, 2e-5, shared_bandwidth=3e9))
    )


def measure() -> Iterator[dict[str, object]]:
    """One line of figures for each case and schedule."""
    for which, num_ranks, node in CASES:
        if isinstance(which, str) and not PROFILES.exists():
            print(f"{which} left out: no {PROFILES}", file=sys.stderr)
            continue
        if isinstance(which, str):
            profile = read_costs(PROFILES / which / "graph.txt", SAMPLES[which])
        else:
            profile = model(which)
        for schedule in ("1f1b", "pipedream"):
            count = 1 if schedule == "pipedream" else MICROBATCHES_A_RANK * num_ranks
            plan, seconds = planned(profile, cluster(num_ranks, node), count, schedule)
            yield {
                "model": which if isinstance(which, str) else "made up",
                "layers": profile.num_layers,
                "ranks": num_ranks,
                "a node": node or "flat",
                "schedule": schedule,
                "seconds": round(seconds, 2),
                "plan": short_name(plan),
            }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    out = parser.parse_args().out
    rows = []
    for row in measure():
        rows.append(row)
        print(*row.values(), file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github"))
    if out:
        out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
