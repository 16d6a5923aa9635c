"""Under mpirun: plans in low precision train what one process does with the same autocast.

Between linear layers values are in the low type already, so that all plans agree to float32's last bits. A
residual stream is in float32, and rounded where it crosses a cut. Usage: precision.py PRECISION.
"""

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.model.layers import layers_of
from hybridpipe.model.precision import Precision
from hybridpipe.model.recorded import RecordedModel
from hybridpipe.optim.loss_scale import INITIAL
from tests.model.asynchronous_process import AsynchronousProcess
from tests.model.one_process import OneProcess

RATE, WIDTH, CLASSES = 0.1, 16, 5
WORLD = MPI.COMM_WORLD
DIGITS = {"bf16": 2.0**-8, "bf16-params": 2.0**-8, "fp16": 2.0**-11}  # of one rounding, relative
LAST_BITS = 2e-6


class Linears(nn.Module):
    """What crosses a cut is a linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH] * 6 + [CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(self.dropout(x.tanh()))
        return self.layers[-1](x)


class Residual(nn.Module):
    """What crosses a cut is a sum in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Kind(NamedTuple):
    """A plan by name, with "x2" for two stages a rank."""

    plan: str
    schedule: str
    num_microbatches: int = 4
    recompute: bool = False


SYNCHRONOUS = [
    Kind("1", "1f1b"),
    Kind("1-1", "1f1b"),
    Kind("1-1", "zero-bubble", recompute=True),
    Kind("1-1x2", "interleaved-1f1b"),
    Kind("2", "gpipe"),
    Kind("2-1", "1f1b"),
    Kind("1-2-1", "1f1b", recompute=True),
]
ASYNCHRONOUS = [
    Kind("1-1", "pipedream", 1),
    Kind("2-1", "pipedream", 1, recompute=True),
    Kind("1-2-1", "pipedream", 1),
    Kind("1-1", "pipedream-2bw", 2),
]


def plan_of(kind: Kind, num_layers: int) -> Plan:
    name, _, chunks = kind.plan.partition("x")
    replicas = [int(each) for each in name.split("-")] * int(chunks or 1)
    edges = [round(i * num_layers / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas))
    options = {"recompute": kind.recompute, "chunks": int(chunks or 1)}
    return Plan(stages, kind.schedule, kind.num_microbatches, **options)


def minibatches(size: int, updates: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for _ in range(updates)
    ]


def check(make: type[nn.Module], kind: Kind, precision: Precision) -> None:
    name, model, loss, size = make.__name__, model_at_start(make), nn.functional.cross_entropy, 2
    data = minibatches(size * kind.num_microbatches, updates=10 if make is Linears else 40)
    layers = layers_of(model, data[0][0][:size], precision=precision)
    assert isinstance(layers, RecordedModel), layers.path
    plan = plan_of(kind, layers.num_layers)
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        plan=plan,
        minibatch_size=len(data[0][1]),
        precision=precision.name,
    )
    own = OneProcess(model, layers.record.opened, loss, RATE, precision=precision, scale=scale_of(precision))
    losses: list[float] = []
    if plan.is_asynchronous:
        samples = [sample for inputs, targets in data for sample in zip(inputs, targets, strict=True)]
        trainer.fit(samples, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
        process = AsynchronousProcess(model_at_start(make), layers, loss, RATE, plan, {}, precision)
        told = process.train(data, size)
    else:
        told = []
        for step, (inputs, targets) in enumerate(data):
            losses.append(trainer.train_step(inputs, targets))
            told.append(own.step(step, inputs, targets, size))
    gap = max(abs(a - b) / abs(b) for a, b in zip(losses, told, strict=True))
    allowed = LAST_BITS if make is Linears else 8 * DIGITS[precision.name]
    assert gap <= allowed, f"{name} {kind} {precision.name}: {gap}, {losses} for {told}"
    assert losses[-1] != losses[0] and trainer.worker.executor.num_skipped == 0
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {"torch.float32"}, dtypes
    if WORLD.rank == 0:
        print(f"{name} {kind.plan} {kind.schedule}: within {gap:.1e}", flush=True)
    trainer.close()


def weighed(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    classes, weights = targets
    return (nn.functional.cross_entropy(outputs, classes, reduction="none") * weights).mean()


def overflow(kind: Kind, precision: Precision) -> None:
    """A loss a million times larger overflows in one update, which all ranks leave out."""
    model, size = model_at_start(Linears), 2
    data = minibatches(size * kind.num_microbatches, updates=6)
    trainer = Trainer(
        model,
        loss=weighed,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        plan=plan_of(kind, layers_of(model, data[0][0][:size], precision=precision).num_layers),
        minibatch_size=len(data[0][1]),
        precision=precision.name,
    )
    scales, changed = [], []
    for step, (inputs, classes) in enumerate(data):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer.train_step(inputs, (classes, torch.full(classes.shape, 1e6 if step == 2 else 1.0)))
        pairs = zip(before, model.parameters(), strict=True)
        changed.append(any(not torch.equal(a, b) for a, b in pairs))
        scales.append(trainer.worker.executor.update.loss_scale.value)
    if trainer.worker.place is not None:
        assert scales == [INITIAL] * 2 + [INITIAL / 2] * 4, scales
        assert changed == [step != 2 for step in range(6)], changed
    if WORLD.rank == 0:
        print(f"overflow {kind.plan}: one update was left out", flush=True)
    trainer.close()


def model_at_start(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def scale_of(precision: Precision) -> float:
    return INITIAL if precision.scales_loss else 1.0


def main() -> None:
    torch.set_num_threads(1)
    precision = Precision(sys.argv[1])
    kinds = SYNCHRONOUS + ([] if precision.scales_loss else ASYNCHRONOUS)
    for kind in kinds:
        check(Linears, kind, precision)
    for kind in kinds[1::5]:
        check(Residual, kind, precision)
    if precision.scales_loss:
        for kind in (SYNCHRONOUS[1], SYNCHRONOUS[6]):
            overflow(kind, precision)


main()
