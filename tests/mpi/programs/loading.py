"""Under mpirun: a data set that draws at random, inputs and target alike, as one process would see it.

Each plan trains and evaluates twice, without processes that load and with two: bit for bit the same; under
synchronous schedules the losses are those of the loop in `reference`.
Usage: loading.py PLAN:SCHEDULE..., or, for a sample that cannot be loaded, loading.py damaged|killed.
"""

import multiprocessing
import os
import random
import signal
import sys
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.data.samples import A_SAMPLE
from hybridpipe.model.rng import random_key

SAMPLES, MINIBATCH, MICROBATCH, SEED, EPOCHS = 29, 8, 2, 5, 2


class Drawn(Dataset):
    """A class for every sign, drawn with it: a target that belongs to other inputs cannot be learnt."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index == 13 and self.fault == "damaged":
            raise ValueError(f"sample {index} is damaged")
        if index == 13 and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        drawn = torch.rand(()).item(), random.random(), np.random.random()
        signs = torch.tensor([1.0 if each < 0.5 else -1.0 for each in drawn], dtype=torch.float64)
        return signs * (index + 1) / SAMPLES, int(signs.sum().item()) % 3


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def reference() -> list[float]:
    model, data, losses = make_model(), Drawn(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, MINIBATCH):
            samples = []
            for index in range(start, min(start + MINIBATCH, SAMPLES)):
                key = random_key(SEED, epoch, index, A_SAMPLE)
                torch.manual_seed(key)
                random.seed(key)
                np.random.seed(key % 2**32)
                samples.append(data[index])
            inputs, targets = default_collate(samples)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def make_plan(name: str, schedule: str) -> Plan:
    name, _, chunks = name.partition("x")
    replicas = [int(count) for count in name.split("-")] * int(chunks or 1)
    edges = [round(i * 5 / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas, strict=False))
    count = 1 if schedule == "pipedream" else MINIBATCH // MICROBATCH
    return Plan(stages, schedule=schedule, num_microbatches=count, chunks=int(chunks or 1))


def trained(plan: Plan, num_workers: int, data: Dataset) -> tuple[list[float], object]:
    trainer = Trainer(
        make_model(),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        plan=plan,
        minibatch_size=MINIBATCH,
        seed=SEED,
        num_workers=num_workers,
    )
    state = torch.get_rng_state()
    losses: list[float] = []
    trainer.fit(
        data,
        EPOCHS,
        shuffle=False,
        validation=Drawn(),
        on_minibatch=lambda record: losses.append(record.loss),
    )
    assert torch.equal(torch.get_rng_state(), state), "the generator of the process was drawn from"
    validated = [entry["validation"] for entry in trainer.history]
    trainer.close()
    assert multiprocessing.active_children() == [], "a process that loads was left behind"
    return losses, validated


def main() -> None:
    if sys.argv[1] in ("damaged", "killed"):
        trained(make_plan("1-1", "1f1b"), 2, Drawn(sys.argv[1]))
        return
    expected = reference()
    for each in sys.argv[1:]:
        name, schedule = each.split(":")
        plan = make_plan(name, schedule)
        when_due, ahead = (trained(plan, num_workers, Drawn()) for num_workers in (0, 2))
        assert when_due == ahead, f"{each}: {when_due} when due, {ahead} ahead"
        if not plan.is_asynchronous:
            torch.testing.assert_close(ahead[0], expected, rtol=0, atol=1e-10)
        if MPI.COMM_WORLD.rank == 0:
            print(f"{each}: alike", flush=True)


if __name__ == "__main__":
    main()
