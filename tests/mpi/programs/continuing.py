"""Under `hybridpipe launch`: an ordinary script that continues from its last good checkpoint.

Usage: continuing.py FOLDER WEIGHTS, where rank 0 writes the trained model's weights and the losses.
"""

import json
import sys
from functools import partial

import torch
from torch import nn

import hybridpipe

folder, weights = sys.argv[1:]
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3))
inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(inputs, inputs.abs().argmax(1) % 3)
trainer = hybridpipe.Trainer(
    model,
    loss=nn.functional.cross_entropy,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    plan="straight",
    minibatch_size=8,
    microbatch_size=4,
)
trainer.fit(data, epochs=3, checkpoint=hybridpipe.Checkpointing(folder, every=3), resume="auto")
state = trainer.full_state_dict()
if state is not None:
    losses = [entry["loss"] for entry in trainer.history]
    numbers = torch.cat([tensor.flatten() for tensor in state.values()]).tolist()
    with open(weights, "w") as file:
        json.dump({"losses": losses, "weights": numbers}, file)
