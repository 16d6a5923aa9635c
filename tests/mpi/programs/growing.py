"""Under mpirun: what each rank holds must not grow with the number of minibatches.

Usage: growing.py SCHEDULE PLAN NUM_MINIBATCHES, such as growing.py 1f1b 1-1 1000
"""

import gc
import resource
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

WIDTH, SAMPLES = 256, 16  # a message holds 4 KB, or 16 KB under pipedream

schedule, replicas, num_minibatches = sys.argv[1], list(map(int, sys.argv[2].split("-"))), int(sys.argv[3])
stages = tuple(StageSpec(2 * s, 2 * s + 2, count) for s, count in enumerate(replicas))
trainer = Trainer(
    nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * len(replicas)))),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    plan=Plan(stages, schedule, num_microbatches=1 if schedule == "pipedream" else 4),
    minibatch_size=SAMPLES,
)


def held() -> tuple[int, int]:
    """Tensors that Python knows, and resident bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sum(
        issubclass(type(each), torch.Tensor) for each in gc.get_objects()
    ), pages * resource.getpagesize()


def train(count: int) -> None:
    samples = torch.ones(SAMPLES * count, 1).expand(-1, WIDTH)
    trainer.fit(torch.utils.data.TensorDataset(samples, samples), shuffle=False)


train(num_minibatches // 5)
tensors, resident = held()
train(num_minibatches)
more_tensors, more_resident = held()
found = f"{more_tensors - tensors} tensors, {(more_resident - resident) / 1e6:.1f} MB more"
print(f"rank {trainer.world.rank}: {found} after {num_minibatches} minibatches", flush=True)
trainer.close()
