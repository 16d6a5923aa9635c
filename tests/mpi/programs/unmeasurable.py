"""The model fails while all ranks measure it, and the script catches what it can."""

from functools import partial

import torch
from torch import nn

from hybridpipe import Trainer

model = nn.Sequential(nn.Linear(3, 2))  # does not fit the samples
loss, optimizer = nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)
trainer = Trainer(model, loss=loss, optimizer=optimizer, minibatch_size=4)
try:
    trainer.train_step(torch.ones(4, 2), torch.ones(4, 2))
except RuntimeError:
    print("caught", flush=True)
