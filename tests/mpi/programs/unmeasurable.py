"""The model fails while all ranks measure it, and the script catches what it can."""

from functools import partial

import torch
from torch import nn

from hybridpipe import Trainer


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("injected")


trainer = Trainer(
    nn.Sequential(Broken(2, 2)),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    minibatch_size=4,
)
try:
    trainer.train_step(torch.ones(4, 2), torch.ones(4, 2))
except RuntimeError:
    print("caught", flush=True)
