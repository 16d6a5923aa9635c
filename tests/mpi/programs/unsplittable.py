"""A model whose forward reads an activation. Usage: unsplittable.py PLAN, a name or "two" for two stages."""

import sys

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.health import failure


class Wanders(nn.Module):
    """Takes a path that its activations decide over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if x.mean().item() > 0 else x


def sgd(parameters):
    """Make the optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


torch.manual_seed(0)
plan = Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=2) if sys.argv[1] == "two" else sys.argv[1]
trainer = Trainer(Wanders(), loss=nn.functional.mse_loss, optimizer=sgd, plan=plan, minibatch_size=4)
try:
    trainer.train_step(torch.ones(4, 3), torch.zeros(4, 3))
except ValueError as error:
    failure.refuse(error)  # as the commands do
text = trainer.explain()
if MPI.COMM_WORLD.rank == 0:
    print(f"{trainer.plan.num_stages} stage, explained: {text.splitlines()[1]}")
else:
    assert text is None
trainer.close()
