"""Handwritten digits on any number of ranks: `mpirun -n 4 python plain_hybridpipe.py`."""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import hybridpipe

EPOCHS = 5

torch.manual_seed(0)
pixels, classes = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
train, test = random_split(TensorDataset(images, torch.tensor(classes)), [0.8, 0.2])  # shuffles, once
batches = DataLoader(train, batch_size=64)

model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU()),
    nn.Linear(128, 10),
)
trainer = hybridpipe.Trainer(
    model,
    loss=F.cross_entropy,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    lr_scheduler=partial(CosineAnnealingLR, T_max=EPOCHS * len(batches)),
    clip_grad_norm=1.0,
    minibatch_size=64,
)
trainer.fit(batches, epochs=EPOCHS, validation=test)  # says what the loop printed

state = trainer.full_state_dict()
if state is not None:  # on rank 0
    torch.save(state, "digits.pt")
