"""Under mpirun: plans in low precision train what one process does with the same autocast.

Between linear layers values are in the low type already, so that all plans agree to float32's last bits. A
residual stream is in float32, and rounded where it crosses a cut. More kinds of plans, without dropout, MPI
and Horovod, are in tests/engine/test_low_precision.py.
"""

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[3]))
from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.model.layers import layers_of
from hybridpipe.model.precision import Precision
from hybridpipe.model.recorded import RecordedModel
from hybridpipe.optim.loss_scale import INITIAL
from hybridpipe.types import Loss
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


KINDS = [
    Kind("1-1x2", "interleaved-1f1b"),
    Kind("2-1", "1f1b"),
    Kind("1-2-1", "zero-bubble", recompute=True),
    Kind("2-1", "pipedream", 1, recompute=True),
    Kind("1-1", "pipedream-2bw", 2),
    Kind("1-1x2", "zb-v"),
]
RESIDUAL = Kind("1-2-1", "1f1b")
IN_FLIGHT = Kind("1-2-1", "pipedream", 1)
OVERFLOW = 2  # the step whose loss is a million times larger


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
    trainer = make_trainer(model, loss, plan, len(data[0][1]), precision)
    if plan.is_asynchronous:
        losses = in_order(trainer, data)
    else:
        losses = [trainer.train_step(inputs, targets) for inputs, targets in data]
    if WORLD.rank == 0:
        expected = in_one_process(make, layers, loss, plan, precision, data, size)
        gap = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        allowed = LAST_BITS if make is Linears else 8 * DIGITS[precision.name]
        assert gap <= allowed, f"{name} {kind} {precision.name}: {gap}, {losses} for {expected}"
        told(f"{name} {kind.plan} {kind.schedule}: within {gap:.1e}")
    assert losses[-1] != losses[0] and trainer.worker.executor.num_skipped == 0
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {"torch.float32"}, dtypes
    trainer.close()


def in_one_process(
    make: type[nn.Module], layers, loss: Loss, plan: Plan, precision, data, size
) -> list[float]:
    """Return the reference's losses."""
    if plan.is_asynchronous:
        return asynchronous(make, layers, loss, plan, precision).train(data, size)
    given = {"precision": precision, "scale": scale_of(precision)}
    own = OneProcess(model_at_start(make), layers.record.opened, loss, RATE, **given)
    return [own.step(step, inputs, targets, size) for step, (inputs, targets) in enumerate(data)]


def weighed(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    classes, weights = targets
    return (nn.functional.cross_entropy(outputs, classes, reduction="none") * weights).mean()


def make_trainer(
    model: nn.Module, loss: Loss, plan: Plan, minibatch_size: int, precision: Precision
) -> Trainer:
    given = {"plan": plan, "minibatch_size": minibatch_size, "precision": precision.name}
    return Trainer(model, loss=loss, optimizer=partial(torch.optim.SGD, lr=RATE), **given)


def in_order(trainer: Trainer, data: list) -> list[float]:
    """Train on the samples of minibatches without a flush; return the losses."""
    losses: list[float] = []
    inputs, targets = (pytree.tree_map(lambda *parts: torch.cat(parts), *each) for each in zip(*data))
    samples = TensorDataset(inputs, *pytree.tree_leaves(targets))
    collate = [(sample[0], sample[1] if len(sample) == 2 else tuple(sample[1:])) for sample in samples]
    trainer.fit(collate, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
    return losses


def asynchronous(make: type[nn.Module], layers: RecordedModel, loss: Loss, plan: Plan, precision: Precision):
    """Return the reference of an asynchronous schedule."""
    given = layers, loss, RATE, plan, {}, precision, scale_of(precision)
    return AsynchronousProcess(model_at_start(make), *given)


def overflow(kind: Kind, precision: Precision) -> None:
    """A loss a million times larger overflows in one update, which all ranks leave out."""
    model, size = model_at_start(Linears), 2
    data = weighed_minibatches(size * kind.num_microbatches, updates=6)
    layers = layers_of(model, data[0][0][:size], precision=precision)
    plan = plan_of(kind, layers.num_layers)
    trainer = make_trainer(model, weighed, plan, size * kind.num_microbatches, precision)
    scales, changed = [], []
    for inputs, targets in data:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer.train_step(inputs, targets)
        pairs = zip(before, model.parameters(), strict=True)
        changed.append(any(not torch.equal(a, b) for a, b in pairs))
        scales.append(trainer.worker.executor.update.loss_scale.value)
    if trainer.worker.place is not None:
        assert scales == [INITIAL] * 2 + [INITIAL / 2] * 4, scales
        assert changed == [step != OVERFLOW for step in range(6)], changed
    told(f"overflow {kind.plan} {kind.schedule}: one update was left out")
    trainer.close()


def overflow_in_flight(kind: Kind, precision: Precision) -> None:
    """Each stage leaves the update out, and the scale of later minibatches is that of the formula."""
    model, size = model_at_start(Linears), 2
    data = weighed_minibatches(size * kind.num_microbatches, updates=20)
    layers = layers_of(model, data[0][0][:size], precision=precision)
    plan = plan_of(kind, layers.num_layers)
    trainer = make_trainer(model, weighed, plan, size * kind.num_microbatches, precision)
    losses = in_order(trainer, data)
    process = asynchronous(Linears, layers, weighed, plan, precision)
    expected = process.train(data, size)
    gap = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    assert gap <= LAST_BITS, f"{kind}: {gap}, {losses} for {expected}"
    place, executor = trainer.worker.place, trainer.worker.executor
    if place is not None:
        assert executor.num_skipped == 1 and OVERFLOW in process.left_out[place.stage], process.left_out
        assert executor.scales.window()[-1].value == process.scales[-1] == INITIAL / 2, process.scales
    told(f"overflow {kind.plan} {kind.schedule}: each stage left its update out")
    trainer.close()


def weighed_minibatches(size: int, updates: int) -> list:
    weights = [torch.full((size,), 1e6 if step == OVERFLOW else 1.0) for step in range(updates)]
    return [
        (inputs, (classes, w))
        for (inputs, classes), w in zip(minibatches(size, updates), weights, strict=True)
    ]


def told(line: str) -> None:
    if WORLD.rank == 0:
        print(line, flush=True)


def model_at_start(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def scale_of(precision: Precision) -> float:
    return INITIAL if precision.scales_loss else 1.0


def main() -> None:
    torch.set_num_threads(1)
    for name in DIGITS:
        precision = Precision(name)
        for kind in KINDS:
            check(Linears, kind, precision)
        check(Residual, RESIDUAL, precision)
        if precision.scales_loss:
            overflow(RESIDUAL, precision)
            overflow_in_flight(IN_FLIGHT, precision)


main()
