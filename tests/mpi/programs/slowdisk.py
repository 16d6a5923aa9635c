"""Saving to a disk that is slow on rank 1: slowdisk.py FOLDER SLOW THEN.

Each of its first SLOW writes takes half a second, each later one THEN seconds. The hang timeout is 2 s.
"""

import os
import sys
import time
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint import disk

torch.manual_seed(0)  # every rank has the same data
folder, num_slow, then = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
trainer = Trainer(
    nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=2),
    minibatch_size=4,
    hang_timeout=2.0,
)
trainer.train_step(torch.randn(4, 32), torch.randn(4, 32))
write, written = os.write, 0


def slow_write(descriptor: int, data: memoryview) -> int:
    global written
    if len(data) == disk.CHUNK_BYTES:  # of the weights; not what another thread writes
        written += 1
        time.sleep(0.5 if written <= num_slow else then)
    return write(descriptor, data)


if trainer.world.rank == 1:
    disk.CHUNK_BYTES, os.write = 1024, slow_write
began = time.monotonic()
trainer.save(folder)
print(f"saved in {time.monotonic() - began:.1f} s", flush=True)
trainer.close()
