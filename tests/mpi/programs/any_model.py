"""Under mpirun: models of any class train what the user's own forward does in one process.

Every rank compares after every minibatch the loss and what it holds: parameters, whose differences are
gradients, and buffers. Then evaluation and the whole state. Usage: any_model.py NUMBERS MODEL..., where a
model is "everything", "unshared", "forces" or one of zoo.py, and the numbers, such as 0,2,4, are of KINDS.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.model.layers import layers_of
from hybridpipe.model.recorded import RecordedModel
from hybridpipe.planning.schedules.registry import ASYNCHRONOUS
from tests import zoo
from tests.model import everything
from tests.model.asynchronous_process import AsynchronousProcess
from tests.model.one_process import OneProcess, count, take
from tests.model.recording.models import Forces

RATE, WORLD = 0.1, MPI.COMM_WORLD


class Kind(NamedTuple):
    """A plan by name, with "x2" for two stages a rank, and its schedule."""

    plan: str
    schedule: str
    recompute: bool = False
    vertical_sync: bool = False

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a full minibatch."""
        return {"pipedream": 1, "pipedream-2bw": 2}.get(self.schedule, 3)


KINDS = [
    Kind("1-1-1", "1f1b"),
    Kind("2-1", "zero-bubble", recompute=True),
    Kind("1-1x2", "interleaved-1f1b"),
    Kind("2", "gpipe"),
    Kind("1-2-1", "1f1b", recompute=True),
    Kind("1-1", "zero-bubble"),
    Kind("2-1", "gpipe"),
    Kind("1-1", "1f1b"),
    Kind("1-1-1", "pipedream"),
    Kind("2-1", "pipedream", recompute=True),
    Kind("1-2", "pipedream", vertical_sync=True),
    Kind("1-1", "pipedream-2bw"),
    Kind("1-1x2", "zb-v"),
    Kind("2-2x2", "v-half", recompute=True),
    Kind("1-1-1x2", "v-min"),
    Kind("1-1-1-1x2", "zb-v"),
]


class Subject(NamedTuple):
    """A model to train."""

    name: str
    model: nn.Module
    loss: Any
    minibatches: list[tuple[Any, Any, int]]
    tolerance: float = 1e-10

    @property
    def microbatch(self) -> Any:
        """The first microbatch's inputs."""
        inputs, _, size = self.minibatches[0]
        return take(inputs, 0, size)

    @property
    def num_samples(self) -> int:
        """Samples of the first minibatch."""
        return count(self.minibatches[0][1])


def subject(name: str) -> Subject:
    torch.manual_seed(0)
    if name in ("everything", "unshared"):
        batches = [
            (*everything.batch(size, length, seed=length), 3) for size, length in ((8, 6), (5, 9), (1, 4))
        ]
        return Subject(name, everything.Everything(name == "everything").double(), everything.loss, batches)
    if name == "forces":
        batches = [(torch.randn(size, 20).double(), torch.randint(5, (size,)), 3) for size in (8, 5, 1)]
        return Subject(name, Forces().double(), nn.functional.cross_entropy, batches)
    case = zoo.case_of(name)
    batches = [(inputs, targets, 3) for inputs, targets, _ in zoo.minibatches(name)]
    return Subject(name, case.model, case.loss, batches, zoo.tolerance(name))


def plan_of(kind: Kind, layers: RecordedModel) -> Plan:
    """Return a plan of stages of about equally many layers, which the model allows."""
    name, _, chunks = kind.plan.partition("x")
    replicas = [int(each) for each in name.split("-")] * int(chunks or 1)
    edges = [round(i * layers.num_layers / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas))
    options = {"recompute": kind.recompute, "vertical_sync": kind.vertical_sync}
    return Plan(stages, kind.schedule, kind.num_microbatches, chunks=int(chunks or 1), **options)


def trainer_of(given: Subject, plan: Plan, minibatch_size: int) -> Trainer:
    return Trainer(
        subject(given.name).model,
        loss=given.loss,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        plan=plan,
        minibatch_size=minibatch_size,
    )


def replicas_of(layers: RecordedModel, plan: Plan) -> dict[str, int]:
    return {name: plan.stages[stages[0]].replicas for name, stages in layers.holders(plan).items()}


def difference(trainer: Trainer, expected: dict[str, Any], buffers: dict[str, list[Any]]) -> float:
    """Return the largest difference between what this rank holds and one process."""
    place, worst = trainer.worker.place, 0.0
    if place is None:
        return worst
    for stage in trainer.worker.executor.stages:
        held = dict(stage.layers.tensors())
        held |= {stage.layers.key(path): buffer for path, buffer in stage.module.named_buffers()}
        for name, tensor in held.items():
            copies = buffers.get(name)
            wanted = copies[place.replica % len(copies)] if copies else expected[name]
            assert tensor.shape == wanted.shape, (name, tensor.shape, wanted.shape)
            gap = (tensor.detach().double() - wanted.double()).abs().max().item() if tensor.numel() else 0.0
            assert gap == gap, name
            worst = max(worst, gap)
    return worst


