"""One rank alone calls a method, though all are collective; the other sleeps, or has ended its script.

alone.py WAY METHOD RANK FOLDER
"""

import sys
import time
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

trainer = Trainer(
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=2),
    minibatch_size=4,
    hang_timeout=2.0,
)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
trainer.fit(data)
way, method, rank, folder = sys.argv[1:]
if method == "resume":
    trainer.save(folder)
if trainer.world.rank == int(rank):
    getattr(trainer, method)(data if method == "evaluate" else folder)
elif way == "sleeps":
    time.sleep(60)
