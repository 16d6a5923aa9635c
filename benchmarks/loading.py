"""What loading takes of a minibatch: when it is due, and ahead by one and two processes of each rank.

    python -m hybridpipe.launch.mpirun 2 -- python benchmarks/loading.py [--wait MS] [--work MS]

Takes half a minute.

The digits, each of whose samples takes so many milliseconds of waiting, as for a disk, and of computing, as
for decoding; the plan 1-1, in turns, medians of the rounds.
"""

import argparse
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.data.datasets import digits

MINIBATCH, MICROBATCHES, SAMPLES, WIDTH = 64, 4, 1024, 1024
WORKERS = (0, 1, 2)


class Slow(torch.utils.data.Dataset[Any]):
    """The digits, slower to come by."""

    def __init__(self, wait_ms: float, work_ms: float) -> None:
        self.digits, self.wait, self.work = digits(), wait_ms / 1e3, work_ms / 1e3

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait)
        until = time.thread_time() + self.work
        while time.thread_time() < until:
            pass
        return self.digits[index]


def trainer(num_workers: int) -> Trainer:
    """Of a net whose minibatch takes some tens of milliseconds."""
    layers = [nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    return Trainer(
        nn.Sequential(*layers),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        plan=Plan((StageSpec(0, 4), StageSpec(4, 8)), num_microbatches=MICROBATCHES),
        minibatch_size=MINIBATCH,
        num_workers=num_workers,
    )


def measured(data: Slow, num_workers: int) -> float:
    """Milliseconds a minibatch, the first ones, in which processes start, left out."""
    ends: list[float] = []
    trained = trainer(num_workers)
    trained.fit(data, on_minibatch=lambda _: ends.append(time.perf_counter()))
    trained.close()
    return 1e3 * statistics.median(end - begin for begin, end in pairwise(ends[3:]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wait", type=float, default=1.0, metavar="MS")
    parser.add_argument("--work", type=float, default=0.0, metavar="MS")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    data = Slow(options.wait, options.work)
    found: dict[int, list[float]] = {count: [] for count in WORKERS}
    for _ in range(options.rounds):
        for count in WORKERS:
            found[count].append(measured(data, count))
    if MPI.COMM_WORLD.rank == 0:
        due = statistics.median(found[0])
        rows = [
            {
                "processes": count,
                "ms a minibatch": f"{statistics.median(each):.0f}",
                "× when due": f"{due / statistics.median(each):.2f}",
            }
            for count, each in found.items()
        ]
        print(tabulate(rows, headers="keys", tablefmt="github"), flush=True)


if __name__ == "__main__":
    main()
