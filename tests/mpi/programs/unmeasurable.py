"""One rank or all fail before the training begins, and the script catches what it can.

unmeasurable.py              the model fails while all ranks measure it
unmeasurable.py zero PLAN    rank 1's optimizer cannot be made
"""

import sys
from functools import partial

import torch
from torch import nn

from hybridpipe import Trainer
from hybridpipe.comm.mpi import MPI


def failing(parameters):
    if MPI.COMM_WORLD.rank == 1:
        raise RuntimeError("only here")
    return torch.optim.SGD(parameters, lr=0.1)


zero, plan = sys.argv[1:] or ("0", "auto")
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))  # does not fit the samples
optimizer = failing if sys.argv[1:] else partial(torch.optim.SGD, lr=0.1)
options = {"zero": zero if zero == "auto" else int(zero), "plan": plan, "microbatch_size": 2}
try:
    trainer = Trainer(model, loss=nn.functional.mse_loss, optimizer=optimizer, minibatch_size=4, **options)
    width = 3 if sys.argv[1:] else 2
    trainer.train_step(torch.ones(4, width), torch.ones(4, 2))
except RuntimeError:
    print("caught", flush=True)
MPI.COMM_WORLD.Barrier()
