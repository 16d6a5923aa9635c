"""How the time that planning takes grows with layers and ranks: `partition` alone, and `search` with its
simulations.

    python benchmarks/planner.py [--out planner.json]

Models are made up: layers of unequal work whose weights grow and whose outputs shrink from front to back, as
in a convolutional network. Clusters have eight ranks a node and a shared link between nodes, except "flat".
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.partition import partition
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.search import data_parallel, search, short_name

MICROBATCHES_A_RANK = 4
CASES = [  # layers, ranks, ranks of a node (0: one switch for all)
    (41, 16, 0),
    (41, 16, 4),
    (176, 16, 0),
    (176, 16, 4),
    (41, 64, 8),
    (176, 128, 8),
    (500, 256, 8),
    (1250, 16, 4),
    (1250, 256, 8),
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
    for num_layers, num_ranks, node in CASES:
        for schedule in ("1f1b", "pipedream"):
            profile, machines = model(num_layers), cluster(num_ranks, node)
            count = 1 if schedule == "pipedream" else MICROBATCHES_A_RANK * num_ranks
            start, start_processor = time.perf_counter(), time.process_time()
            partition(profile, machines, num_microbatches=count, schedule=schedule)
            seconds, processor = time.perf_counter() - start, time.process_time() - start_processor
            start = time.perf_counter()
            best = search(profile, machines, count, schedule=schedule)[0]
            parallel = data_parallel(profile, machines, num_ranks, count, schedule)
            assert parallel.predicted is not None
            yield {
                "layers": num_layers,
                "ranks": num_ranks,
                "node": node or "flat",
                "schedule": schedule,
                "partition_seconds": round(seconds, 4),
                "partition_processor_seconds": round(processor, 4),
                "search_seconds": round(time.perf_counter() - start, 4),
                "plan": short_name(best.plan),
                "times_data_parallel": round(parallel.predicted.minibatch_seconds / best.seconds, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    out = parser.parse_args().out
    rows = []
    for row in measure():
        rows.append(row)
        print(f"{row['layers']} layers, {row['ranks']} ranks, {row['schedule']}", file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github"))
    if out:
        out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
