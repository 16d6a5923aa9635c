"""Under mpirun: train two groups under each plan and compare them, and their centre, with one process.

The one process is the few lines of `Reference`: each group's microbatches in order, its own optimizer, and
the rules as the papers write them (EASGD, equations 5 and 6; DiLoCo, algorithm 1; Streaming DiLoCo, equation
3), in float64. Usage: groups.py PLAN... with plans such as 1, 2, 1-1, 2-1 or, with sharded updates, 2:2.
--resume FOLDER: saves in the middle of an interval, resumes, and compares bit for bit instead.
--changed FOLDER: resumes with other numbers of groups. --predicted: prints what they add to predicted
memory. --refused: trains nothing.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Checkpointing, GroupOptions, Plan, StageSpec, Trainer
from hybridpipe.callbacks import EMA
from hybridpipe.checkpoint.saved_model import SavedModel, find_checkpoint
from hybridpipe.comm.mpi import MPI
from hybridpipe.engine.rank_state import parameters
from hybridpipe.errors import UserError

COUNT, MINIBATCH, MICROBATCH, SAMPLES, EPOCHS, CUT = 2, 12, 3, 50, 3, 3
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}
RULES = (
    {"every": 1, "rule": "average"},
    {"every": 4, "rule": "average"},
    {"every": 1, "rule": "elastic"},
    {"every": 3, "rule": "elastic", "moving_rate": 0.3},
    {"every": 4, "rule": "diloco"},
    {"every": 4, "rule": "diloco", "fragments": 2, "outer_lr": 0.5},
    {"every": 5, "rule": "diloco", "fragments": 2, "delay": 2, "mixing": 0.25},
)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(7, 3)).double()


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


def make_plan(name: str) -> Plan:
    counts, _, zero = name.partition(":")
    replicas = [int(count) for count in counts.split("-")]
    edges = [0, 7] if len(replicas) == 1 else [0, CUT, 7]
    spans = zip(edges[:-1], edges[1:], replicas, strict=True)
    stages = tuple(StageSpec(a, b, m, zero=int(zero or 0) if m > 1 else 0) for a, b, m in spans)
    groups = MPI.COMM_WORLD.size // sum(replicas)
    return Plan(stages, num_microbatches=MINIBATCH // groups // MICROBATCH)


class Reference:
    """COUNT models that are trained one after the other; `exchange` lets them come together."""

    def __init__(self, options: GroupOptions, optimizer, num_stages: int) -> None:
        self.options = options
        self.models = [make_model() for _ in range(COUNT)]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.centre = {name: p.detach().clone() for name, p in make_model().named_parameters()}
        self.velocity = {name: torch.zeros_like(p) for name, p in self.centre.items()}
        self.means: dict[str, torch.Tensor] = {}  # of groups' weights, under way
        stages = [list(self.centre)]
        if num_stages == 2:
            before = [name for name in self.centre if int(name[0]) < CUT]
            stages = [before, [name for name in self.centre if name not in before]]
        numbers = range(options.fragments)
        self.fragments = [self.fragment(stage, number) for stage in stages for number in numbers]

    def fragment(self, names: list[str], number: int) -> tuple[int, list[str]]:
        """Return a fragment's first update, and the parameters of a stage that begin in its part."""
        ends = torch.tensor([self.centre[name].numel() for name in names]).cumsum(0)
        count = self.options.fragments
        parts = [count * start / int(ends[-1]) for start in [0, *ends[:-1].tolist()]]
        inside = [name for name, at in zip(names, parts, strict=True) if number <= at < number + 1]
        return number * self.options.every // count, inside

    def train(self, inputs, targets, step: int) -> float:
        share, total = len(inputs) // COUNT, 0.0
        for j, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            x, y = (each[j * share : (j + 1) * share] for each in (inputs, targets))
            for first in range(0, share, MICROBATCH):
                part = slice(first, first + MICROBATCH)
                loss = nn.functional.cross_entropy(model(x[part]), y[part]) * len(y[part]) / share
                loss.backward()
                total += loss.item() / COUNT
            optimizer.step()
            optimizer.zero_grad()
        for begin, names in self.fragments:
            if step >= max(1, begin) and (step - begin) % self.options.every == 0:
                self.send(names)
            at = step - begin - self.options.delay
            if step - self.options.delay >= max(1, begin) and at % self.options.every == 0:
                self.receive(names)
        return total

    @torch.no_grad()
    def send(self, names) -> None:
        for name in names:
            self.means[name] = sum(dict(m.named_parameters())[name] for m in self.models) / COUNT

    @torch.no_grad()
    def receive(self, names) -> None:
        options = self.options
        for name in names:
            own, centre = [dict(m.named_parameters())[name] for m in self.models], self.centre[name]
            if options.rule == "average":
                centre.copy_(self.means[name])
                for x in own:
                    x.copy_(centre)
            elif options.rule == "elastic":
                rate = 0.9 / COUNT if options.moving_rate is None else options.moving_rate
                moved = centre + rate * sum(x - centre for x in own)
                for x in own:
                    x.copy_(x - rate * (x - centre))
                centre.copy_(moved)
            else:
                gradient, velocity = centre - self.means[name], self.velocity[name]
                velocity.copy_(options.outer_momentum * velocity + gradient)
                centre -= options.outer_lr * (gradient + options.outer_momentum * velocity)
                mixing = options.mixing if options.delay else 0.0
                for x in own:
                    x.copy_(mixing * x + (1 - mixing) * centre)


