"""Under mpirun: minibatches and microbatches whose shapes change, against one process, in float64.

changing_shapes.py SCHEDULE PLAN...   a recorded model and an `nn.Sequential`, by fit with a collate_fn that
                                      pads, with loader processes and without, by train_step, and evaluated
changing_shapes.py differing          ranks whose collate_fn pads to different lengths: told, in one line
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.model.layers import layers_of
from hybridpipe.planning.schedules.registry import ASYNCHRONOUS

RANK, RATE, WORDS, WIDTH = MPI.COMM_WORLD.rank, 0.1, 11, 6
MINIBATCH, MICROBATCH = 6, 2


class Recorded(nn.Module):
    """A forward that is recorded, with a mask that follows from the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(-1)
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x) * mask
        return self.head(x)


def make(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "recorded":
        return Recorded().double()
    layers = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(*layers).double()


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)


def texts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 9, (22,), generator=generator).tolist()
    rows = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
    return [(row, row.flip(0)) for row in rows]


def padded(samples, more: int = 0):
    """Pad a microbatch to its longest text."""
    longest = max(len(ids) for ids, _ in samples) + more
    both = [[nn.functional.pad(each, (0, longest - len(each))) for each in pair] for pair in samples]
    return tuple(torch.stack(part) for part in zip(*both, strict=True))


def plan_of(name: str, schedule: str, model: nn.Module) -> Plan:
    num_layers = layers_of(model, padded(texts()[:MICROBATCH])[0]).num_layers
    name, _, chunks = name.partition("x")
    replicas = [int(each) for each in name.split("-")] * int(chunks or 1)
    edges = [round(i * num_layers / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas, strict=False))
    count = {"pipedream": 1}.get(schedule, MINIBATCH // MICROBATCH)
    return Plan(stages, schedule, count, chunks=int(chunks or 1))


def trainer_of(kind: str, plan: Plan, collate=padded, num_workers: int = 0) -> Trainer:
    return Trainer(
        make(kind),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        plan=plan,
        minibatch_size=MICROBATCH * plan.num_microbatches,
        collate_fn=collate,
        num_workers=num_workers,
    )


def one_process(kind: str, minibatch: int) -> tuple[nn.Module, list[float], float]:
    """Train microbatch by microbatch; return the model, the losses, and the mean loss after training."""
    model, data, losses = make(kind), texts(), []
    update = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in range(0, len(data), minibatch):
        whole, total = data[start : start + minibatch], 0.0
        for first in range(0, len(whole), MICROBATCH):
            part = whole[first : first + MICROBATCH]
            ids, targets = padded(part)
            value = loss(model(ids), targets) * len(part) / len(whole)
            value.backward()
            total += value.item()
        losses.append(total)
        update.step()
        update.zero_grad()
    evaluated = 0.0
    for first in range(0, len(data), MICROBATCH):
        part = data[first : first + MICROBATCH]
        ids, targets = padded(part)
        evaluated += loss(model(ids), targets).item() * len(part) / len(data)
    return model, losses, evaluated


def check(kind: str, plan: Plan, trainer: Trainer, losses: list[float], what: str) -> None:
    synchronous = plan.schedule not in ASYNCHRONOUS
    model, expected, _ = one_process(kind, trainer.minibatch_size)
    state = trainer.full_state_dict()
    worst = 0.0
    if state is not None and synchronous:
        gaps = [(state[key] - tensor).abs().max().item() for key, tensor in model.state_dict().items()]
        worst = max(*gaps, *(abs(a - b) for a, b in zip(losses, expected, strict=True)))
        assert worst <= 1e-11, (kind, plan.name, plan.schedule, what, worst)
    if RANK == 0:
        assert len(losses) == len(expected) and all(value == value for value in losses)
        print(f"{kind} {plan.name} {plan.schedule} {what}: within {worst:.1e}", flush=True)
    trainer.close()


def fitted(kind: str, plan: Plan, num_workers: int) -> None:
    trainer, losses = trainer_of(kind, plan, num_workers=num_workers), []
    trainer.fit(texts(), shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
    found = trainer.evaluate(texts())["loss"]
    if plan.schedule not in ASYNCHRONOUS:
        expected = one_process(kind, trainer.minibatch_size)[2]
        assert abs(found - expected) <= 1e-11, (kind, plan.name, found, expected)
    check(kind, plan, trainer, losses, f"fit with {num_workers} processes")


def stepped(kind: str, plan: Plan) -> None:
    """Minibatches that are padded as a whole, each to its own length."""
    trainer, data, losses, model = trainer_of(kind, plan), texts(), [], make(kind)
    update = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in range(0, len(data), trainer.minibatch_size):
        ids, targets = padded(data[start : start + trainer.minibatch_size])
        losses.append(trainer.train_step(ids, targets))
        total = 0.0
        for first in range(0, len(ids), MICROBATCH):
            part, wanted = ids[first : first + MICROBATCH], targets[first : first + MICROBATCH]
            value = loss(model(part), wanted) * len(part) / len(ids)
            value.backward()
            total += value.item()
        update.step()
        update.zero_grad()
        assert abs(total - losses[-1]) <= 1e-11, (kind, plan.name, total, losses[-1])
    state = trainer.full_state_dict()
    if state is not None:
        worst = max((state[key] - tensor).abs().max().item() for key, tensor in model.state_dict().items())
        assert worst <= 1e-11, (kind, plan.name, worst)
        print(f"{kind} {plan.name} {plan.schedule} train_step: within {worst:.1e}", flush=True)
    trainer.close()


def uneven(samples):
    """Pad one microbatch of the third minibatch to another length on rank 1."""
    late = torch.equal(samples[0][0], texts()[2 * MINIBATCH][0])
    return padded(samples, more=int(late and len(samples) > 1 and RANK == 1))


def differing() -> None:
    plan = plan_of("1-1-1", "1f1b", make("recorded"))
    trainer = trainer_of("recorded", plan, uneven)
    trainer.fit(texts(), shuffle=False)


torch.set_num_threads(1)
if sys.argv[1] == "differing":
    differing()
for name in sys.argv[2:]:
    for kind in ("recorded", "sequential"):
        plan = plan_of(name, sys.argv[1], make(kind))
        fitted(kind, plan, num_workers=0)
        if name == sys.argv[2]:
            fitted(kind, plan, num_workers=1)
        if sys.argv[1] not in ASYNCHRONOUS:
            stepped(kind, plan)
