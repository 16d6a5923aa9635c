"""Train a model of 100 MB, whose ranks' kernel lets each take some more memory than it has now."""

import math
import re
import resource
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Cluster, Plan, StageSpec, Trainer

plan, room_bytes = sys.argv[1], int(sys.argv[2])
WIDTH, LAYERS = 1024, 24  # a layer has 4.2 MB: measuring takes a few times as much
CLUSTER = Cluster.flat(2, bandwidth=1e10, latency_seconds=1e-5)  # nothing is measured between ranks
WHOLE = Plan((StageSpec(0, LAYERS, 1, (0,)),), num_microbatches=4)


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


trainer = Trainer(
    model,
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    plan=WHOLE if plan == "whole" else plan,
    cluster=CLUSTER,
    minibatch_size=8,
    predict=True,
)
torch.nn.Linear(WIDTH, WIDTH)(torch.ones(1, WIDTH)).sum().backward()  # threads that the first backward starts
mapped = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
assert mapped is not None
limit = int(mapped[1]) * 1024 + room_bytes
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
losses = [trainer.train_step(inputs, inputs) for _ in range(3)]
assert all(map(math.isfinite, losses)), losses
if (summary := trainer.summary()) is not None:
    peaks, limits = summary["peak_memory_bytes"], summary["memory_limit_bytes"]
    assert all(peak <= most for peak, most in zip(peaks, limits, strict=True)), (peaks, limits)
    print(f"plan {summary['plan']} under {', '.join(summary['memory_limit_origin'])}")
trainer.close()
