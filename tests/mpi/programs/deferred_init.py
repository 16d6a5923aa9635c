"""Under mpirun: a function as a model trains bit for bit what the module does; a rank makes its part only.

deferred_init.py same           plans by hand and by name, of a recorded model and of an nn.Sequential
deferred_init.py moved FOLDER   checkpoints and files of weights under other plans
deferred_init.py differing      ranks whose functions differ
deferred_init.py meta FOLDER    a model on the meta device, set by its modules or by a file
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI
from safetensors.torch import load_file, save_file
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

WORLD = MPI.COMM_WORLD
WIDTH, SAMPLES, TOKENS = 8, 12, 11


class Tied(nn.Module):
    """Its embedding is its head; a table of positions is no parameter; numbers are drawn in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)
        )
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        for block in self.blocks:
            nn.init.orthogonal_(block[0].weight)

    def forward(self, tokens):
        value = self.embed(tokens) * self.scale
        for block in self.blocks:
            value = value + torch.tanh(block(value))
        return self.head(value)


def tied(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Tied()


def in_line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(TOKENS, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, TOKENS)
    )


def batches(count: int) -> list:
    draw = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(TOKENS, (2, SAMPLES), generator=draw)) for _ in range(count)]


def trainer_of(model, plan, size: int = SAMPLES) -> Trainer:
    return Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        plan=plan,
        minibatch_size=size,
    )


def cut(replicas: str, num_layers: int = 5) -> Plan | str:
    if not replicas[0].isdigit():
        return replicas
    counts = [int(count) for count in replicas.split("-")]
    edges = [i * num_layers // len(counts) for i in range(len(counts) + 1)]
    stages = (StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], counts, strict=False))
    return Plan(tuple(stages), num_microbatches=3)


def num_layers(make) -> int:
    trainer = trainer_of(make(), "dp")
    trainer.train_step(*batches(1)[0])
    count = trainer.plan.num_layers
    trainer.close()
    return count


def same() -> None:
    count_of = {}
    for make, names in ((tied, ("1-1-1", "2-1", "auto")), (in_line, ("1-1-1",))):
        count = count_of[make] = num_layers(make)
        for name in names:
            found = []
            for model in (make, make()):
                plan = found[0][2] if found else cut(name, count)
                trainer = trainer_of(model, plan)
                losses = [trainer.train_step(*batch) for batch in batches(3)]
                absent = sum(parameter.is_meta for parameter in trainer.model.parameters())
                found.append((losses, trainer.full_state_dict(), trainer.plan, absent))
                trainer.close()
            (losses, state, plan, absent), (at_once, own, *_) = found
            assert losses == at_once, (name, losses, at_once)
            assert plan.num_stages == 1 or absent > 0, (name, absent)
            if WORLD.rank == 0:
                assert list(state) == list(own) and all(torch.equal(state[key], own[key]) for key in state), (
                    name
                )
                print(f"{make.__name__} {name}: the same", flush=True)
    torch.manual_seed(WORLD.rank)
    first = trainer_of(Tied, cut("1-1-1", count_of[tied]))
    first.train_step(*batches(1)[0])
    own = first.full_state_dict()
    first.close()
    torch.manual_seed(0)
    other = trainer_of(Tied(), cut("1-1-1", count_of[tied]))
    other.train_step(*batches(1)[0])
    expected = other.full_state_dict()
    other.close()
    if own is not None:
        assert all(torch.equal(own[key], expected[key]) for key in expected)
        print("seeds of ranks: rank 0's weights", flush=True)


