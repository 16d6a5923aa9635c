"""Overhead: forward and backward of a stage that holds the whole model, beside a plain loop over its layers.

    python benchmarks/overhead.py
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/overhead.py        the same of another revision

One microbatch of a rank's share in the peers' tasks, one thread, no messages. `joins` leaves the rows of
large layers for joined products, as flushing schedules do; `versions` goes through a version of the weights
and collects its gradients, as asynchronous schedules do. Medians in milliseconds, the ways in turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from hybridpipe.engine.allocator import keep_freed_memory
from hybridpipe.model.sequential import StageModule
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.weights import WeightVersions

sys.path.insert(0, str(Path(__file__).parent / "peer_programs"))
from common import TASKS, Task

WARM_UP, REPEATS = 4, 26


def ways(task: Task) -> dict[str, tuple[nn.Module, Callable[[], object]]]:
    """By name: a model of its own, and what brings gradients into it."""
    inputs, targets = task.samples(task.minibatch // 2).tensors

    def stage(**options: bool) -> Stage:
        return Stage(StageModule(list(task.build())), inputs.device, loss=task.loss, **options)

    plain, whole, joins, versioned = task.build(), stage(), stage(join_products=True), stage()
    versions = WeightVersions(versioned.module)

    def through(one: Stage) -> None:
        one.forward_loss(0, inputs, targets, share=1.0, step=0)
        one.backward(0, is_final=True)

    def through_a_version() -> None:
        weights = versions.current()
        versioned.forward_loss(0, inputs, targets, share=1.0, step=0, weights=weights)
        versioned.backward(0, is_final=True)
        versions.collect(weights)

    return {
        "plain loop": (plain, lambda: task.loss(plain(inputs), targets).backward()),
        "stage": (whole.module, lambda: through(whole)),
        "joins": (joins.module, lambda: through(joins)),
        "versions": (versioned.module, through_a_version),
    }


def medians(task: Task) -> dict[str, float]:
    """Seconds of each way."""
    taken: dict[str, list[float]] = {}
    todo = ways(task)
    for _ in range(WARM_UP + REPEATS):
        for name, (module, run) in todo.items():
            module.zero_grad(set_to_none=True)
            began = time.perf_counter()
            run()
            taken.setdefault(name, []).append(time.perf_counter() - began)
    return {name: statistics.median(each[WARM_UP:]) for name, each in taken.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt,mlp")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    table = [
        {"model": name} | {way: f"{1e3 * seconds:.1f}" for way, seconds in medians(TASKS[name]).items()}
        for name in options.models.split(",")
    ]
    print(tabulate(table, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
