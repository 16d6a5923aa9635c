"""What the programs of the comparison share: tasks, data, the split, the clock and the report.

Every program builds the same model from the same seed, sees the same samples in the same order, takes the
same optimizer, and notes the time after each update by the same clock. What differs is in the program itself.

Each rank writes DIR/rankN.json: the seconds of every minibatch, and its part of every minibatch's mean loss
(the parts of all ranks add up to it).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hybridpipe.engine.allocator import keep_freed_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import models

BLOCK, VOCABULARY = 64, 96
SEED = 0
TUNED = "tuned"  # a variant: step and allocator as hybridpipe sets them for itself


@dataclass(frozen=True)
class Task:
    """A model, what it is fed with, and a minibatch of it."""

    build: Callable[[], nn.Sequential]
    minibatch: int
    input_shape: tuple[int, ...]  # () stands for a block of characters
    learning_rate: float = 0.01

    def samples(self, count: int) -> TensorDataset:
        """Made-up samples: their contents do not change what a minibatch takes."""
        generator = torch.Generator().manual_seed(SEED)
        if not self.input_shape:
            text = torch.randint(VOCABULARY, (count, BLOCK + 1), generator=generator)
            return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        images = torch.randn(count, *self.input_shape, generator=generator)
        return TensorDataset(images, torch.randint(10, (count,), generator=generator))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over samples, and over the characters of each."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def optimizer(
        self, parameters: Iterator[nn.Parameter], fused: bool | None = None
    ) -> torch.optim.Optimizer:
        """Which updates them."""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, fused=fused)


TASKS = {
    # Of the peers: computing dominates, and parameters are heavy.
    "gpt": Task(partial(models.gpt, width=256, num_layers=4), 16, ()),
    "vgg": Task(partial(models.vgg11, dropout=0.0), 16, (3, 32, 32), 0.001),
    "mlp": Task(partial(models.mlp, width=2048, depth=5), 128, (1, 8, 8)),
    # Of slow networks: the quick start's VGG-style net with wider dense layers, 19 MB of parameters.
    "vgg-digits": Task(partial(models.vgg_digits, width=2048, dropout=0.0), 64, (1, 8, 8)),
    # Of the tests.
    "tiny": Task(partial(models.mlp, width=16, depth=4), 16, (1, 8, 8)),
}


@dataclass(frozen=True)
class Job:
    """One rank's share of one run."""

    task: Task
    variant: str
    cuts: tuple[int, ...]
    minibatch: int
    num_minibatches: int
    num_microbatches: int
    out: Path
    rank: int
    ranks: int
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def model(self) -> nn.Sequential:
        """The same weights on every rank."""
        torch.manual_seed(SEED)
        return self.task.build()

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        """As a plain training loop makes it; `tuned`: with the fused kernels that ours have."""
        return self.task.optimizer(parameters, fused=True if self.variant == TUNED else None)

    def dataset(self) -> TensorDataset:
        """All samples, in the order of the minibatches."""
        return self.task.samples(self.minibatch * self.num_minibatches)

    def minibatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of each; the clock runs from one to the next."""
        inputs, targets = self.dataset().tensors
        began = time.perf_counter()
        for pair in zip(inputs.split(self.minibatch), targets.split(self.minibatch)):
            yield pair
            began, seconds = (now := time.perf_counter()), now - began
            self.seconds.append(seconds)

    def stages(self, model: nn.Sequential) -> list[nn.Sequential]:
        """The model cut at `cuts`."""
        edges = (0, *self.cuts, len(model))
        return [model[start:stop] for start, stop in pairwise(edges)]

    def train_on_shares(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The usual loop of data parallelism: every rank has an equal part of each minibatch."""
        for inputs, targets in self.minibatches():
            x, y = inputs.chunk(self.ranks)[self.rank], targets.chunk(self.ranks)[self.rank]
            optimizer.zero_grad()
            loss = self.task.loss(model(x), y)
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item() / self.ranks)

    def report(self, **more: object) -> None:
        """DIR/rankN.json; `more` goes into it as it is."""
        self.out.mkdir(parents=True, exist_ok=True)
        figures = {"seconds": self.seconds, "losses": self.losses, **more}
        (self.out / f"rank{self.rank}.json").write_text(json.dumps(figures) + "\n")


def load_job() -> Job:
    """The job that the command line asks for; one compute thread."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--variant", default="", help="of the program")
    parser.add_argument("--cuts", default="", help="first layers of the stages but the first, as in 3,5")
    parser.add_argument("--minibatch", type=int, help="samples; by default the task's")
    parser.add_argument("--minibatches", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    task = TASKS[options.task]
    if options.variant == TUNED:
        keep_freed_memory()
    return Job(
        task,
        options.variant,
        tuple(int(cut) for cut in options.cuts.split(",") if cut),
        options.minibatch or task.minibatch,
        options.minibatches,
        options.microbatches,
        options.out,
        rank=int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")),
        ranks=int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")),
    )
