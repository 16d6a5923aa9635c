"""Under mpirun: train with checkpoints, resume from each kind of place, and compare what comes of it.

    resuming.py exact FOLDER SPEC...   from checkpoints of a training on: the same losses, the same files
    resuming.py pairs FOLDER SPEC...   saved under each, resumed under each: the same state by name
    resuming.py stop FOLDER SPEC       stopped in the middle of an epoch, and saved
    resuming.py rest FOLDER SPEC       gone on with from there

A SPEC is such as 1-2-1:pipedream:vertical or 1-1x2:interleaved-1f1b; with "tied" two layers share a weight.
With "zero1" or "zero2" replicas shard the update, with "scatter" by a reduce-scatter. A last word may be
a precision. --muon trains matrices by Muon and the rest by AdamW instead.
The data set draws noise from all three of a process's generators, so that a lost random state shows.
"""

import os
import random
import sys
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from exactness import muon
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.directory import read_manifest
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.checkpoint.shard import read_shard
from hybridpipe.engine.rank_state import ranges, updated
from hybridpipe.planning.checks import BACKENDS, PRECISIONS
from hybridpipe.planning.schedules.generators import losses_late
from hybridpipe.stage.state import StageState, read_optimizer, under

MICROBATCH, COUNT, SEED, NUM_LAYERS = 2, 4, 7, 8
NUM_MINIBATCHES, EVERY = 9, 4  # most checkpoints lie inside an epoch; the last minibatch is short
NUM_IN_FLIGHT = 17  # for asynchronous plans, under which EVERY counts several times
LONG = 25  # so that one under way can be stopped
AT, SAVED, NUM_OF_PAIRS = 16, "step-00000016", 19  # of pairs; far enough for asynchronous plans
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
MUON = {"muon": muon}  # with --muon
OPTIONS = {
    "vertical": {"vertical_sync": True},
    "limited": {"max_in_flight": 2},
    "recompute": {"recompute": True},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "spectrain": {"prediction": "spectrain"},
    "xpipe": {"prediction": "xpipe"},
}
SCHEDULER = partial(
    torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=60, cycle_momentum="--muon" not in sys.argv
)


