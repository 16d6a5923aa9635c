"""All-reduce: large ones by hybridpipe's ring (hybridpipe/allreduce.rules), beside Open MPI's own choice.

    python benchmarks/allreduce.py                                  1 Gbit/s and 100 Mbit/s, 2 to 4 ranks
    python benchmarks/allreduce.py --networks loopback

One rank on each host, float32, MPI_Allreduce in place; milliseconds, the median of five on the
slowest rank, the two ways in turn. The hosts are those of `netcluster` (see networks.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import networks
import numpy as np
from tabulate import tabulate

from hybridpipe.launcher import RING_RULES

RANKS = (2, 3, 4)
SIZES_BYTES = (2**15, 2**18, 2**20, 2**22, 2**23)
REPEATS = 5
USE, RULES = "OMPI_MCA_coll_tuned_use_dynamic_rules", "OMPI_MCA_coll_tuned_dynamic_rules_filename"
WAYS = {"Open MPI's": {USE: "0"}, "ours": {USE: "1", RULES: str(RING_RULES)}}


def times() -> dict[str, float]:
    """On all ranks of an MPI job: seconds by "ranks, bytes"; rank 0 has them all."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found = {}
    for count in RANKS:
        group = world.Split(0 if world.rank < count else MPI.UNDEFINED)
        if group != MPI.COMM_NULL:
            for num_bytes in SIZES_BYTES:
                summed = np.zeros(num_bytes // 4, np.float32)
                taken = []
                for _ in range(1 + REPEATS):
                    group.Barrier()
                    began = time.perf_counter()
                    group.Allreduce(MPI.IN_PLACE, summed)
                    taken.append(time.perf_counter() - began)
                slowest = group.allreduce(statistics.median(taken[1:]), op=MPI.MAX)
                found[f"{count}, {num_bytes}"] = slowest
            group.Free()
        all_here = world.Ibarrier()
        while not all_here.Test():
            time.sleep(0.01)
    return found if world.rank == 0 else {}


def measure(network: str, rounds: int) -> list[list[object]]:
    """The table's lines for one network."""
    taken: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    with networks.network(network) as where:
        for _ in range(rounds):
            for way, settings in WAYS.items():
                there = where.with_settings(settings)
                command = [sys.executable, "-m", "hybridpipe.launcher", str(max(RANKS))]
                done = subprocess.run(
                    [*there.prefix, *command, "--", sys.executable, __file__, "--rank"],
                    env=os.environ | there.environment, stdout=subprocess.PIPE, text=True, check=True,
                    timeout=300,
                )  # fmt: skip
                for key, seconds in json.loads(done.stdout).items():
                    taken[way].setdefault(key, []).append(seconds)
    lines = []
    for key in taken["ours"]:
        count, num_bytes = key.split(", ")
        theirs, ours = (statistics.median(taken[way][key]) * 1e3 for way in WAYS)
        lines.append([network, count, int(num_bytes) // 1024, theirs, ours, ours / theirs])
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", default="1gbit,100mbit")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        found = times()
        if found:
            print(json.dumps(found), flush=True)
        return
    lines = [line for network in options.networks.split(",") for line in measure(network, options.rounds)]
    headers = ["network", "ranks", "KiB", "Open MPI's, ms", "ours, ms", "ours / theirs"]
    print(tabulate(lines, headers, tablefmt="github", floatfmt=("", "", "", ".1f", ".1f", ".2f")))


if __name__ == "__main__":
    main()