def make_trainer(plan: Plan, optimizer, options: GroupOptions, **more) -> Trainer:
    given = {"minibatch_size": MINIBATCH, "sync": "mpi", "verbose": False} | more
    loss = nn.functional.cross_entropy
    return Trainer(make_model(), loss=loss, optimizer=optimizer, plan=plan, groups=options, **given)


def own_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {key: p.detach().clone() for p, key in parameters(trainer.worker.executor).items()}


def compare(name: str, kind: str, rule: dict) -> None:
    plan, options = make_plan(name), GroupOptions(count=COUNT, **rule)
    reference, data = Reference(options, OPTIMIZERS[kind], plan.num_stages), make_data()
    trainer = make_trainer(plan, OPTIMIZERS[kind], options)
    losses, wanted, step = [], [], 0
    trainer.fit(data, EPOCHS, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, MINIBATCH):
            step += 1
            wanted.append(reference.train(*data[start : start + MINIBATCH], step))
    model = make_model()
    model.load_state_dict(reference.centre)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(data[:][0]), data[:][1]))
    own, state = reference.models[trainer.group.index].state_dict(), trainer.full_state_dict() or {}
    apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    apart += [abs(trainer.evaluate(data)["loss"] - loss)]
    apart += [float((p - own[key]).abs().max()) for key, p in own_weights(trainer).items()]
    apart += [float((tensor - reference.centre[key]).abs().max()) for key, tensor in state.items()]
    furthest = max(trainer.world.allgather(max(apart)))
    if trainer.world.rank == 0:
        print(f"{name} {kind} {' '.join(map(str, rule.values()))}: {furthest:.1e}", flush=True)
    assert furthest < 1e-12
    trainer.close()


def resume(name: str, kind: str, rule: dict, folder: str) -> None:
    """Interrupt after 2 minibatches of an epoch, in the middle of an interval, and go on."""
    plan, options, data, steps = make_plan(name), GroupOptions(count=COUNT, **rule), make_data(), 12
    make = partial(make_trainer, plan, OPTIMIZERS[kind], options)
    whole = make()
    whole.fit(data, max_steps=steps)
    weights, centre = own_weights(whole), whole.full_state_dict()
    whole.close()
    for stop in (7, steps):
        part = make()
        part.fit(data, max_steps=stop, checkpoint=Checkpointing(folder), resume="auto")
        if stop == steps:
            mine, state = own_weights(part), part.full_state_dict()
            assert all(torch.equal(mine[key], weights[key]) for key in weights)
            assert state is None or all(torch.equal(state[key], centre[key]) for key in centre)
        part.close()
    if whole.world.rank == 0:
        print(f"{name} {kind} {' '.join(map(str, rule.values()))}: resumed bit for bit", flush=True)


