"""Joined: a linear layer, as one batch, as microbatches, and as microbatches whose products are joined.

    python benchmarks/joined.py

Forward and backward on one thread. Medians of ten minibatches in milliseconds, the three ways in turn.
"""

import statistics
import time

import torch
from tabulate import tabulate
from torch import nn

from hybridpipe.engine.allocator import keep_freed_memory
from hybridpipe.model.sequential import StageModule
from hybridpipe.stage.stage import Stage

SIZES = (512, 1024, 2048, 4096)
MINIBATCHES = ((32, 8), (256, 8), (64, 4))  # rows, microbatches
WARM_UP, REPEATS = 2, 10


def minibatch(stage: Stage, rows: torch.Tensor, num_microbatches: int) -> float:
    """Seconds; the gradients are made anew."""
    stage.module.zero_grad(set_to_none=True)
    began = time.perf_counter()
    for m, part in enumerate(rows.chunk(num_microbatches)):
        leaf = part.detach().requires_grad_()
        stage.forward_loss(m, leaf, part, share=1 / num_microbatches, step=0)
        stage.backward(m, is_final=m == num_microbatches - 1)
    return time.perf_counter() - began


def main() -> None:
    """Prints the table."""
    keep_freed_memory()
    torch.set_num_threads(1)
    table = []
    for size in SIZES:
        for num_rows, num_microbatches in MINIBATCHES:
            rows = torch.randn(num_rows, size)
            ways = {
                "one batch": (False, 1),
                "microbatches": (False, num_microbatches),
                "joined": (True, num_microbatches),
            }
            stages = {
                name: Stage(
                    StageModule([nn.Linear(size, size)]),
                    rows.device,
                    loss=nn.functional.mse_loss,
                    join_products=joined,
                )
                for name, (joined, _) in ways.items()
            }
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(WARM_UP + REPEATS):
                for name, (_, count) in ways.items():
                    taken[name].append(1e3 * minibatch(stages[name], rows, count))
            medians = {name: statistics.median(each[WARM_UP:]) for name, each in taken.items()}
            shape = {
                "weight": f"{size}×{size}",
                "rows": num_rows,
                "in microbatches of": num_rows // num_microbatches,
            }
            table.append(shape | {name: f"{value:.1f} ms" for name, value in medians.items()})
    print(tabulate(table, headers="keys", tablefmt="github"))


if __name__ == "__main__":
    main()
