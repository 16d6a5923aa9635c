"""Train and evaluate; HYBRIDPIPE_FAULT says what goes wrong.

Usage: faulty.py PLAN SCHEDULE [HANG_TIMEOUT [ON_NONFINITE]]; in the plan 2-1:mpi that backend sums gradients.
$ZERO=1 lets replicas shard their update.
"""

import faulthandler
import os
import sys
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

faulthandler.dump_traceback_later(100)  # the tests' limit is not far then
plan_name, schedule, *options = sys.argv[1:]
hang_timeout, on_nonfinite = [*options, *["20", "stop"][len(options) :]]
plan_name, _, sync = plan_name.partition(":")
replicas = [int(count) for count in plan_name.split("-")]
stages = [StageSpec(i, i + 1 if i + 1 < len(replicas) else 4, m) for i, m in enumerate(replicas)]
count = 1 if schedule == "pipedream" else 4
torch.manual_seed(0)
trainer = Trainer(
    nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=Plan(tuple(stages), schedule=schedule, num_microbatches=count, zero=int(os.environ.get("ZERO", 0))),
    minibatch_size=8,
    hang_timeout=float(hang_timeout),
    on_nonfinite=on_nonfinite,
    sync=sync or "auto",
)
samples = torch.randn(64, 16)
data = torch.utils.data.TensorDataset(samples, samples)
trainer.fit(data, epochs=2, validation=data)
weights = trainer.full_state_dict()
trainer.close()
if weights is not None:
    print(f"finite weights: {all(bool(tensor.isfinite().all()) for tensor in weights.values())}")
    print("trained to the end", flush=True)
