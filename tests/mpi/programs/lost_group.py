"""Under `hybridpipe launch --groups 2`: train, and note each exchange; a rank of group 1 is killed once.

Each rank writes DIR/GROUP-ATTEMPT-RANK.jsonl: the weights before an exchange, the centre after it, the number
of groups, and the weights that it has taken when it came. Usage: lost_group.py DIR. Group 1 is killed after 7
minibatches; group 0 waits after 20 until it is back.
"""

import json
import os
import signal
import sys
import time
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Checkpointing, GroupOptions, Plan, StageSpec, Trainer
from hybridpipe.health.exit_report import ATTEMPT
from hybridpipe.optim.centre import Centre

STEPS, KILLED_AT, WAITS_AT, MOST_SECONDS = 40, 7, 20, 120
folder = Path(sys.argv[1])
options = GroupOptions(count=2, every=2, rule="average")
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(64, 5, generator=generator, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (64,), generator=generator))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
plan = Plan((StageSpec(0, 2), StageSpec(2, 3)), num_microbatches=2)
trainer = Trainer(
    model,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    minibatch_size=8,
    plan=plan,
    groups=options,
    verbose=False,
)
index, attempt, rank = trainer.group.index, os.environ[ATTEMPT], trainer.world.rank


def flat(tensors) -> list[float]:
    return list(chain.from_iterable(tensor.detach().reshape(-1).tolist() for tensor in tensors))


def noting(kind: str, method):
    """Note weights before and after a method of the centre."""

    def noted(self: Centre, *arguments) -> None:
        before = flat(self.kept())
        method(self, *arguments)
        centre = flat(kept["centre"] for kept in self.kept().values())
        line = {"kind": kind, "before": before, "after": flat(self.kept()), "centre": centre}
        print(json.dumps({**line, "count": self.sums.count}), file=log, flush=True)

    return noted


Centre._apply = noting("exchange", Centre._apply)
Centre.take = noting("take", Centre.take)


def on_minibatch(record) -> None:
    if (index, attempt, rank) == (1, "0", 1) and record.step + 1 == KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    if (index, record.step + 1) == (0, WAITS_AT):
        end = time.monotonic() + MOST_SECONDS
        while not (folder / "1-1-1.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1.0)  # until it has said hello


log = (folder / f"{index}-{attempt}-{rank}.jsonl").open("w")
saved = Checkpointing(folder / f"checkpoints-{index}", every=3)
trainer.fit(data, max_steps=STEPS, on_minibatch=on_minibatch, checkpoint=saved, resume="auto")
trainer.close()
