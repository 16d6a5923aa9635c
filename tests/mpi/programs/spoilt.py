"""Two ranks, and what the second one holds turns NaN in the last update; FOLDER is where they save to.

spoilt.py FOLDER state    its optimizer's state alone
spoilt.py FOLDER older    its weights; a version that did not look has saved that, and it is resumed
"""

import math
import sys
from functools import partial

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.checkpoint.snapshot import Snapshot

folder, what = sys.argv[1:]
STEPS = 8


class Spoiling(torch.optim.Adam):
    """The second rank's last update makes NaN of one number."""

    def step(self, closure=None):
        super().step(closure)
        parameter = self.param_groups[0]["params"][0]
        state = self.state[parameter]
        if MPI.COMM_WORLD.rank == 1 and state["step"] == STEPS:
            spoilt = state["exp_avg_sq"] if what == "state" else parameter.detach()
            spoilt.view(-1)[0] = math.nan


def trainer() -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(Spoiling, lr=0.01),
        plan=Plan((StageSpec(0, 2), StageSpec(2, 3)), num_microbatches=2),
        minibatch_size=12,
        optimizer_per_stage=True,  # a trial would find what it does
    )


torch.manual_seed(1)
data = TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))
checkpoint = Checkpointing(folder)
training = trainer()
looks = Snapshot.not_finite
if what == "older":
    Snapshot.not_finite = lambda self: None  # type: ignore[method-assign]
training.fit(data, 2, checkpoint=checkpoint)
training.close()
Snapshot.not_finite = looks  # type: ignore[method-assign]
training = trainer()
training.resume(folder)
training.fit(data, 0, checkpoint=checkpoint)
print("the training has ended well", flush=True)
