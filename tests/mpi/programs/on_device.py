"""Under mpirun: what a device trains is what the CPU trains, in float64, and what one process trains on it.

With one GPU all ranks share it. Usage: on_device.py DEVICE WHAT [FOLDER], with WHAT one of CHECKS.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.engine.executor import ProgramRun
from hybridpipe.planning.schedules.instructions import AllGather, AllReduce, Instruction, ReduceScatter, Step

WORLD = MPI.COMM_WORLD
MINIBATCH, MICROBATCH, SAMPLES, EPOCHS = 12, 3, 31, 2
EXACT = 1e-10
DIGITS = {"bf16": 2.0**-8, "bf16-params": 2.0**-8, "fp16": 2.0**-11}  # of one rounding, relative


class Kind(NamedTuple):
    """A plan by name, with "x2" for two stages a rank."""

    plan: str
    schedule: str
    recompute: bool = False

    def make(self) -> Plan:
        name, _, chunks = self.plan.partition("x")
        replicas = [int(each) for each in name.split("-")] * int(chunks or 1)
        edges = [round(i * 7 / len(replicas)) for i in range(len(replicas) + 1)]
        stages = [StageSpec(a, b, m) for (a, b), m in zip(pairwise(edges), replicas, strict=True)]
        count = {"pipedream": 1, "pipedream-2bw": 2}.get(self.schedule, MINIBATCH // MICROBATCH)
        options = {"recompute": self.recompute, "chunks": int(chunks or 1)}
        return Plan(tuple(stages), self.schedule, count, **options)


SYNCHRONOUS = [
    Kind("1", "1f1b"),
    Kind("2", "gpipe"),
    Kind("1-1", "gpipe"),
    Kind("1-1", "1f1b", recompute=True),
    Kind("1-1x2", "interleaved-1f1b"),
    Kind("1-1-1", "zero-bubble"),
    Kind("2-1", "1f1b"),
    Kind("1-2-1", "1f1b"),
    Kind("2-2", "zero-bubble", recompute=True),
]
RESUMED = [
    (Kind("1-2-1", "1f1b"), "fp32"),
    (Kind("1-1", "zero-bubble"), "fp16"),
    (Kind("1-1", "pipedream"), "bf16"),
]
ASYNCHRONOUS = [Kind("1-1", "pipedream"), Kind("1-2-1", "pipedream"), Kind("1-1-1", "pipedream-2bw")]


def some(kinds: list[Kind], device: str) -> list[Kind]:
    """Return all kinds on a GPU, and few on the CPU, which other tests try."""
    return kinds if device == "cuda" else kinds[::4]


def made(dropout: float, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Dropout(dropout), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(12, 12), nn.Linear(12, 4)).to(dtype)


class Trained(NamedTuple):
    """Losses of all minibatches, and on rank 0 the model's state."""

    losses: Tensor
    state: dict[str, Tensor]


