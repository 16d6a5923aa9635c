"""Under mpirun: train under each plan and compare every parameter with one process, in float64.

The one process is the few lines of `reference`: microbatches in order, gradients weighted by samples and
added up, one update. Usage: exactness.py NUM_UPDATES PLAN... with plans such as 2-2, 1-2-1 or, with two
stages on each rank, 1-1x2. In 2-2:2 replicas shard update and gradients (`zero`), in 2-2:2:scatter those
of the stages with several replicas by a reduce-scatter. In 2-2:mpi gradients are summed by that backend.
--muon trains matrices by Muon and the rest by AdamW instead.
"""

import copy
import random
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.model.rng import random_key
from hybridpipe.optim import gradient_sync
from hybridpipe.planning.checks import BACKENDS
from hybridpipe.planning.schedules.registry import SYNCHRONOUS, TRAITS
from hybridpipe.stage import wgrad

# Make the middle layer large enough for batched weight gradients, of three microbatches at most.
wgrad.LEAST_ELEMENTS, wgrad.LEAST_SIDE, wgrad.ENOUGH_ROWS = 9 * 9, 9, 5
MINIBATCH, MICROBATCH, SEED = 12, 2, 7
SAMPLES = 41  # the last minibatch has 5 samples, its last microbatch 1
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


class Several:
    """The optimizers of a factory, one after the other; written here again for the reference."""

    def __init__(self, made) -> None:
        self.made = made if isinstance(made, list) else [made]
        self.param_groups = [group for each in self.made for group in each.param_groups]
        self.state = ChainMap(*(each.state for each in self.made))

    def step(self) -> None:
        for each in self.made:
            each.step()

    def zero_grad(self) -> None:
        for each in self.made:
            each.zero_grad()


def muon(parameters):
    """Muon for matrices, AdamW for the rest; a stage may have one kind only."""
    given = list(parameters)
    matrices, others = [p for p in given if p.ndim == 2], [p for p in given if p.ndim != 2]
    kinds = [(partial(torch.optim.Muon, lr=0.02), matrices), (partial(torch.optim.AdamW, lr=0.01), others)]
    return [kind(each) for kind, each in kinds if each]


def chosen() -> dict:
    """The optimizers that a program tries."""
    return {"muon": muon} if "--muon" in sys.argv else OPTIMIZERS


class NoisyTanh(nn.Module):
    """Draws from Python's and NumPy's generators, as stochastic depth often does."""

    def forward(self, x):
        return torch.tanh(x) * (0.5 + random.random()) + 0.1 * np.random.standard_normal()


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Linear(5, 9),
        NoisyTanh(),
        nn.Dropout(0.3),
        nn.Linear(9, 9),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(9, 3),
    ]
    return nn.Sequential(*layers).double()


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


def seed_all(step: int, microbatch: int, layer: int) -> None:
    key = random_key(SEED, step, microbatch, layer)
    torch.manual_seed(key), random.seed(key), np.random.seed(key % 2**32)


def backward(model: nn.Sequential, step: int, inputs, targets) -> float:
    """Add up the gradients of a minibatch, microbatch by microbatch; return its mean loss."""
    total = 0.0
    for m, first in enumerate(range(0, len(inputs), MICROBATCH)):
        x, y = inputs[first : first + MICROBATCH], targets[first : first + MICROBATCH]
        for i, layer in enumerate(model):
            seed_all(step, m, i)
            x = layer(x)
        loss = nn.functional.cross_entropy(x, y) * (len(y) / len(targets))
        loss.backward()
        total += loss.item()
    return total


def reference(optimizer_factory, epochs):
    model, data = make_model(), make_data()
    optimizer, losses, step = Several(optimizer_factory(model.parameters())), [], 0
    for _ in range(epochs):
        for start in range(0, SAMPLES, MINIBATCH):
            losses.append(backward(model, step, *data[start : start + MINIBATCH]))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model.state_dict(), losses


