"""A training that tests run both in Spark and by mpirun, as `python spark_training.py ROWS FILE`."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import hybridpipe
from hybridpipe.data import Parquet


def train(rows: Parquet) -> dict[str, torch.Tensor] | None:
    """Train on a hybrid plan of four ranks; rank 0 returns the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    # Two replicas: a sum of two is the same in any order, and MPI adds more in another one between hosts.
    stages = hybridpipe.StageSpec(0, 2, replicas=2), hybridpipe.StageSpec(2, 4), hybridpipe.StageSpec(4, 5)
    trainer = hybridpipe.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        plan=hybridpipe.Plan(stages, schedule="1f1b", num_microbatches=4),
        minibatch_size=24,
        verbose=False,
    )
    trainer.fit(rows.pairs("pixels", "digit"), epochs=1, max_steps=20)
    state = trainer.full_state_dict()
    trainer.close()
    return state


def train_on_hosts(rows: Parquet) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Train, and return this rank's host as well."""
    return train(rows), socket.gethostname()


def parents() -> Iterator[tuple[int, str]]:
    """The processes above this one, with their names."""
    process = os.getpid()
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        yield process, Path(f"/proc/{process}/comm").read_text().strip()


def kill_above(rank: int, victim: str, folder: Path) -> None:
    """Note all processes of the job in files, then let a rank kill one above it, and wait for the end.

    Args:
        victim: "rank", "task" (the Python of a Spark task), or "executor" (its Java).
    """
    from mpi4py import MPI

    above = list(parents())
    java = next(i for i, (_, name) in enumerate(above) if name == "java")
    processes = {"rank": os.getpid(), "task": above[java - 2][0], "executor": above[java][0]}
    (folder / str(MPI.COMM_WORLD.rank)).write_text(
        " ".join(map(str, [os.getpid(), *(process for process, _ in above[: java - 2])]))
    )
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == rank:
        os.kill(processes[victim], signal.SIGKILL)
    MPI.COMM_WORLD.recv()  # nobody sends


if __name__ == "__main__":
    weights = train(Parquet(sys.argv[1]))
    if weights is not None:
        torch.save(weights, sys.argv[2])
