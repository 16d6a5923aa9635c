"""Common parts of the two data-parallel baselines: reading CONFIG, dividing samples, measuring.

For a fair comparison the baselines are written as a user of Horovod or DDP would. So nothing here
imports hybridpipe, though a CONFIG may name its data sets.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

SumOverRanks = Callable[[Tensor], Tensor]

# The first minibatches warm up caches and communication; they count for the losses, not for the speed.
WARM_UP = 3


@dataclass(frozen=True)
class Share:
    """The part of a minibatch that one rank computes in one forward and backward.

    The sum of `weight · loss` over a rank's shares, averaged over the ranks, is the mean loss of
    the minibatch, also where the samples do not divide evenly.
    """

    inputs: Tensor
    targets: Tensor
    weight: float


@dataclass(frozen=True)
class Job:
    """A CONFIG with its factories imported, and the options of the command line."""

    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[..., torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    train_set: Any
    validation_set: Any  # or None
    minibatch: int  # samples
    epochs: int
    seed: int
    shuffle: bool
    precision: str
    accumulate: int
    out: Path | None

    def minibatches(self, epoch: int, rank: int, ranks: int) -> Iterator[list[Share]]:
        """Yield this rank's part of each minibatch, in `accumulate` shares."""
        order = torch.arange(len(self.train_set))
        if self.shuffle:
            generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
            order = torch.randperm(len(self.train_set), generator=generator)
        parts = ranks * self.accumulate
        for minibatch in order.split(self.minibatch):
            shares = []
            for part in range(rank, parts, ranks):
                mine = minibatch[part::parts]
                weight = len(mine) * ranks / len(minibatch)
                # A short minibatch may leave a rank nothing. A sample of weight 0 joins the all-reduce.
                inputs, targets = _load(self.train_set, mine if len(mine) else minibatch[:1])
                shares.append(Share(inputs, targets, weight))
            yield shares

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Call the model in the CONFIG's precision, as a user of autocast would; the loss is in float32."""
        if self.precision == "fp32":
            return model(inputs)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs = model(inputs)
        return outputs.float()

    def evaluate(self, model: nn.Module, rank: int, ranks: int, total: SumOverRanks) -> dict[str, float]:
        """Return the mean loss and the accuracy on the held-out set, divided among the ranks. Collective."""
        if self.validation_set is None:
            return {}
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64)  # loss, samples, right answers, answers
        with torch.no_grad():
            for indices in torch.arange(rank, len(self.validation_set), ranks).split(self.minibatch):
                inputs, targets = _load(self.validation_set, indices)
                outputs = self.outputs(model, inputs)
                loss = self.loss(outputs, targets).item() * len(indices)
                right = (outputs.argmax(-1) == targets).sum().item()
                sums += torch.tensor([loss, len(indices), right, targets.numel()], dtype=torch.float64)
        loss, samples, right, answers = total(sums).tolist()
        return {"loss": loss / samples, "accuracy": right / answers}


