"""Trains the ways of the benchmark `checkpoint` in turn; rank 0 writes DIR/checkpoints.json."""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.files import write_json

LAYERS, WIDTH, ROWS, MICROBATCHES = 8, 1024, 256, 8
WARM_UP = 3
SAVES = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--first", type=int, default=0, help="index of the way that begins, as machines drift"
    )
    parser.add_argument("--minibatches", type=int, default=100)
    parser.add_argument("--every", type=int, nargs="*", default=())
    options = parser.parse_args()
    saved = options.out / "saved"
    ways: dict[str, Checkpointing | None] = {"none": None}
    ways |= {f"every {n}": Checkpointing(saved / f"every-{n}", n, keep=1) for n in options.every}
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, WIDTH).repeat(options.minibatches, 1)
    data = torch.utils.data.TensorDataset(inputs, inputs)
    trainers = {way: trainer() for way in ways}
    found: dict[str, dict[str, float]] = {way: {} for way in ways}
    first = options.first % len(ways)
    for way in [*ways, *ways][first : first + len(ways)]:
        seconds: list[float] = []
        trainers[way].fit(
            data,
            on_minibatch=lambda record, seconds=seconds: seconds.append(record.seconds),
            checkpoint=ways[way],
        )
        kept = seconds[WARM_UP:]
        found[way] = {"mean": statistics.mean(kept), "median": statistics.median(kept)}
    saver = trainers["none"]
    saving = [seconds_of(partial(saver.save, saved / "whole", keep=1 + i)) for i in range(SAVES)]
    if saver.world.rank == 0:
        size = sum(file.stat().st_size for file in max((saved / "whole").glob("step-*")).iterdir())
        found["training waits"] = {"seconds": statistics.median(saving), "bytes": size}
        write_json(options.out / "checkpoints.json", found)
    for each in trainers.values():
        each.close()
    if saver.world.rank == 0:
        shutil.rmtree(saved)


def trainer() -> Trainer:
    """Return a pipeline with half of the layers on each rank."""
    half = LAYERS // 2
    return Trainer(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        plan=Plan((StageSpec(0, half), StageSpec(half, LAYERS)), num_microbatches=MICROBATCHES),
        minibatch_size=ROWS,
    )


def seconds_of(action: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
