"""Transport: large messages between ranks, beside MPI's own blocking calls.

    python benchmarks/run.py transport --rounds 3
    python benchmarks/run.py transport --rounds 3 --only 'no single copy'     without root

Rank 0 sends to rank 1, and with four ranks rank 2 to rank 3 at once. "Computes" is a sender that computes
from the start of its send on. "Open MPI's own fragments" are what a message without single copy goes in where
`hybridpipe.environment.fragments` does not set them. Between two hosts a message goes over TCP.
"""

import json
from collections.abc import Iterator, Sequence
from statistics import median

import jobs
import networks
import results
from jobs import Run
from networks import LOOPBACK
from results import Row, number, of

from hybridpipe.environment.fragments import FRAGMENTS

SIZES = (2**16, 2**20, 2**23, 2**26, 2**28)
NO_SINGLE_COPY = {
    "OMPI_MCA_smsc": "^cma,xpmem,knem",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
OWN = dict(zip(FRAGMENTS, ("32768", "3"), strict=True))
PATHS = {  # with the network and the ranks of a host
    "single copy, 2 ranks": (LOOPBACK, 2, {}),
    "single copy, 4 ranks": (LOOPBACK, 4, {}),
    "no single copy, Open MPI's own fragments, 2 ranks": (LOOPBACK, 2, NO_SINGLE_COPY | OWN),
    "no single copy, 2 ranks": (LOOPBACK, 2, NO_SINGLE_COPY),
    "no single copy, Open MPI's own fragments, 4 ranks": (LOOPBACK, 4, NO_SINGLE_COPY | OWN),
    "no single copy, 4 ranks": (LOOPBACK, 4, NO_SINGLE_COPY),
    "TCP within a host, 2 ranks": (LOOPBACK, 2, {"OMPI_MCA_btl": "tcp,self"}),
    "25 Gbit/s, 2 hosts": ("25gbit", 2, {}),
    "10 Gbit/s, 2 hosts": ("10gbit", 2, {}),
}
PLAIN = {"waits": "plain", "computes": "plain", "both ways": "plain, both ways"}  # what each is compared with


def measure(run: Run) -> Iterator[Row]:
    """Send messages of all sizes on each path."""
    for path, (rate, ranks, settings) in PATHS.items():
        if not run.wants(path, "all"):
            continue
        if rate != LOOPBACK and not networks.are_available(run.options.netcluster):
            raise SystemExit(
                "transport: hosts need root and netcluster, named by --netcluster or $NETCLUSTER"
            )
        out = run.out / path.replace(", ", "-").replace("/", "-") / f"round{run.round}"
        with run.network(rate, num_hosts=2) as network:
            arguments = ["--sizes", *map(str, SIZES)]
            # one thread a rank, on cores that are not shared where there are two
            environment = {"OMP_NUM_THREADS": "1", **settings}
            jobs.program("messages", arguments, ranks, out, environment, network)
        yield Row(path, "all", run.round, json.loads((out / "rank0.json").read_text()))


def report(rows: Sequence[Row]) -> str:
    """Return a table of milliseconds, with times MPI's own in brackets."""
    return results.table(_lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for path in results.groups(rows):
        for way in rows[0].figures:
            line = {"path": path, "way": way}
            for size in map(str, SIZES):
                taken = [row[way][size] for row in of(rows, path, "all")]
                line[_name(int(size))] = number(1e3 * median(taken))
                if way in PLAIN:
                    ratios = [row[way][size] / row[PLAIN[way]][size] for row in of(rows, path, "all")]
                    line[_name(int(size))] += f" ({number(median(ratios), 2)}×)"
            yield line


def _name(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"
