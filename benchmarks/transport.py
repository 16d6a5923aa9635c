"""Transport: messages between two ranks of this machine beside a plain ping-pong, and what waiting costs.

    python benchmarks/transport.py --out runs/transport

Plain is mpi4py's blocking `Send` and `Recv` of a numpy array. Ours is `MpiTransport` as training uses it,
with a core for each rank (`spinning`), as it is where ranks outnumber cores (`sleeping`), and without a
communication thread, with a core for each rank (`no thread`), as two ranks on two cores train where messages
arrive by themselves. All take turns in every round, and figures are medians over the rounds. Then, over some
seconds each, how much of a core the communication thread and the waiting thread take (their times in
/proc/self/task).
Writes DIR/transport.json, a table in DIR/transport.md and a plot in DIR/transport.svg.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import plots
from tabulate import tabulate

from hybridpipe import environment
from hybridpipe.files import write_json
from hybridpipe.launch import mpirun

SIZES_BYTES = [1 << power for power in range(10, 27)]  # 1 KB to 64 MB
ROUND_BYTES = 1 << 26  # each way in each round, within:
REPEATS = range(3, 1000)
WATCHED_SECONDS = 3.0
TARGET = 1.10
WAYS = ("plain", "no thread", "spinning", "sleeping")


def measure(rounds: int, out: Path) -> None:
    """What each of the two ranks does; rank 0 writes what was found."""
    import torch

    from hybridpipe.comm.mpi import MPI
    from hybridpipe.comm.mpi_transport import MpiTransport

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    with (
        MpiTransport(world.Dup(), cores_to_spare=True) as spinning,
        MpiTransport(world.Dup()) as sleeping,
        MpiTransport(world.Dup(), cores_to_spare=True, progress_thread=False) as no_thread,
    ):
        ours = {"no thread": no_thread, "spinning": spinning, "sleeping": sleeping}
        ways = {"plain": _plain(world.Dup()), **{way: _ours(each) for way, each in ours.items()}}
        seconds = {way: {size: [] for size in SIZES_BYTES} for way in WAYS}
        for _ in range(rounds):
            for size in SIZES_BYTES:
                for way in WAYS:
                    seconds[way][size].append(_there_and_back(world, ways[way], size) / 2)
        shares = {"spinning": _shares(world, spinning), "sleeping": _shares(world, sleeping)}
    if world.rank == 0:
        found = {way: {n: statistics.median(each) for n, each in seconds[way].items()} for way in WAYS}
        write_json(out / "transport.json", {"seconds": found, "share_of_a_core": shares})


def _there_and_back(world, way: Callable, size: int) -> float:
    """Seconds of one exchange."""
    count = min(max(ROUND_BYTES // size, REPEATS.start), REPEATS.stop - 1)
    exchange = way(size, first=world.rank == 0, peer=1 - world.rank)
    exchange()
    world.Barrier()
    began = time.perf_counter()
    for _ in range(count):
        exchange()
    return (time.perf_counter() - began) / count


def _plain(communicator) -> Callable:
    import numpy as np
    from mpi4py import MPI

    def prepare(size: int, first: bool, peer: int) -> Callable[[], None]:
        ours, theirs = np.ones(size, np.uint8), np.ones(size, np.uint8)  # zeros would all be one page

        def exchange() -> None:
            if first:
                communicator.Send([ours, MPI.BYTE], peer, 0)
            communicator.Recv([theirs, MPI.BYTE], peer, 0)
            if not first:
                communicator.Send([ours, MPI.BYTE], peer, 0)

        return exchange

    return prepare


def _ours(transport) -> Callable:
    import torch

    def prepare(size: int, first: bool, peer: int) -> Callable[[], None]:
        ours, theirs = (torch.ones(size, dtype=torch.uint8) for _ in range(2))

        def exchange() -> None:
            receiving = transport.receive(theirs, peer, 0)
            if first:
                transport.send(ours, peer, 0)
            receiving.wait()
            if not first:
                transport.send(ours, peer, 0)

        return exchange

    return prepare


def _shares(world, transport) -> dict[str, float]:
    """Rank 0's shares of a core, of its communication thread and of the thread that waits."""
    import torch

    thread = transport.thread.native_id
    shares = {}
    world.Barrier()
    time.sleep(0.2)  # what was under way is over
    shares["communication thread, nothing under way"] = _share(thread, lambda: time.sleep(WATCHED_SECONDS))
    message = torch.zeros(1 << 20, dtype=torch.uint8)
    if world.rank == 0:
        receiving = transport.receive(message, 1, 1)
        shares["communication thread, a receive posted"] = _share(thread, lambda: time.sleep(WATCHED_SECONDS))
        shares["waiting thread"] = _share(threading.get_native_id(), receiving.wait)
    else:
        time.sleep(3 * WATCHED_SECONDS)
        transport.send(message, 0, 1).wait()
    return shares


def _share(thread: int, meanwhile: Callable[[], object]) -> float:
    began, used = time.perf_counter(), _processor_seconds(thread)
    meanwhile()
    return (_processor_seconds(thread) - used) / (time.perf_counter() - began)


def _processor_seconds(thread: int) -> float:
    """Of one thread, to the nanosecond: the first figure of its schedstat."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def report(found: dict) -> str:
    """The tables."""
    seconds = {way: {int(n): each for n, each in sizes.items()} for way, sizes in found["seconds"].items()}
    rows = []
    for n in SIZES_BYTES:
        row = {"size": f"{n >> 10} KB" if n < 1 << 20 else f"{n >> 20} MB"}
        for way in WAYS:
            row[f"{way}, us"] = f"{seconds[way][n] * 1e6:,.1f}"
        row["messages/s"] = f"{1 / seconds['no thread'][n]:,.0f}"
        row["GB/s"] = f"{n / seconds['no thread'][n] / 1e9:.2f}"
        for way in WAYS[1:]:
            row[f"{way} / plain"] = f"{seconds[way][n] / seconds['plain'][n]:.2f}"
        rows.append(row)
    within = [n for n in SIZES_BYTES if seconds["no thread"][n] <= TARGET * seconds["plain"][n]]
    shares = found["share_of_a_core"]
    costs = [
        {"share of a core": what} | {way: f"{of_way[what]:.1%}" for way, of_way in shares.items()}
        for what in shares["spinning"]
    ]
    return "\n\n".join(
        [
            tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True),
            f"without a thread within {TARGET - 1:.0%} of plain at {len(within)} of {len(SIZES_BYTES)} sizes",
            tabulate(costs, headers="keys", tablefmt="github"),
        ]
    )


def plot(found: dict, path: Path) -> None:
    """Bandwidth over size."""
    figure, axes = plots.svg_axes(figsize=(6, 4))
    for way in WAYS:
        bandwidths = [int(n) / seconds / 1e9 for n, seconds in found["seconds"][way].items()]
        axes.loglog(SIZES_BYTES, bandwidths, "o-", label=way)
    axes.set_xlabel("bytes of a message")
    axes.set_ylabel("GB/s, one way")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line; under mpirun, a rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/transport"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    out = options.out.resolve()
    if environment.promised_ranks() == 2:
        measure(options.rounds, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--out", str(out), "--rounds", str(options.rounds)]
    code = mpirun.run(2, command, timeout_seconds=600, env=dict(os.environ)).returncode
    if code:
        raise SystemExit(f"the two ranks ended with exit code {code}")
    found = json.loads((out / "transport.json").read_text())
    text = report(found)
    (out / "transport.md").write_text(text + "\n")
    plot(found, out / "transport.svg")
    print(f"{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