# Where a schedule splits the backward: recomputed, more in flight than usual, and as long a lag as there is.
SPLIT_OPTIONS = ({}, {"recompute": True, "in_flight": 7, "weight_lag": 5})


def ways(schedule: str, name: str) -> tuple[dict, ...]:
    """The options to try under a schedule; none where it cannot place the plan's stages."""
    traits, (groups, _, chunks) = TRAITS[schedule], name.partition(":")[0].partition("x")
    if traits.interleaves != bool(chunks) or (traits.placement == "v" and chunks != "2"):
        return ()
    if traits.takes_pass_times:  # uneven: each passes its stage in another time
        times = [(1 + s % 3, 2, s % 2, 1) for s in range(2 * len(groups.split("-")))]
        return {}, {"recompute": True, "pass_times": tuple(times)}
    return SPLIT_OPTIONS if traits.takes_lags else SPLIT_OPTIONS[:1]


def make_plan(name: str, schedule: str, **options) -> Plan:
    name, *words = name.split(":")
    zero, scatters = next((int(word) for word in words if word.isdecimal()), 0), "scatter" in words
    sync = next((word for word in words if word in BACKENDS), None)
    name, _, chunks = name.partition("x")
    replicas = [int(count) for count in name.split("-")] * int(chunks or 1)
    edges = [round(i * 7 / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(
        StageSpec(a, b, m, zero=zero, scatter=scatters and m > 1)
        for a, b, m in zip(edges, edges[1:], replicas, strict=False)
    )
    return Plan(
        stages,
        schedule=schedule,
        num_microbatches=MINIBATCH // MICROBATCH,
        chunks=int(chunks or 1),
        sync=sync,
        **options,
    )


def make_trainer(model, plan, optimizer: str, minibatch_size: int = MINIBATCH, **options) -> Trainer:
    return Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=chosen()[optimizer],
        plan=plan,
        minibatch_size=minibatch_size,
        seed=SEED,
        **options,
    )


def updates_after(step: int, accumulated: int) -> bool:
    return (step + 1) % accumulated == 0


def train_steps(trainer: Trainer, minibatches, accumulated: int) -> Iterator[None]:
    """Train on minibatches, as many an update; pause after each."""
    for step, minibatch in enumerate(minibatches):
        with nullcontext() if updates_after(step, accumulated) else trainer.no_sync():
            trainer.train_step(*minibatch)
        yield


def compare(state, expected) -> float:
    """Compare the parameters with those of one process; return the largest difference."""
    torch.testing.assert_close(state, dict(expected), rtol=0, atol=1e-10)  # sees a NaN, as max does not
    return max((state[key] - expected[key]).abs().max().item() for key in expected)


def check(plan: Plan, name: str, expected, expected_losses, epochs) -> None:
    trainer, losses = make_trainer(make_model(), plan, name), []
    trainer.fit(make_data(), epochs, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
    state = trainer.full_state_dict()
    all_losses = trainer.world.allgather(losses)
    assert all(other == losses for other in all_losses), f"losses differ between ranks: {all_losses}"
    worst_loss = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    if state is not None:
        what = f"{plan.name} {plan.schedule} {name}: parameters within {compare(state, expected):.1e}"
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-10)
        print(f"{what}, losses within {worst_loss:.1e}", flush=True)
    trainer.close()


def main() -> None:
    gradient_sync.BUCKET_BYTES = 300  # several buckets
    updates = int(sys.argv[1])
    epochs = updates // -(-SAMPLES // MINIBATCH)
    for name, factory in chosen().items():
        expected, losses = reference(copy.deepcopy(factory), epochs)
        assert len(losses) == updates
        for plan in (word for word in sys.argv[2:] if not word.startswith("--")):
            for schedule in SYNCHRONOUS:
                for options in ways(schedule, plan):
                    check(make_plan(plan, schedule, **options), name, expected, losses, epochs)


if __name__ == "__main__":
    main()
