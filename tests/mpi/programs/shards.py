"""Under mpirun with two ranks: a plan with shards trains where the model fits no rank, as is predicted.

Usage: shards.py [LIMIT]. Without a limit a given plan of two shards runs, and nothing is measured before. It
prints what each rank's process had when the model was made, and what it had more in training at most: all
memory but pages of files, the whole weights that it had before left out. LIMIT is of a rank, in bytes; what
is predicted of each rank is then printed.
"""

import importlib
import re
import sys
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

FEATURES, CLASSES, SAMPLES, WIDTH, BLOCKS = 64, 10, 128, 2**15, 16
WEIGHTS = BLOCKS * 4 * 2 * FEATURES * WIDTH  # bytes
PROCESS = Path("/proc/self")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def status(*names):
    """The sum of entries of /proc/self/status, in bytes."""
    text = (PROCESS / "status").read_text()
    return sum(1024 * int(found) for name in names for found in re.findall(rf"^{name}:\s+(\d+)", text, re.M))


def main():
    importlib.import_module("torch._dynamo")  # torch's optimizers do: 80 MB that belong to no stage
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(FEATURES, FEATURES), *(Block() for _ in range(BLOCKS)), nn.Linear(FEATURES, CLASSES)
    )
    given = Plan((StageSpec(0, 2 + BLOCKS, tensor=2),), num_microbatches=2)
    before = status("RssAnon", "RssShmem")
    (PROCESS / "clear_refs").write_text("5")  # the peak begins here: proc(5)
    trainer = Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-4),
        minibatch_size=32,
        tensor_plan={"*.up": "colwise", "*.down": "rowwise"},
        plan=given,
        memory=int(sys.argv[1]) if sys.argv[1:] else None,
    )
    inputs, targets = torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,))
    trainer.fit(torch.utils.data.TensorDataset(inputs, targets), epochs=2)
    grown = trainer.world.gather((before, status("VmHWM") - status("RssFile") - before + WEIGHTS))
    if grown is not None:
        print("plan", trainer.plan.name)
        for figures in grown:
            print("before", figures[0], "more", figures[1])
        if trainer.plan.predicted is not None:
            print("predicted", *trainer.plan.predicted.peak_memory_bytes)
    trainer.close()


if __name__ == "__main__":
    main()
