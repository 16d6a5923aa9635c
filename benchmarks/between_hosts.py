"""Between hosts: all-reduces and exchanges with hybridpipe's settings of Open MPI, beside Open MPI's own.

    python benchmarks/between_hosts.py                              1 Gbit/s and 100 Mbit/s, 2 to 4 ranks
    python benchmarks/between_hosts.py --networks loopback

One rank on each host, float32: MPI_Allreduce in place, and exchanges, in which two ranks send each other as
much at once, four times. Milliseconds, the median of five on the slowest rank, the settings in turn. The
hosts are those of `netcluster` (see networks.py).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jobs
import networks
import numpy as np
from tabulate import tabulate

from hybridpipe.launch.mpirun import between_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

RANKS = (2, 3, 4)
SIZES_BYTES = (2**15, 2**18, 2**20, 2**22, 2**23)
REPEATS = 5
EXCHANGES = 4  # one after the other: what is left of one is in the way of the next
# Open MPI's defaults, said so that the launcher leaves them.
WAYS = {
    "Open MPI's": {"OMPI_MCA_btl_tcp_links": "1", "OMPI_MCA_coll_tuned_use_dynamic_rules": "0"},
    "ours": between_hosts({}),
}


def times() -> dict[str, float]:
    """On all ranks of an MPI job: seconds by "operation, ranks, bytes"; rank 0 has them all."""
    from mpi4py import MPI

    def allreduce(group: "MPI.Comm", sent: np.ndarray, _: np.ndarray) -> None:
        group.Allreduce(MPI.IN_PLACE, sent)

    def exchange(group: "MPI.Comm", sent: np.ndarray, received: np.ndarray) -> None:
        for _ in range(EXCHANGES):
            group.Sendrecv(sent, 1 - group.rank, 0, received, 1 - group.rank, 0)

    world, found = MPI.COMM_WORLD, {}
    for name, count, action in (
        *(("all-reduce", count, allreduce) for count in RANKS),
        (f"{EXCHANGES} exchanges", 2, exchange),
    ):
        group = world.Split(0 if world.rank < count else MPI.UNDEFINED)
        if group != MPI.COMM_NULL:
            for num_bytes in SIZES_BYTES:
                found[f"{name}, {count}, {num_bytes}"] = _seconds(group, num_bytes, action)
            group.Free()
        all_here = world.Ibarrier()
        while not all_here.Test():
            time.sleep(0.01)
    return found if world.rank == 0 else {}


def _seconds(group: "MPI.Comm", num_bytes: int, action: Callable[..., None]) -> float:
    """The slowest rank's median."""
    sent, received = (np.zeros(num_bytes // 4, np.float32) for _ in range(2))
    taken = []
    for _ in range(1 + REPEATS):
        group.Barrier()
        began = time.perf_counter()
        action(group, sent, received)
        taken.append(time.perf_counter() - began)
    return max(group.allgather(statistics.median(taken[1:])))


def measure(network: str, rounds: int) -> list[list[object]]:
    """The table's lines for one network."""
    taken: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    with networks.network(network) as where:
        for _ in range(rounds):
            for way, settings in WAYS.items():
                there = where.with_settings(settings)
                command = [sys.executable, "-m", "hybridpipe.launch.mpirun", str(max(RANKS))]
                command += ["--", sys.executable, __file__, "--rank"]
                done = jobs.finished(
                    [*there.prefix, *command], there.environment, 300, stdout=subprocess.PIPE, text=True
                )
                done.check_returncode()
                for key, seconds in json.loads(done.stdout).items():
                    taken[way].setdefault(key, []).append(seconds)
    lines = []
    for key in taken["ours"]:
        name, count, num_bytes = key.split(", ")
        theirs, ours = (statistics.median(taken[way][key]) * 1e3 for way in WAYS)
        lines.append([network, name, count, int(num_bytes) // 1024, theirs, ours, ours / theirs])
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
    headers = ["network", "operation", "ranks", "KiB", "Open MPI's, ms", "ours, ms", "ours / theirs"]
    print(tabulate(lines, headers, tablefmt="github", floatfmt=("", "", "", "", ".1f", ".1f", ".2f")))


if __name__ == "__main__":
    main()
