"""Common parts of the compared programs: tasks, data, the cut, the clock and the report.

Every program builds the same model from the same seed, sees the same samples in the same order, has the same
optimizer, and reads the same clock after each update. Only the way to train differs.

Each rank writes DIR/rankN.json: the seconds of every minibatch, and its part of every minibatch's mean loss.
The parts of all ranks add up to the loss.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hybridpipe.environment.allocator import keep_freed_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import models

BLOCK, VOCABULARY = 64, 96
SEED = 0
ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo.py"
TUNED = "tuned"  # a variant: step and allocator as hybridpipe sets them for itself


@dataclass(frozen=True)
class Task:
    """A model, its samples and its optimizer."""

    build: Callable[[], nn.Module]
    minibatch: int  # samples
    input_shape: tuple[int, ...]  # () stands for a block of characters
    learning_rate: float = 0.01
    block: int = BLOCK
    vocabulary: int = VOCABULARY

    def samples(self, count: int) -> TensorDataset:
        """Make up samples: a minibatch takes the same time whatever they contain."""
        generator = torch.Generator().manual_seed(SEED)
        if not self.input_shape:
            text = torch.randint(self.vocabulary, (count, self.block + 1), generator=generator)
            return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        images = torch.randn(count, *self.input_shape, generator=generator)
        return TensorDataset(images, torch.randint(10, (count,), generator=generator))

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over samples, and over the characters of each, in float32."""
        logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def optimizer(
        self, parameters: Iterator[nn.Parameter], fused: bool | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, fused=fused)


def zoo(name: str, **options: Any) -> nn.Module:
    """Make a model of the zoo."""
    found = importlib.util.spec_from_file_location("zoo", ZOO)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.ZOO[name](batch=1, **options).model


def gpt2(tied: bool, width: int, num_layers: int, num_heads: int, block: int, vocabulary: int) -> nn.Module:
    """Make a GPT-2 of transformers, without dropout; the head is the embedding, or has its own weights."""
    from transformers import GPT2Config, GPT2LMHeadModel  # not installed everywhere

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": width, "n_layer": num_layers, "n_head": num_heads, "n_positions": block}
    ends = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(**sizes, **ends, **no_dropout, tie_word_embeddings=tied, use_cache=False)
    return GPT2LMHeadModel(config)


def gpt2_task(tied: bool, minibatch: int, *sizes: int) -> Task:
    """Return the task of a `gpt2` of these sizes."""
    *_, block, vocabulary = sizes
    return Task(partial(gpt2, tied, *sizes), minibatch, (), block=block, vocabulary=vocabulary)


TASKS = {
    # For `peers`: computing dominates, and parameters are large.
    "gpt": Task(partial(models.gpt, width=256, num_layers=4), 16, ()),
    "vgg": Task(partial(models.vgg11, dropout=0.0), 16, (3, 32, 32), 0.001),
    "mlp": Task(partial(models.mlp, width=2048, depth=5), 128, (1, 8, 8)),
    # For slow networks: the quick start's VGG-style net with wider dense layers, 19 MB of parameters.
    "vgg-digits": Task(partial(models.vgg_digits, width=2048, dropout=0.0), 64, (1, 8, 8)),
    # For `gpu`: 100 million parameters, and blocks long enough to fill a GPU; and the same, small.
    "gpt-100m": Task(
        partial(models.gpt, width=768, num_layers=14, num_heads=12, block_size=512), 64, (), block=512
    ),
    "gpt-deep": Task(partial(models.gpt, width=256, num_layers=14), 16, ()),  # for schedules in a V
    "gpt-small": Task(partial(models.gpt, width=64, num_layers=4), 16, ()),
    "gpt2-tied": gpt2_task(True, 32, 768, 6, 12, 512, 50257),
    "gpt2-untied": gpt2_task(False, 32, 768, 6, 12, 512, 50257),
    "gpt2-tied-small": gpt2_task(True, 16, 64, 2, 4, 32, 257),
    "gpt2-untied-small": gpt2_task(False, 16, 64, 2, 4, 32, 257),
    # For `memory`: models that are recorded, as small as in tests; many samples take as much memory.
    "zoo-gpt2": Task(partial(zoo, "gpt2", dropout=0.0, tied=False), 512, ()),
    "zoo-resnet": Task(partial(zoo, "resnet50"), 128, (3, 32, 32)),
    # For tests.
    "tiny": Task(partial(models.mlp, width=16, depth=4), 16, (1, 8, 8)),
}


@dataclass(frozen=True)
class Job:
    """One rank's part of a run, and the figures that it collects."""

    task: Task
    variant: str
    cuts: tuple[int, ...]
    minibatch: int
    num_minibatches: int
    num_microbatches: int
    out: Path
    rank: int
    ranks: int
    precision: str = "fp32"
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def model(self) -> nn.Module:
        """Build the model, with the same weights on every rank."""
        torch.manual_seed(SEED)
        return self.task.build()

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer as a plain training loop does; `tuned` has fused kernels, as ours."""
        return self.task.optimizer(parameters, fused=True if self.variant == TUNED else None)

    def dataset(self) -> TensorDataset:
        """Return all samples, in the order of the minibatches."""
        return self.task.samples(self.minibatch * self.num_minibatches)

    def minibatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of each minibatch, and note the seconds from one to the next."""
        inputs, targets = self.dataset().tensors
        began = time.perf_counter()
        for pair in zip(inputs.split(self.minibatch), targets.split(self.minibatch)):
            yield pair
            began, seconds = (now := time.perf_counter()), now - began
            self.seconds.append(seconds)

    def stages(self, model: nn.Sequential) -> list[nn.Sequential]:
        """Return the model's stages, cut at `cuts`."""
        edges = (0, *self.cuts, len(model))
        return [model[start:stop] for start, stop in pairwise(edges)]

    def train_on_shares(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train as usual under data parallelism: every rank has an equal part of each minibatch."""
        for inputs, targets in self.minibatches():
            x, y = inputs.chunk(self.ranks)[self.rank], targets.chunk(self.ranks)[self.rank]
            optimizer.zero_grad()
            loss = self.task.loss(model(x), y)
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item() / self.ranks)

    def report(self, **more: object) -> None:
        """Write DIR/rankN.json, with the figures of `more` in it."""
        self.out.mkdir(parents=True, exist_ok=True)
        figures = {"seconds": self.seconds, "losses": self.losses, **more}
        (self.out / f"rank{self.rank}.json").write_text(json.dumps(figures) + "\n")


def load_job() -> Job:
    """Return the job of the command line, and set its compute threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--variant", default="", help="variant of the program")
    parser.add_argument("--cuts", default="", help="first layer of each stage but the first, such as 3,5")
    parser.add_argument("--minibatch", type=int, help="samples of a minibatch; by default the task's")
    parser.add_argument("--minibatches", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--precision", default="fp32", help="of hybridpipe's trainer")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of a rank")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
        precision=options.precision,
    )