class Training:
    """A training of the same samples, under any plan and on any device."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float64, **options) -> None:
        self.dropout, self.dtype, self.options = dropout, dtype, options

    def trainer(self, kind: Kind, device: str, world: MPI.Comm = WORLD) -> Trainer:
        plan = kind.make()
        size = None if kind.schedule.startswith("pipedream") else MICROBATCH
        return Trainer(
            made(self.dropout, self.dtype),
            loss=nn.functional.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            plan=plan,
            minibatch_size=MINIBATCH,
            microbatch_size=size,
            device=device,
            seed=7,
            world=world,
            **self.options,
        )

    def fit(self, trainer: Trainer, epochs: int = EPOCHS) -> Trained:
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=self.dtype)
        targets = torch.randint(0, 4, (SAMPLES,), generator=generator)
        losses: list[float] = []
        data = torch.utils.data.TensorDataset(inputs, targets)
        trainer.fit(data, epochs, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
        return Trained(torch.tensor(losses, dtype=torch.float64), trainer.full_state_dict() or {})

    def __call__(self, kind: Kind, device: str, world: MPI.Comm = WORLD) -> Trained:
        trainer = self.trainer(kind, device, world)
        trained = self.fit(trainer)
        held = [p for stage in trainer.worker.executor.stages for p in stage.module.parameters()]
        assert {p.device.type for p in held} <= {torch.device(device).type}
        trainer.close()
        return trained


def compare(what: str, found: Trained, wanted: Trained, most: float) -> None:
    """Print the largest differences, and fail if one is too large."""
    of_losses = float(((found.losses - wanted.losses) / wanted.losses).abs().max())
    both = [(found.state[key], wanted.state[key]) for key in found.state]
    of_weights = max([float((a - b).abs().max()) for a, b in both], default=0.0)
    if WORLD.rank == 0:
        print(f"{what}: losses within {of_losses:.1e}, weights within {of_weights:.1e}", flush=True)
    assert of_losses <= most and of_weights <= most, what


def alone(training: Training, device: str) -> Trained:
    """Train in one process on the device; every rank does it."""
    return training(Kind("1", "1f1b"), device, MPI.COMM_SELF)


def exact(device: str) -> None:
    """Compare with the CPU."""
    training = Training()
    reference = alone(training, "cpu")
    for kind in some(SYNCHRONOUS, device):
        compare(f"{kind}", training(kind, device), reference, EXACT)
    for kind in some(ASYNCHRONOUS, device):
        compare(f"{kind}", training(kind, device), training(kind, "cpu"), EXACT)


def dropout(device: str) -> None:
    """Compare with one process on the same device: a GPU draws other numbers than a CPU."""
    training = Training(dropout=0.3)
    reference = alone(training, device)
    for kind in some(SYNCHRONOUS, device):
        compare(f"{kind} with dropout", training(kind, device), reference, EXACT)


def low(device: str) -> None:
    """Compare low precision with one process in it, on the same device."""
    for precision, digits in DIGITS.items():
        training = Training(dtype=torch.float32, precision=precision)
        reference = alone(training, device)
        kinds = SYNCHRONOUS if precision == "fp16" else [*SYNCHRONOUS, ASYNCHRONOUS[0]]
        for kind in some(kinds, device):
            wanted = reference if kind in SYNCHRONOUS else training(kind, "cpu")
            compare(f"{kind} in {precision}", training(kind, device), wanted, 4 * digits)


def resume(device: str, folder: str) -> None:
    """Train, save, resume in a new trainer, and compare bit for bit with a training in one go."""
    for i, (kind, precision) in enumerate(RESUMED):
        training = Training(dropout=0.3, dtype=torch.float32, precision=precision)
        whole = training(kind, device)
        first = training.trainer(kind, device)
        begun = training.fit(first, epochs=1)
        first.save(Path(folder) / str(i))
        first.close()
        second = training.trainer(kind, device)
        second.resume(Path(folder) / str(i))
        rest = training.fit(second, epochs=1)
        second.close()
        compare(f"{kind} resumed", Trained(torch.cat([begun.losses, rest.losses]), rest.state), whole, 0.0)


@contextmanager
def raising_where_the_host_waits(device: str) -> Iterator[None]:
    """Make torch raise where the host waits for a GPU while a microbatch runs; an update may wait once."""
    handle = ProgramRun.handle

    def guarded(run: ProgramRun, instruction: Instruction) -> None:
        of_update = isinstance(instruction, AllReduce | ReduceScatter | Step | AllGather)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default" if of_update else "error")
        try:
            handle(run, instruction)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    ProgramRun.handle = guarded
    try:
        yield
    finally:
        ProgramRun.handle = handle


def waits(device: str) -> None:
    """Compare with the CPU where torch raises at a wait."""
    training = Training()
    reference = alone(training, "cpu")
    with raising_where_the_host_waits(device):
        for kind in some(SYNCHRONOUS, device):
            compare(f"{kind} without waits", training(kind, device), reference, EXACT)


CHECKS = {"exact": exact, "dropout": dropout, "low": low, "resume": resume, "waits": waits}

if __name__ == "__main__":
    device, what, *more = sys.argv[1:]
    torch.use_deterministic_algorithms(True, warn_only=True)
    CHECKS[what](device, *more)
