"""Make trainers that differ from rank to rank, and print how each is refused."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Checkpointing, Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI

DATA = TensorDataset(torch.ones(8, 4), torch.ones(8, 4))
last = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1


def attempt(
    width: int = 4, lr: float = 0.1, seed: int = 0, cut: int = 1, minibatch: int = 8, **of_fit: object
) -> None:
    try:
        trainer = Trainer(
            nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)),
            loss=nn.functional.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=lr),
            plan=Plan((StageSpec(0, cut, replicas=2), StageSpec(cut, 3)), num_microbatches=4),
            minibatch_size=minibatch,
            seed=seed,
        )
        if of_fit:
            trainer.fit(DATA, **of_fit)
        trainer.close()
        print(f"rank {MPI.COMM_WORLD.rank} trains", flush=True)
    except ValueError as error:
        print(f"rank {MPI.COMM_WORLD.rank} refused: {error}", flush=True)


attempt()
if last:
    attempt(width=5)
    attempt(lr=0.2)
    attempt(cut=2)
    attempt(minibatch=16)
else:
    for _ in range(4):
        attempt()
attempt(seed=0 if MPI.COMM_WORLD.rank == 0 else 7)
attempt(checkpoint=Checkpointing("unused") if last else None)