def changed(folder: str, steps: int) -> None:
    """Resume two groups' training without groups, and that with groups again; train to the end of epoch 2."""
    options, sgd, data = GroupOptions(count=COUNT, every=2, rule="elastic"), OPTIMIZERS["sgd"], make_data()
    two = make_trainer(make_plan("1-1"), sgd, options)
    two.fit(data, max_steps=steps, checkpoint=Checkpointing(folder))
    state = two.full_state_dict()
    two.close()
    for groups in (GroupOptions(), options):
        other = make_trainer(make_plan("2-2" if groups.count == 1 else "1-1"), sgd, groups)
        try:
            other.resume(folder)
        except UserError as error:
            told = str(error)
        else:
            told = ""
        assert ("--resume-changed" in told) == (groups.count == 1), told
        if groups.count == 1:
            other.resume(folder, allow_changed=True)
        found = other.full_state_dict()
        assert found is None or all(torch.equal(found[key], state[key]) for key in state)
        other.fit(data, 1)
        assert (other.epoch, other.step) == (2, 10), (other.epoch, other.step)
        other.close()
    if two.world.rank == 0:
        saved = SavedModel(find_checkpoint(Path(folder))[0])
        assert all(torch.equal(saved.read(key), state[key]) for key in state)
        print(f"resumed with the centre after {steps}; {told or 'as before'}", flush=True)


def predicted() -> None:
    """Print by rule what is added to the predicted memory of the first stage, in units of its weights."""
    rank, peaks = MPI.COMM_WORLD.rank, {}
    alone = {"world": MPI.COMM_WORLD.Split(rank // 2), "minibatch_size": MINIBATCH // COUNT}
    for rule in ("none", "average", "diloco"):
        options = GroupOptions(rule=rule, count=COUNT) if rule != "none" else GroupOptions()
        given = alone if rule == "none" else {}
        trainer = make_trainer(make_plan("1-1"), OPTIMIZERS["adamw"], options, predict=True, **given)
        trainer.prepare(make_data())
        weights = sum(p.nbytes for p in own_weights(trainer).values())
        if rank == 0:  # what profile.json has is the optimizer's alone
            assert 1.9 < trainer.choice.profile.state_factor < 2.5, trainer.choice.profile.state_factor
        peaks[rule] = trainer.plan.predicted.peak_memory_bytes[0]
        trainer.close()
    if rank == 0:
        print({rule: (peak - peaks["none"]) / weights for rule, peak in peaks.items()}, flush=True)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(make_data())


def refused() -> None:
    """Print what is refused, each before anything is trained."""
    two, data, half = GroupOptions(count=COUNT), make_data(), make_plan("1-1")
    asynchronous = replace(half, schedule="pipedream", num_microbatches=1)
    ways = {
        "ranks": lambda: make_trainer(half, OPTIMIZERS["sgd"], GroupOptions(count=3)),
        "minibatch": lambda: make_trainer(half, OPTIMIZERS["sgd"], two, minibatch_size=13),
        "schedule": lambda: make_trainer(asynchronous, OPTIMIZERS["sgd"], two),
        "iterable": lambda: make_trainer(half, OPTIMIZERS["sgd"], two).fit(Endless()),
        "EMA": lambda: make_trainer(half, OPTIMIZERS["sgd"], two, callbacks=[EMA()]).fit(data),
        "train_step": lambda: make_trainer(half, OPTIMIZERS["sgd"], two).train_step(*data[:11]),
    }
    for name, way in ways.items():
        try:
            way()
        except UserError as error:
            if MPI.COMM_WORLD.rank == 0:
                print(f"{name}: {error}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    if "--refused" in words:
        refused()
    if "--predicted" in words:
        predicted()
    if "--changed" in words:
        for steps in (5, 7):  # at the end of an epoch, and within one
            changed(f"{words[words.index('--changed') + 1]}/{steps}", steps)
    folder = words[words.index("--resume") + 1] if "--resume" in words else None
    plans = [word for word in words if word[0].isdecimal()]
    for number, (plan, kind, rule) in enumerate((p, k, r) for p in plans for k in OPTIMIZERS for r in RULES):
        if ":" in plan and "fragments" in rule:
            continue  # replicas that shard updates have fragments of their own shares
        if folder is None:
            compare(plan, kind, rule)
        else:
            resume(plan, kind, rule, f"{folder}/{number}")