def load_job() -> Job:
    """Return the job of the command line; also sets the number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores; more threads would compete for them
    parser = argparse.ArgumentParser(description="Trains CONFIG with plain data parallelism, under mpirun.")
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/summary.json")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", help="override CONFIG")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="backward passes per update")
    options = parser.parse_args()

    config = tomllib.loads(options.config.read_text())
    for override in options.set:
        _override(config, override)
    sys.path.insert(0, str(options.config.resolve().parent))
    data, train = config["data"], config["train"]
    if (precision := train.get("precision", "fp32")) not in ("fp32", "bf16"):
        sys.exit(f"train.precision: the baselines train in fp32 and bf16, got {precision!r}")
    validation = data.get("validation_args")
    return Job(
        build_model=_factory(config["model"]),
        build_optimizer=_factory(config["optimizer"]),
        loss=_factory(config.get("loss", {"factory": "torch.nn:CrossEntropyLoss"}))(),
        train_set=_factory(data)(),
        validation_set=None if validation is None else _factory(data)(**validation),
        minibatch=train["minibatch"],
        epochs=train.get("epochs", 1),
        seed=train.get("seed", 0),
        shuffle=train.get("shuffle", True),
        precision=precision,
        accumulate=options.accumulate,
        out=options.out,
    )


class Score:
    """Losses and times of the minibatches; rank 0 reports them."""

    def __init__(self, plan: str, job: Job, rank: int, ranks: int, total: SumOverRanks) -> None:
        self.plan, self.job, self.rank, self.ranks, self.total = plan, job, rank, ranks, total
        self.losses: list[float] = []  # of each update; in the running epoch only this rank's part
        self.full_seconds: list[float] = []
        self.metrics: dict[str, float] = {}

    def start_epoch(self) -> None:
        """Start the clock."""
        self.first = len(self.losses)
        self.start = self.last = time.perf_counter()

    def minibatch(self, loss: float) -> None:
        """Note one update; `loss` is the sum of this rank's weighted losses."""
        now = time.perf_counter()
        # Only an epoch's last minibatch is ever short.
        if (len(self.losses) - self.first + 1) * self.job.minibatch <= len(self.job.train_set):
            self.full_seconds.append(now - self.last)
        self.losses.append(loss)
        self.last = now

    def end_epoch(self, epoch: int, model: nn.Module) -> None:
        """Evaluate, and print the epoch's line. Collective."""
        speed = len(self.job.train_set) / (self.last - self.start)
        # The losses of all updates are summed in one small all-reduce an epoch.
        parts = torch.tensor(self.losses[self.first :], dtype=torch.float64)
        self.losses[self.first :] = (self.total(parts) / self.ranks).tolist()
        self.metrics = self.job.evaluate(model, self.rank, self.ranks, self.total)
        if self.rank == 0:
            figures = "".join(f", validation {name} {value:.4f}" for name, value in self.metrics.items())
            mean = statistics.mean(self.losses[self.first :])
            print(
                f"epoch {epoch + 1}/{self.job.epochs}: loss {mean:.4f}{figures}, {speed:,.0f} samples/s",
                flush=True,
            )

    def write_summary(self, gradient_bytes: int) -> None:
        """Write DIR/summary.json on rank 0, with keys of `hybridpipe train`. Collective.

        `bytes_allreduced` counts the gradients of all ranks that were all-reduced.
        """
        memory = torch.zeros(self.ranks, dtype=torch.int64)
        memory[self.rank] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = self.total(memory)
        if self.rank != 0 or self.job.out is None:
            return
        full = self.full_seconds[WARM_UP:] or self.full_seconds
        seconds = statistics.median(full) if full else 0.0
        summary = {
            "plan": self.plan,
            "ranks": self.ranks,
            "samples_per_second": self.job.minibatch / seconds if seconds else 0.0,
            "minibatch_seconds_median": seconds,
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "metrics": self.metrics,
            "peak_memory_bytes": memory.tolist(),
            "bytes_sent_p2p": 0,
            "bytes_allreduced": gradient_bytes * len(self.losses) * self.ranks,
            "minibatches": len(self.losses),
        }
        self.job.out.mkdir(parents=True, exist_ok=True)
        (self.job.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of one update's gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _factory(table: dict[str, Any]) -> Callable[..., Any]:
    """Return the callable of a table's `factory`, with its `args`."""
    module, _, name = table["factory"].partition(":")
    return partial(getattr(import_module(module), name), **table.get("args", {}))


def _override(config: dict[str, Any], override: str) -> None:
    """Set one "a.b=value"; a value that is not TOML is a string."""
    key, _, text = override.partition("=")
    *tables, name = key.strip().split(".")
    for table in tables:
        config = config.setdefault(table, {})
    try:
        config[name] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        config[name] = text.strip()


def _load(dataset: Any, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stacked samples: inputs (B, …) and targets (B, …)."""
    if isinstance(dataset, TensorDataset):  # one indexing instead of one call for each sample
        inputs, targets = (tensor[indices] for tensor in dataset.tensors)
    else:
        inputs, targets = default_collate([dataset[i] for i in indices.tolist()])
    return inputs, targets
