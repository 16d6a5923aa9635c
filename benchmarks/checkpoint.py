"""Checkpoint: what saving costs while training goes on.

    python benchmarks/checkpoint.py --out runs/checkpoint

A pipeline of two ranks trains a stack of linear layers with Adam: without checkpoints, and with one every N
minibatches. The ways take turns, an epoch each, in every round. A minibatch's time is the training thread's:
computing, the snapshot's copy, and whatever the writing in the background takes from it. The cost is that of
the mean minibatch over that without checkpoints, in the same round; the figure is the median over the rounds.
The load is the mean number of processes that wanted to run. Writes DIR/checkpoint.json and prints a table.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from tabulate import tabulate

from hybridpipe.files import write_json
from hybridpipe.launch import mpirun

RANKS, LAYERS, WIDTH, ROWS, MICROBATCHES = 2, 8, 1024, 256, 8
MINIBATCHES = 100  # an epoch
EVERY = (100, 50, 20, 10)
TARGET = 0.05
WARM_UP = 3


def measure(rounds: int, every: list[int], out: Path) -> None:
    """What each of the ranks does; rank 0 writes what was found."""
    import torch
    from torch import nn

    from hybridpipe import Plan, StageSpec, Trainer
    from hybridpipe.checkpoint.policy import Checkpointing

    torch.manual_seed(0)
    inputs = torch.randn(ROWS, WIDTH)
    data = torch.utils.data.TensorDataset(inputs.repeat(MINIBATCHES, 1), inputs.repeat(MINIBATCHES, 1))
    half = LAYERS // 2
    plan = Plan((StageSpec(0, half), StageSpec(half, LAYERS)), num_microbatches=MICROBATCHES)
    ways: dict[str, Checkpointing | None] = {"none": None}
    ways |= {f"every {n}": Checkpointing(out / f"every-{n}", n, keep=1) for n in every}
    trainers = {
        way: Trainer(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
            loss=nn.functional.mse_loss,
            optimizer=partial(torch.optim.Adam, lr=1e-4),
            plan=plan,
            minibatch_size=ROWS,
        )
        for way in ways
    }
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for r in range(rounds):
        first = r % len(ways)  # who comes first takes turns: a machine changes its pace
        for way in [*ways, *ways][first : first + len(ways)]:
            trainer, seconds = trainers[way], []
            trainer.fit(
                data,
                on_minibatch=lambda record, seconds=seconds: seconds.append(record.seconds),
                checkpoint=ways[way],
            )
            kept = seconds[WARM_UP:]
            mean, median = statistics.mean(kept), statistics.median(kept)
            found[way].append({"mean": mean, "median": median, "load": os.getloadavg()[0]})
    saving = [_time_of(lambda i=i: trainers["none"].save(out / "whole", keep=i)) for i in (1, 2, 3)]
    if trainers["none"].world.rank == 0:
        size = sum(file.stat().st_size for file in max((out / "whole").glob("step-*")).iterdir())
        write_json(
            out / "checkpoint.json",
            {"checkpoint_bytes": size, "save_seconds": statistics.median(saving), "ways": found},
        )
    for trainer in trainers.values():
        trainer.close()


def _time_of(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def table(found: dict) -> str:
    """Ratios are within a round."""
    plain = found["ways"]["none"]
    rows = []
    for way, each in found["ways"].items():
        row = {"checkpoint": way}
        for figure in ("mean", "median"):
            ratios = [a[figure] / b[figure] - 1 for a, b in zip(each, plain, strict=True)]
            row[f"{figure} ms"] = f"{1e3 * statistics.median(r[figure] for r in each):.1f}"
            row[f"{figure} cost"] = "" if way == "none" else f"{statistics.median(ratios):+.1%}"
        row["load"] = f"{statistics.mean(r['load'] for r in each):.1f}"
        rows.append(row)
    size, seconds = found["checkpoint_bytes"], found["save_seconds"]
    what = f"{size / 1e6:.0f} MB a checkpoint on {RANKS} ranks; {seconds:.2f} s if training waits for it"
    return f"{tabulate(rows, headers='keys', disable_numparse=True)}\n{what}; target {TARGET:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/checkpoint"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, nargs="*", default=EVERY)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.rounds, options.every, options.out)
        return
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    command = [sys.executable, __file__, "--rank", "--out", str(options.out), "--rounds", str(options.rounds)]
    command += ["--every", *map(str, options.every)]
    done = mpirun.run(RANKS, command, timeout_seconds=1800)
    if done.returncode:
        raise SystemExit(f"the job ended with exit code {done.returncode}")
    print(table(json.loads((options.out / "checkpoint.json").read_text())))


if __name__ == "__main__":
    main()
