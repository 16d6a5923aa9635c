"""Large messages between pairs of ranks, all at once: MPI's own calls beside the transport's.

Rank 2i sends to rank 2i + 1. Writes DIR/rank0.json: for each way and size in bytes the median seconds until
all receivers have the message, of which `computes` is a sender that computes from the start of its send on.
Usage: messages.py --sizes BYTES... --out DIR.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from hybridpipe.comm.idle import cores_to_spare
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.progress_thread import needs_progress_thread

REPEATS = 9
MATRIX = 192  # its product takes a third of a millisecond of a core
WORLD = MPI.COMM_WORLD
PEER, SENDS = WORLD.rank ^ 1, WORLD.rank % 2 == 0


def seconds(once: Callable[[], float]) -> float:
    """Return the median over repetitions of the longest time on any rank; the first is not counted."""
    taken = []
    for _ in range(1 + REPEATS):
        WORLD.Barrier()
        taken.append(WORLD.allreduce(once(), op=MPI.MAX))
    return statistics.median(taken[1:])


def plain(num_bytes: int, both: bool) -> Callable[[], float]:
    """Return an exchange by MPI's blocking calls."""
    mine, theirs = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    def once() -> float:
        began = time.perf_counter()
        if both:
            WORLD.Sendrecv(mine, PEER, recvbuf=theirs, source=PEER)
        elif SENDS:
            WORLD.Send(mine, PEER)
            return 0.0
        else:
            WORLD.Recv(theirs, PEER)
        return time.perf_counter() - began

    return once


def ours(transport: MpiTransport, num_bytes: int, both: bool, computes: float) -> Callable[[], float]:
    """Return an exchange by the transport, whose sender computes for some seconds meanwhile."""
    matrix = torch.full((MATRIX, MATRIX), 1 / MATRIX)

    def once() -> float:
        mine = transport.buffer(num_bytes)
        began = time.perf_counter()
        receiving = transport.receive(transport.buffer(num_bytes), PEER, 0) if both or not SENDS else None
        sending = transport.send(mine, PEER, 0) if both or SENDS else None
        while SENDS and time.perf_counter() - began < computes:
            torch.mm(matrix, matrix)
        if receiving is not None:
            receiving.wait()
        taken = time.perf_counter() - began
        if sending is not None:
            sending.wait()
        return 0.0 if receiving is None else taken

    return once


def measured(sizes: list[int]) -> dict[str, dict[str, float]]:
    """Return the seconds by way and size."""
    thread = needs_progress_thread(WORLD, torch.device("cpu"))
    found: dict[str, dict[str, float]] = {}
    with MpiTransport(WORLD.Dup(), cores_to_spare(WORLD), thread) as transport:
        for size in sizes:
            alone = seconds(plain(size, both=False))
            computes = 0.01 + 20 * alone
            of = {
                "plain": alone,
                "waits": seconds(ours(transport, size, False, 0.0)),
                "computes": seconds(ours(transport, size, False, computes)),
                "plain, both ways": seconds(plain(size, both=True)),
                "both ways": seconds(ours(transport, size, True, 0.0)),
            }
            for way, taken in of.items():
                found.setdefault(way, {})[str(size)] = taken
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(options.sizes)
    if WORLD.rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "rank0.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
