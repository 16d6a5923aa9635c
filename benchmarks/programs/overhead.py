"""Plan 1 beside a plain loop, in turns within one process: the same model, samples and microbatches.

Both have a fused step and keep freed memory. The report has the median seconds of a minibatch in each turn.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from common import Job, load_job

from hybridpipe.environment.allocator import keep_freed_memory
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.training.trainer import Trainer

TURNS, WARM_UP = 7, 2

Train = Callable[[Callable[[], None]], None]  # trains on all minibatches, and calls after each


def plain(job: Job) -> Train:
    """Return a plain loop."""
    model = job.model()
    optimizer = job.task.optimizer(model.parameters(), fused=True)
    inputs, targets = job.dataset().tensors

    def train(note: Callable[[], None]) -> None:
        for x, y in zip(inputs.split(job.minibatch), targets.split(job.minibatch)):
            optimizer.zero_grad()
            total = torch.zeros(())
            for a, b in zip(x.chunk(job.num_microbatches), y.chunk(job.num_microbatches)):
                loss = job.task.loss(model(a), b) / job.num_microbatches
                loss.backward()
                total += loss.detach()
            optimizer.step()
            job.losses.append(float(total))
            note()

    return train


def planned(job: Job) -> Train:
    """Return a training under plan 1."""
    model, dataset = job.model(), job.dataset()
    trainer = Trainer(
        model,
        loss=job.task.loss,
        optimizer=job.task.optimizer,
        plan=Plan((StageSpec(0, len(model), 1),), "1f1b", job.num_microbatches),
        minibatch_size=job.minibatch,
    )

    def train(note: Callable[[], None]) -> None:
        trainer.fit(dataset, shuffle=False, on_minibatch=lambda record: note())

    return train


def turn(train: Train) -> float:
    """Train once, and return the median seconds of a minibatch."""
    ends = [time.perf_counter()]
    train(lambda: ends.append(time.perf_counter()))
    seconds = [end - began for began, end in pairwise(ends)]
    return statistics.median(seconds[WARM_UP:])


def main() -> None:
    keep_freed_memory()
    job = load_job()
    ways = {"plain": plain(job), "plan 1": planned(job)}
    for train in ways.values():
        turn(train)
    job.report(turns=[{name: turn(train) for name, train in ways.items()} for _ in range(TURNS)])


if __name__ == "__main__":
    main()