def synchronous(given: Subject, layers: RecordedModel, kind: Kind) -> None:
    plan = plan_of(kind, layers)
    process = OneProcess(given.model, layers.record.opened, given.loss, RATE, 0, replicas_of(layers, plan))
    trainer, worst = trainer_of(given, plan, given.num_samples), 0.0
    for step, (inputs, targets, size) in enumerate(given.minibatches):
        loss = trainer.train_step(inputs, targets)
        expected, told = None, 0.0
        if WORLD.rank == 0:
            told = process.step(step, inputs, targets, size)
            expected = process.parameters(), process.buffers
        expected, told = WORLD.bcast((expected, told))
        gap = max(WORLD.allgather(difference(trainer, *expected)))
        worst = max(worst, gap / RATE, abs(loss - told))
        assert worst <= given.tolerance, (
            f"{given.name} {kind} minibatch {step}: {worst}, loss {loss} for {told}"
        )
    finish(given, kind, trainer, process, worst)


def finish(given: Subject, kind: Kind, trainer: Trainer, process: Any, worst: float) -> None:
    """Compare the whole state and an evaluation, and tell."""
    state = trainer.full_state_dict()
    inputs, targets, size = given.minibatches[0]
    found = trainer.evaluate(samples_of(inputs, targets))["loss"]
    own = [name for name, held in process.buffers.items() if len(held) > 1 and "norm" not in name]
    if state is not None:
        assert list(state) == list(process.model.state_dict()), "the keys are the model's own"
        gaps = [(state[name] - tensor).abs().max().item() for name, tensor in process.parameters().items()]
        worst = max(worst, *gaps)
        assert worst <= given.tolerance, f"{given.name} {kind}: whole state {worst}"
        process.model.load_state_dict(state)
        for name, buffer in process.model.named_buffers():
            if name not in state:
                buffer.copy_(process.buffers[name][0])
        process.buffers = {name: [buffer.clone()] for name, buffer in process.model.named_buffers()}
        # replicas average the statistics of BatchNorm only, and use any other buffer of their own
        gap = 0.0 if own else abs(found - process.evaluate([(inputs, targets, size)]))
        assert gap <= given.tolerance, f"{given.name} {kind}: evaluation {gap}"
        print(f"{given.name} {kind.plan} {kind.schedule}: within {max(worst, gap):.1e}", flush=True)
    trainer.close()


def samples_of(inputs: Any, targets: Any) -> list[Any]:
    """Return the samples of a minibatch."""
    whole = [take((inputs, targets), i, i + 1) for i in range(count(targets))]
    return [torch.utils._pytree.tree_map(lambda leaf: leaf[0], each) for each in whole]


def asynchronous(given: Subject, layers: RecordedModel, kind: Kind) -> None:
    inputs, targets, size = given.minibatches[0]
    plan = plan_of(kind, layers)
    minibatch_size, samples = size * kind.num_microbatches, samples_of(inputs, targets) * 5
    if given.name in zoo.STATISTICS:
        samples.pop()  # else the last microbatch has one sample
    replicas = replicas_of(layers, plan)
    process = AsynchronousProcess(given.model, layers, given.loss, RATE, plan, replicas)
    trainer = trainer_of(given, plan, minibatch_size)
    losses: list[float] = []
    trainer.fit(samples, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
    expected = told = None
    if WORLD.rank == 0:
        batches = [samples[i : i + minibatch_size] for i in range(0, len(samples), minibatch_size)]
        told = process.train([torch.utils.data.default_collate(each) for each in batches], size)
        expected = process.parameters(), process.buffers
    expected, told = WORLD.bcast((expected, told))
    worst = max(abs(a - b) for a, b in zip(losses, told, strict=True))
    worst = max(worst, *WORLD.allgather(difference(trainer, *expected) / RATE))
    assert worst <= given.tolerance, f"{given.name} {kind}: {worst}, losses {losses} for {told}"
    finish(given, kind, trainer, process, worst)


def shares(layers: RecordedModel, plan: Plan) -> bool:
    """Return True if stages share a parameter."""
    parameters = dict(layers.model.named_parameters())
    return any(len(stages) > 1 for name, stages in layers.holders(plan).items() if name in parameters)


def refused(given: Subject, layers: RecordedModel, kind: Kind) -> None:
    """Check that a plan whose stages share parameters is refused before anything is trained."""
    trainer = trainer_of(given, plan_of(kind, layers), given.num_samples)
    try:
        trainer.fit(samples_of(*given.minibatches[0][:2]))
    except ValueError as error:
        assert "which the stages would update at different times" in str(error), error
        assert "\n" not in str(error) and trainer.step == 0
        told = WORLD.allgather(str(error))
        assert told == [told[0]] * WORLD.size, told
        if WORLD.rank == 0:
            print(f"{given.name} {kind.plan} {kind.schedule}: refused: {error}", flush=True)
    else:
        raise AssertionError(f"{given.name} {kind}: parameters that stages share are updated apart")
    trainer.close()


def main() -> None:
    torch.set_num_threads(1)
    numbers, *names = sys.argv[1:]
    for name in names:
        given = subject(name)
        layers = layers_of(given.model, given.microbatch)
        assert isinstance(layers, RecordedModel), layers.path
        for number in map(int, numbers.split(",")):
            kind = KINDS[number]
            if kind.schedule not in ASYNCHRONOUS:
                synchronous(given, layers, kind)
            elif shares(layers, plan_of(kind, layers)):
                refused(given, layers, kind)
            else:
                asynchronous(given, layers, kind)


main()
