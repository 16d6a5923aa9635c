"""Leave fit in the middle of an epoch. Usage: leaving.py SCHEDULE WAY.

WAY is "raise" (caught here, on every rank alike), "one" (on rank 0 only) or "exit" (sys.exit(3)).
"""

import sys
import time
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer

schedule, way = sys.argv[1:]


class Enough(Exception):
    """The user has seen enough."""


def leave(record) -> None:
    if record.step == 5 and (way != "one" or trainer.world.rank == 0):
        print(f"leaving at {time.time()}", flush=True)
        if way == "exit":
            sys.exit(3)
        raise Enough("seen enough")


torch.manual_seed(0)  # every rank has the same data
data = TensorDataset(torch.randn(400, 4), torch.randn(400, 4))
trainer = Trainer(
    nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=Plan(
        tuple(StageSpec(i, i + 1, 1) for i in range(3)),
        schedule=schedule,
        num_microbatches=1 if schedule == "pipedream" else 4,
    ),
    minibatch_size=8,
)
kept = None  # an exception that is kept keeps its frames, and what they hold
try:
    trainer.fit(data, on_minibatch=leave)
except Enough as error:
    kept = error
history = trainer.fit(data)
steps = trainer.world.allgather(trainer.step)
if trainer.world.rank == 0:
    print(f"went on: {history}, {steps}", flush=True)
trainer.close()
