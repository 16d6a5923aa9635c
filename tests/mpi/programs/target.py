"""Under mpirun: a training with a target ends after the same epoch on every rank.

Usage: target.py SCHEDULE PLAN with a plan such as 2-1.
"""

import sys
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

schedule, name = sys.argv[1:]
replicas = [int(count) for count in name.split("-")]
edges = [round(i * 5 / len(replicas)) for i in range(len(replicas) + 1)]
stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas, strict=False))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
inputs = torch.randn(120, 4)
samples = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
trainer = Trainer(
    model,
    loss=nn.functional.cross_entropy,
    optimizer=partial(torch.optim.Adam, lr=0.01),
    plan=Plan(stages, schedule, num_microbatches=1 if schedule == "pipedream" else 3),
    minibatch_size=12,
)
history = trainer.fit(samples, epochs=50, validation=samples, target_accuracy=0.9)
accuracies = [entry["validation"]["accuracy"] for entry in history]
seen = trainer.world.allgather((trainer.step, accuracies))
assert all(each == seen[0] for each in seen), seen
assert 1 < len(history) < 50 and accuracies[-1] >= 0.9 > max(accuracies[:-1]), accuracies
summary = trainer.summary()
if summary is not None:
    assert summary["epochs_to_target"] == len(history)
    assert summary["seconds_to_target"] == sum(entry["seconds"] for entry in history)
    print(f"{schedule}, {trainer.plan.name}: reached after {len(history)} epochs", flush=True)
trainer.close()
