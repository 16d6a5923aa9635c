"""Training in threads: the real executor, a thread for each rank, queues for the wire."""

import copy
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe import Plan, StageSpec
from hybridpipe.batches import slice_minibatch
from hybridpipe.planning.schedules import programs
from hybridpipe.planning.timeline import Event
from hybridpipe.runtime.boundary import Boundary
from hybridpipe.runtime.executor import Executor
from hybridpipe.runtime.inprocess import Mailboxes, QueueTransport, SharedGradients
from hybridpipe.stage.split import check_plan
from hybridpipe.stage.stage import Stage

CPU = torch.device("cpu")


class Call(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


class OnFirst(nn.Module):
    """Runs `inner` on a tuple's first tensor and passes the others on."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, value):
        first, *others = value
        return self.inner(first), *others


class Recorded(SharedGradients):
    """Keeps what the replicas agreed on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen: list[list[Tensor | None]] = []

    def finish(self) -> None:
        super().finish()
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self._parameters])


class Result(NamedTuple):
    """What a training left behind: per minibatch the loss and each parameter's gradient, and the weights."""

    losses: list[float]
    gradients: list[list[Tensor | None]]
    parameters: list[Tensor]
    events: dict[int, list[list[Event]]]


def make_plan(name: str, num_layers: int, num_microbatches: int, schedule: str = "1f1b") -> Plan:
    """From "2-1" and the like: the layers shared out evenly."""
    replicas = [int(count) for count in name.split("-")]
    edges = [round(i * num_layers / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(*each) for each in zip(edges, edges[1:], replicas, strict=False))
    return Plan(stages, schedule=schedule, num_microbatches=num_microbatches)


def one_process(
    model: nn.Sequential, minibatches: Sequence[tuple[Tensor, Tensor]], loss, optimizer
) -> Result:
    """Plain PyTorch, the whole minibatch at once."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    update = optimizer([p for p in parameters if p.requires_grad])
    losses, gradients = [], []
    for inputs, targets in minibatches:
        value = loss(model(inputs), targets)
        value.backward()
        losses.append(value.item())
        gradients.append([None if p.grad is None else p.grad.clone() for p in parameters])
        update.step()
        update.zero_grad()
    return Result(losses, gradients, parameters, {})


def in_threads(
    plan: Plan,
    model: nn.Sequential,
    minibatches: Sequence[tuple[Tensor, Tensor]],
    microbatch_size: int,
    loss,
    optimizer,
    timeout_seconds: float = 5.0,
) -> Result:
    """The same under a plan. Every rank has a model of its own. Raises what the first failing rank raised."""
    check_plan(model, plan)
    mailboxes = Mailboxes()
    stages: dict[int, list[Stage]] = {}  # by stage, a Stage for each replica
    for s, spec in enumerate(plan.stages):
        last = s == plan.num_stages - 1
        stages[s] = [
            Stage(
                list(copy.deepcopy(model))[spec.start : spec.stop],
                spec.start,
                CPU,
                loss=loss if last else None,
            )
            for _ in spec.ranks
        ]
    executors, barriers = {}, []
    for s, replicas in stages.items():
        parameters = [list(stage.module.parameters()) for stage in replicas]
        barriers.append(threading.Barrier(len(replicas), timeout=timeout_seconds))
        for r, (stage, rank) in enumerate(zip(replicas, plan.stages[s].ranks, strict=True)):
            trained = [p for p in parameters[r] if p.requires_grad]
            executors[rank] = Executor(
                stage,
                s,
                Boundary(plan, s, QueueTransport(mailboxes, rank, timeout_seconds), CPU),
                Recorded(parameters[r], r, parameters, barriers[-1]),
                optimizer(trained) if trained else None,
            )

    shares: list[dict[int, float]] = [{} for _ in minibatches]
    events: dict[int, list[list[Event]]] = {rank: [] for rank in plan.ranks}
    errors: list[Exception] = []

    def train(rank: int) -> None:
        try:
            for step, (inputs, targets) in enumerate(minibatches):
                minibatch = slice_minibatch(inputs, targets, microbatch_size)
                program = programs(plan, len(minibatch.sizes))[rank]
                losses, noted = executors[rank].run(program, minibatch, step)
                shares[step].update(losses)
                events[rank].append(noted)
        except Exception as error:
            errors.append(error)
            for barrier in barriers:
                barrier.abort()

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

    for replicas in stages.values():
        for others in replicas[1:]:
            for mine, theirs in zip(replicas[0].module.parameters(), others.module.parameters(), strict=True):
                assert torch.equal(mine, theirs), "replicas differ"
        assert all(stage.num_stashed == 0 for stage in replicas)
    first = [executors[spec.ranks[0]] for spec in plan.stages]
    return Result(
        [sum(part[m] for m in sorted(part)) for part in shares],
        [list(chain(*(executor.gradients.seen[i] for executor in first))) for i in range(len(minibatches))],
        [parameter for executor in first for parameter in executor.stage.module.parameters()],
        events,
    )


def assert_same(result: Result, expected: Result, within: float = 1e-12) -> None:
    """Losses, gradients and parameters, to rounding."""
    torch.testing.assert_close(result.losses, expected.losses, rtol=0, atol=within)
    for seen, wanted in zip(result.gradients, expected.gradients, strict=True):
        for gradient, reference in zip(seen, wanted, strict=True):
            if reference is None or gradient is None:
                assert gradient is reference
            else:
                torch.testing.assert_close(gradient, reference, rtol=0, atol=within)
    torch.testing.assert_close(result.parameters, expected.parameters, rtol=0, atol=within)