class Noisy(torch.utils.data.Dataset):
    """Noise on the inputs, from torch's, NumPy's and Python's generators."""

    def __init__(self, samples: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(0, 3, (samples,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int):
        drawn = torch.rand(5, dtype=torch.float64) + random.random() + np.random.rand()
        return self.inputs[i] + self.noise * drawn, self.targets[i]


def make_data(num_minibatches: int, noise: float = 0.1) -> Noisy:
    return Noisy(num_minibatches * MICROBATCH * COUNT - 2, noise)


class AsFloat32(nn.Module):
    def forward(self, x):
        return x.float()


def make_model(tied: bool = False, low: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Linear(5, 9),
        nn.BatchNorm1d(9),
        nn.Dropout(0.3),
        nn.Linear(9, 9),
        nn.Tanh(),
        nn.Linear(9, 9),
        nn.BatchNorm1d(9),
        nn.Linear(9, 3),
    ]
    if tied:
        layers[5].weight = layers[3].weight
    if low:
        layers[0] = nn.Sequential(AsFloat32(), layers[0])
    return nn.Sequential(*layers).to(torch.float32 if low else torch.float64)


def make_plan(spec: str) -> Plan:
    name, schedule, *options = spec.split(":")
    name, _, chunks = name.partition("x")
    replicas = [int(count) for count in name.split("-")] * int(chunks or 1)
    edges = [round(i * NUM_LAYERS / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(
        StageSpec(a, b, m, zero=int("scatter" in options), scatter="scatter" in options and m > 1)
        for a, b, m in zip(edges, edges[1:], replicas, strict=False)
    )
    count = 1 if schedule == "pipedream" else COUNT
    sync = next((option for option in options if option in BACKENDS), None)
    given = {name: value for option in options for name, value in OPTIONS.get(option, {}).items()}
    return Plan(stages, schedule, count, chunks=int(chunks or 1), sync=sync, **given)


def sometimes_huge(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, a million times larger for some microbatches, so that float16 overflows."""
    factor = 1.0 if int(targets.sum()) % 4 else 1e6
    return nn.functional.cross_entropy(outputs, targets) * factor


def make_trainer(spec: str, optimizer: str) -> Trainer:
    plan = make_plan(spec)
    precision = next((word for word in spec.split(":")[2:] if word in PRECISIONS), "fp32")
    return Trainer(
        make_model(tied=spec.endswith(":tied"), low=precision != "fp32"),
        loss=sometimes_huge if precision == "fp16" else nn.functional.cross_entropy,
        optimizer=(OPTIMIZERS | MUON)[optimizer],
        lr_scheduler=SCHEDULER,
        plan=plan,
        minibatch_size=MICROBATCH * COUNT,
        seed=SEED,
        precision=precision,
    )


def seed_process(rank: int) -> None:
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)


def train(trainer: Trainer, data, folder: Path | None, epochs: int, every: int | None = EVERY) -> list[float]:
    losses: list[float] = []
    checkpoint = None if folder is None else Checkpointing(folder, every, keep=99)
    trainer.fit(
        data, epochs, validation=data, on_minibatch=lambda r: losses.append(r.loss), checkpoint=checkpoint
    )
    return losses


def without_seconds(run: dict) -> dict:
    """What a manifest says of a run, but for the clock's part."""
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in run["history"]]
    past = {k: v for k, v in run["past"].items() if k != "training_seconds"}
    so_far = {k: v for k, v in run["so_far"].items() if k != "seconds"}
    return run | {"history": history, "past": past, "so_far": so_far}


def same(one: Path, other: Path) -> None:
    """Two checkpoints are equal to the bit."""
    mine, theirs = read_manifest(one), read_manifest(other)
    for a, b in zip(mine.files, theirs.files, strict=True):
        if a != b:
            differ(one / a.name, other / b.name)
    assert (mine.step, mine.epoch, mine.position) == (theirs.step, theirs.epoch, theirs.position)
    assert without_seconds(mine.run) == without_seconds(theirs.run), (mine.run, theirs.run)


def differ(one: Path, other: Path) -> None:
    (a, meta), (b, other_meta) = read_shard(one, None), read_shard(other, None)
    names = [name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name])]
    raise AssertionError(f"{one} and {other} differ in {sorted(names)}, {meta}, {other_meta}")


def exact(spec: str, optimizer: str, folder: Path) -> None:
    """Two epochs at once, and from every checkpoint on: the same losses, and the same files later on."""
    trainer = make_trainer(spec, optimizer)
    data = make_data(NUM_IN_FLIGHT if trainer.plan.is_asynchronous else NUM_MINIBATCHES)
    rank = trainer.world.rank
    seed_process(rank)
    losses = train(trainer, data, folder / "whole", epochs=2)
    assert trainer.worker.executor.num_skipped > 0 or "fp16" not in spec, "no overflow"
    trainer.close()
    trainer = make_trainer(spec, optimizer)
    seed_process(rank)
    assert train(trainer, data, None, epochs=2) == losses, "saving has changed the training"
    trainer.close()
    steps = sorted(int(path.name.removeprefix("step-")) for path in (folder / "whole").glob("step-*"))
    assert len(steps) >= 3, steps
    for step in steps[-3:-1] if len(sys.argv) > 4 else steps[:-1]:
        seed_process(99)
        trainer = make_trainer(spec, optimizer)
        rest = folder / f"from-{step}"
        told = trainer.resume(folder / "whole" / f"step-{step:08d}")
        assert trainer.step == step and len(told) == 1, told
        assert train(trainer, data, rest, epochs=2 - trainer.epoch) == losses[step:], f"from {step}"
        trainer.world.Barrier()
        if rank == 0:
            for later in steps[steps.index(step) + 1 :]:
                same(folder / "whole" / f"step-{later:08d}", rest / f"step-{later:08d}")
        trainer.close()
    if rank == 0:
        print(f"{spec} {optimizer}: exact", flush=True)


def across(specs: list[str], optimizer: str, folder: Path) -> None:
    """A training goes on under another backend as under its own: two replicas add in no other order."""
    trainer = make_trainer(specs[0], optimizer)
    data = make_data(NUM_IN_FLIGHT if trainer.plan.is_asynchronous else NUM_MINIBATCHES)
    rank = trainer.world.rank
    seed_process(rank)
    losses = train(trainer, data, folder / "whole", epochs=2)
    trainer.close()
    first = min((folder / "whole").glob("step-*"))
    for spec in specs[1:]:
        seed_process(99)
        trainer = make_trainer(spec, optimizer)
        trainer.resume(first)
        wanted = losses[trainer.step :]
        rest = train(trainer, data, None, epochs=2 - trainer.epoch)
        worst = max(abs(a - b) for a, b in zip(rest, wanted, strict=True))
        assert worst < 1e-10, (spec, worst)
        if rank == 0:
            equal = "bit for bit" if rest == wanted else "within 1e-10"
            print(f"{specs[0]} went on under {spec}: {equal}", flush=True)
        trainer.close()


def check_state(trainer: Trainer, saved: dict[str, torch.Tensor]) -> None:
    """The optimizer's state of what this rank updates is what was saved, to the bit."""
    executor = trainer.worker.executor
    parts, mine = ranges(executor), updated(executor) if executor.update.optimizer else {}
    assert executor.update.optimizer is None or executor.update.optimizer.state.keys() == mine.keys()
    for parameter, key in mine.items():
        for name, value in executor.update.optimizer.state[parameter].items():
            expected = saved[f"{key} {name}"]
            if key in parts and expected.shape:
                expected = expected.reshape(-1)[parts[key].start : parts[key].stop]
            assert torch.equal(value, expected), (key, name)


def saved_state(path: Path) -> dict[str, torch.Tensor]:
    """The optimizer's state of all parameters, as the files of a checkpoint have it, put together here."""
    pieces: dict[str, list] = {}
    for file in sorted(path.glob("*-*")):
        for key, own in read_optimizer(StageState(*read_shard(file, None)), str(file)).items():
            pieces.setdefault(key, []).append(own)
    found = {}
    shapes = {key: tensor.shape for key, tensor in make_model().state_dict().items()}
    for key, parts in pieces.items():
        parts.sort(key=lambda own: 0 if own.part is None else own.part.start)
        for name, value in parts[0].state.items():
            if value.shape and parts[0].part is not None:
                value = torch.cat([own.state[name] for own in parts]).view(shapes[key])
            found[f"{key} {name}"] = value
    return found


def pairs(specs: list[str], optimizer: str, folder: Path) -> None:
    data = make_data(NUM_OF_PAIRS, noise=0.0)
    weights, losses = {}, {}
    for spec in specs:
        trainer = make_trainer(spec, optimizer)
        losses[spec] = train(trainer, data, folder / spec, epochs=1, every=AT)
        weights[spec] = None
        trainer.close()
    for was, now in product(specs, specs):
        trainer = make_trainer(now, optimizer)
        trainer.resume(folder / was / SAVED)
        saved = saved_state(folder / was / SAVED)
        check_state(trainer, saved)
        files = sorted((folder / was / SAVED).glob("stage-*"))
        wanted = {k: t for f in files for k, t in under("model", read_shard(f, None)[0]).items()}
        state = trainer.full_state_dict()
        for key, value in (state or {}).items():
            if "running" not in key and "tracked" not in key:
                assert torch.equal(value, wanted[key]), (was, now, key)
        if weights[was] is None:
            weights[was] = state
        elif state is not None:
            assert all(torch.equal(value, weights[was][key]) for key, value in state.items()), (was, now)
        after = train(trainer, data, None, epochs=1)
        assert len(after) == NUM_OF_PAIRS - AT
        if not trainer.plan.is_asynchronous and not make_plan(was).is_asynchronous:
            worst = max(abs(a - b) for a, b in zip(after, losses[was][AT:], strict=True))
            assert worst < 1e-10, (was, now, worst)
        assert all(loss < 3 for loss in after)
        trainer.close()
    if trainer.world.rank == 0:
        print(f"{len(specs)} x {len(specs)} pairs, {optimizer}: equal by name", flush=True)


def stop(spec: str, optimizer: str, folder: Path) -> None:
    """Ends in the middle of an epoch; under an asynchronous schedule with messages under way."""
    trainer = make_trainer(spec, optimizer)
    data = make_data(LONG)
    seed_process(trainer.world.rank)

    def note(record) -> None:
        if record.step == 1:  # told by the losses of that minibatch, which come in late
            trainer.stop_from(record.step + 1 + losses_late(trainer.plan))

    asked = Checkpointing(folder / "stopped", every=100)
    trainer.fit(data, validation=data, on_minibatch=note, checkpoint=asked)
    steps = trainer.world.allgather(trainer.step)
    assert trainer.stopped and set(steps) == {steps[0]}, steps
    assert 2 <= steps[0] < LONG, steps
    print(f"stopped at {steps[0]}", flush=True)
    trainer.world.Barrier()
    os._exit(0)


def rest(spec: str, optimizer: str, folder: Path) -> None:
    """Goes on from there, and ends as a run that was never stopped."""
    data = make_data(LONG)
    trainer = make_trainer(spec, optimizer)
    seed_process(trainer.world.rank)
    losses = train(trainer, data, folder / "whole", epochs=1, every=100)
    trainer.close()
    trainer = make_trainer(spec, optimizer)
    trainer.resume(folder / "stopped")
    step = trainer.step
    assert 0 < step < LONG
    assert train(trainer, data, folder / "stopped", epochs=1, every=100) == losses[step:]
    if trainer.world.rank == 0:
        name = f"step-{LONG:08d}"
        same(folder / "whole" / name, folder / "stopped" / name)
        print("as if it had never been stopped", flush=True)
    trainer.close()


def main() -> None:
    mode, folder, *specs = (word for word in sys.argv[1:] if word != "--muon")
    names = list(MUON if "--muon" in sys.argv else OPTIMIZERS)
    if mode in ("stop", "rest"):
        {"stop": stop, "rest": rest}[mode](specs[0], "adam", Path(folder))
        return
    if mode == "exact":
        for i, spec in enumerate(specs):
            optimizer = names[i % len(names)]
            exact(spec, optimizer, Path(folder) / spec.replace(":", "-"))
        return
    {"pairs": pairs, "across": across}[mode](specs, names[-1], Path(folder))


main()