def moved(folder: str) -> None:
    root, count = Path(folder), num_layers(tied)
    first = trainer_of(tied(), cut("2-1", count))
    first.train_step(*batches(1)[0])
    state, saved = first.full_state_dict(), first.save(root / "checkpoints")
    first.close()
    if state is not None:
        hugging = root / "folder"
        hugging.mkdir()
        halves = {}
        for i, (key, tensor) in enumerate((k, t) for k, t in state.items() if k != "head.weight"):
            halves.setdefault(f"model-{i % 2}.safetensors", {})[key] = tensor.clone()
        for name, tensors in halves.items():
            save_file(tensors, hugging / name)
        names = {key: name for name, tensors in halves.items() for key in tensors}
        (hugging / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        save_file({key: tensor.clone() for key, tensor in state.items()}, root / "whole.safetensors")
    WORLD.barrier()
    samples = [(batches(1)[0][0][i], batches(1)[0][1][i]) for i in range(SAMPLES)]
    for source in (saved, root / "folder", root / "whole.safetensors"):
        trainer = trainer_of(partial(tied, seed=7), cut("1-1-1", count))
        trainer.resume(source)
        trainer.prepare(samples)
        own = trainer.full_state_dict()
        assert any(parameter.is_meta for parameter in trainer.model.parameters())
        if own is not None and state is not None:
            assert all(torch.equal(own[key], state[key]) for key in state), source
            print(f"{source.name}: the same", flush=True)
        trainer.resume(root / "folder")  # the numbers are there now
        trainer.train_step(*batches(1)[0])
        trainer.close()


def differing() -> None:
    """Functions that do not do the same make whole models; those are compared as modules are."""

    def make(width: int, bias: float) -> nn.Module:
        model = nn.Linear(WIDTH, width)
        nn.init.constant_(model.bias, bias)
        return model

    trainer = trainer_of(partial(make, WIDTH, float(WORLD.rank)), "dp")
    print(f"whole: {not any(parameter.is_meta for parameter in trainer.model.parameters())}", flush=True)
    trainer.close()
    try:
        trainer_of(partial(make, WIDTH + WORLD.rank, 0.0), "dp")
    except ValueError as error:
        print(error, flush=True)


class Scale(nn.Module):
    """Nothing but a file sets its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value):
        return value * self.scale


def on_meta(*more: type) -> nn.Module:
    torch.manual_seed(WORLD.rank)  # rank 0's counts
    with torch.device("meta"):
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        return nn.Sequential(
            nn.Embedding(TOKENS, WIDTH), *layers, *(kind() for kind in more), nn.Linear(WIDTH, TOKENS)
        )


def meta(folder: str) -> None:
    states, losses = [], []
    for name in ("1", "1-1", "2-1"):
        trainer = trainer_of(on_meta(), cut(name, 4))
        states.append(trainer.full_state_dict())
        losses.append(trainer.train_step(*batches(1)[0]))
        trainer.close()
        if states[-1] is not None:
            assert all(torch.equal(states[-1][key], states[0][key]) for key in states[0]), name
            assert abs(losses[-1] - losses[0]) < 1e-6, losses
            print(f"{name}: the same", flush=True)
    source = Path(folder) / "weights.safetensors"
    if WORLD.rank == 0:
        state = on_meta(Scale).state_dict()
        save_file({key: torch.randn(tensor.size()) for key, tensor in state.items()}, source)
    WORLD.barrier()
    samples = [(torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long))] * SAMPLES
    for kind, plan in (("file", "1-1-1"), ("checkpoint", "2-1")):
        trainer = trainer_of(on_meta(Scale), cut(plan, 5))
        trainer.resume(source)
        trainer.prepare(samples)
        assert any(parameter.is_meta for parameter in trainer.model.parameters())
        state = trainer.full_state_dict()
        if state is not None:
            expected = load_file(Path(folder) / "weights.safetensors")
            assert all(torch.equal(state[key], expected[key]) for key in expected)
            print(f"{kind}: the same", flush=True)
        source = trainer.save(Path(folder) / "checkpoints")
        trainer.close()


{
    "same": same,
    "moved": partial(moved, *sys.argv[2:]),
    "differing": differing,
    "meta": partial(meta, *sys.argv[2:]),
}[sys.argv[1]]()
