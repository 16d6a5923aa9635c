"""Train, and fail on one rank in the third step. Usage: failing.py KIND PLAN RANK."""

import sys
import threading
import time
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status

kind, plan_name, failing_rank = sys.argv[1], sys.argv[2], int(sys.argv[3])


def fail() -> None:
    print(f"failing at {time.time()}", flush=True)
    if kind == "exit":
        sys.exit(3)
    raise RuntimeError("injected")


class Faulty(nn.Linear):
    """Works until the third step on the failing rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if MPI.COMM_WORLD.rank == failing_rank and rank_status.step == 2:
            if kind == "thread":
                threading.Thread(target=fail).start()
                time.sleep(60)
            elif kind == "backward":
                x = x * 1  # no leaf, so that the hook runs in the backward of every stage
                return super().forward(Hooked.apply(x, self.weight))
            else:
                fail()
        return super().forward(x)


class Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail()


replicas = [int(count) for count in plan_name.split("-")]
stages = [StageSpec(i, i + 1 if i + 1 < len(replicas) else 3, m) for i, m in enumerate(replicas)]
if kind == "mistake":
    stages = [StageSpec(0, 1, 2), StageSpec(1, 3, 2)]
trainer = Trainer(
    nn.Sequential(*(Faulty(4, 4) for _ in range(3))),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=Plan(tuple(stages), num_microbatches=6),
    minibatch_size=12,
)
if kind == "loader":
    trainer.fit(torch.utils.data.DataLoader([(torch.ones(4), torch.ones(4))] * 12, batch_size=4))
for step in range(4):
    if kind == "exit-outside" and step == 2 and MPI.COMM_WORLD.rank == failing_rank:
        sys.exit(3)
    trainer.train_step(torch.ones(12, 4), torch.ones(12, 4))
