"""Training in threads: the real executor, a thread for each rank, queues for the wire."""

import copy
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe import Plan, StageSpec
from hybridpipe.comm.courier import courier_of
from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.data.stream import Stream, slice_minibatch
from hybridpipe.device import Lanes
from hybridpipe.engine.executor import Executor, RankParts
from hybridpipe.engine.loss_weights import LossWeights
from hybridpipe.model.precision import Precision
from hybridpipe.model.sequential import check_plan, stage_module
from hybridpipe.optim.loss_scale import DYNAMIC, LossScale, LossScales
from hybridpipe.optim.nonfinite import NonfiniteCheck
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.plan import Place
from hybridpipe.planning.schedules.generators import overflows_late, programs
from hybridpipe.planning.schedules.instructions import RankProgram, without_update
from hybridpipe.planning.timeline import TimedEvent
from hybridpipe.stage.losses import LossSum
from hybridpipe.stage.stage import Stage
from tests.engine.inprocess import Mailboxes, QueueTransport, SharedSync
from tests.late_cuda import LateLanes

CPU = torch.device("cpu")
Way = Literal["staged", "direct", "ipc"]


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


class Recorded(SharedSync):
    """Records the summed gradients of each update."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen: list[list[Tensor | None]] = []

    def finish(self, completes: bool = True) -> None:
        super().finish(completes)
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self._parameters])


class StageSum:
    """Sums a number over the stages of ranks that are threads."""

    def __init__(self, barrier: threading.Barrier):
        self.barrier, self.numbers = barrier, {}

    def at(self, place: Place) -> Callable[[float], float]:
        """Return the function of the rank at `place`; replicas pass the same number."""

        def add_up(number: float) -> float:
            self.numbers[place] = number
            self.barrier.wait()
            total = sum(self.numbers[each] for each in sorted(self.numbers) if each.replica == 0)
            self.barrier.wait()
            return total

        return add_up


class ArraySum:
    """Sums arrays of all ranks, which are threads."""

    def __init__(self, barrier: threading.Barrier):
        self.barrier, self.arrays = barrier, {}

    def at(self, rank: int) -> Callable[[np.ndarray], np.ndarray]:
        """Return the function of a rank."""

        def add_up(numbers: np.ndarray) -> np.ndarray:
            self.arrays[rank] = numbers
            self.barrier.wait()
            total = np.sum(list(self.arrays.values()), axis=0)
            self.barrier.wait()
            return total

        return add_up


class Skips:
    """The minibatches whose update some rank has skipped, where ranks are threads."""

    def __init__(self, num_ranks: int, timeout_seconds: float):
        self.num_ranks, self.timeout_seconds = num_ranks, timeout_seconds
        self.changed, self.told, self.skipped = threading.Condition(), Counter[int](), set[int]()

    def tell(self, minibatch: int, skipped: bool) -> Callable[[], bool]:
        """Note a rank's update with a minibatch; return a function that says whether any rank has skipped."""
        with self.changed:
            self.told[minibatch] += 1
            self.skipped |= {minibatch} if skipped else set()
            self.changed.notify_all()
        return partial(self.any_rank, minibatch)

    def any_rank(self, minibatch: int) -> bool:
        with self.changed:
            all_told = lambda: self.told[minibatch] == self.num_ranks  # noqa: E731
            assert self.changed.wait_for(all_told, self.timeout_seconds), f"{minibatch}: a rank waits for us"
            return minibatch in self.skipped


class Result(NamedTuple):
    """The results of a training: loss and gradients of each minibatch, and the weights at the end."""

    losses: list[float]
    gradients: list[list[Tensor | None]]
    parameters: list[Tensor]
    events: dict[int, list[list[TimedEvent]]]
    executors: dict[int, Executor]


def make_plan(
    name: str, num_layers: int, num_microbatches: int, schedule: str = "1f1b", **options: Any
) -> Plan:
    """Make a plan from a name such as "2-1", with the layers divided evenly among the stages."""
    replicas = [int(count) for count in name.split("-")] * options.get("chunks", 1)
    edges = [round(i * num_layers / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(*each) for each in zip(edges, edges[1:], replicas, strict=False))
    return Plan(stages, schedule=schedule, num_microbatches=num_microbatches, **options)


def one_process(
    model: nn.Sequential,
    minibatches: Sequence[tuple[Tensor, Tensor]],
    loss,
    optimizer,
    lr_scheduler=None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
) -> Result:
    """Train in plain PyTorch on whole minibatches, with an update after every `accumulate` of them."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    update = optimizer([p for p in parameters if p.requires_grad])
    scheduler = None if lr_scheduler is None else lr_scheduler(update)
    losses, gradients = [], []
    for i, (inputs, targets) in enumerate(minibatches):
        value = loss(model(inputs), targets)
        value.backward()
        losses.append(value.item())
        if (i + 1) % accumulate:
            continue
        gradients.append([None if p.grad is None else p.grad.clone() for p in parameters])
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        update.step()
        update.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return Result(losses, gradients, parameters, {}, {})


def make_executors(
    plan: Plan,
    model: nn.Sequential,
    loss,
    rule: UpdateRule,
    timeout_seconds: float = 5.0,
    lanes: dict[int, Lanes] | None = None,
    way: Way = "staged",
    scale: LossScale = DYNAMIC,
) -> tuple[dict[int, Executor], list[threading.Barrier]]:
    """Return each rank's executor, with a model of its own, and the barriers where ranks wait."""
    check_plan(model, plan)
    mailboxes = Mailboxes()
    executors: dict[int, Executor] = {}
    barriers = [threading.Barrier(plan.num_ranks, timeout=timeout_seconds)]
    precision = rule.arithmetic
    stage_sum, array_sum = StageSum(barriers[0]), ArraySum(barriers[0])
    for group, spec in enumerate(plan.stages[: plan.num_groups]):
        held = plan.held_stages(Place(group, 0))
        stages = [[_stage(plan, model, s, loss, precision) for s in held] for _ in spec.ranks]
        parameters = [[p for stage in each for p in stage.module.parameters()] for each in stages]
        barriers.append(threading.Barrier(spec.replicas, timeout=timeout_seconds))
        for r, rank in enumerate(spec.ranks):
            own = Lanes(CPU) if lanes is None else lanes[rank]
            others = set(plan.ranks) - {rank} if way == "ipc" else ()
            transport = QueueTransport(mailboxes, rank, timeout_seconds)
            courier = courier_of(transport, own, way == "direct", others)
            place, trained = Place(group, r), [p for p in parameters[r] if p.requires_grad]
            parts = RankParts(
                plan=plan,
                place=place,
                lanes=own,
                update=rule.build(trained, plan, group, stage_sum.at(place)),
                stages=stages[r],
                p2p=[PointToPoint(plan, s, courier, precision) for s in held],
                sync=Recorded(parameters[r], r, parameters, barriers[-1]),
                check=NonfiniteCheck("stop", plan, place, stages[r], int),
                loss_weights=LossWeights(plan, array_sum.at(rank)),
                scales=LossScales(scale, overflows_late(plan)) if rule.scales_in_flight(plan) else None,
            )
            executors[rank] = Executor(parts)
    return executors, barriers


def each_in_a_thread(plan: Plan, work: Callable[[int], None], barriers: Sequence[threading.Barrier]) -> None:
    """Call `work(rank)` in a thread for each rank, and raise the error that processes would report first."""
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            time.sleep(getattr(error, "stagger_seconds", 0.0))  # processes also wait before they report
            errors.append(error)
            for barrier in barriers:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def in_threads(
    plan: Plan,
    model: nn.Sequential,
    minibatches: Sequence[tuple[Tensor, Tensor]],
    microbatch_size: int,
    loss,
    optimizer=None,
    timeout_seconds: float = 5.0,
    rule: UpdateRule | None = None,
    accumulate: int = 1,
    lanes: dict[int, Lanes] | None = None,
    way: Way = "staged",
    scale: LossScale = DYNAMIC,
) -> Result:
    """Train under a plan, with a thread for each rank, and raise the first failing rank's error.

    Args:
        lanes: of each rank; by default those of a CPU.
        way: of messages between devices that are no CPUs.
    """
    lanes, rule = lanes or {rank: Lanes(CPU) for rank in plan.ranks}, rule or UpdateRule(optimizer)
    made = plan, model, loss, rule, timeout_seconds, lanes, way, scale
    executors, barriers = make_executors(*made)
    skips = Skips(plan.num_ranks, timeout_seconds)
    cut = [slice_minibatch(*minibatch, microbatch_size) for minibatch in minibatches]
    streams = [Stream(cut, 0)] if plan.is_asynchronous else [Stream([m], i) for i, m in enumerate(cut)]
    found: list[dict[int, LossSum]] = [{} for _ in minibatches]
    events: dict[int, list[list[TimedEvent]]] = {rank: [] for rank in plan.ranks}

    def train(rank: int) -> None:
        with lanes[rank].cuda if isinstance(lanes[rank], LateLanes) else nullcontext():
            train_in_it(rank)

    def train_in_it(rank: int) -> None:
        updated, scales = itertools.count(), executors[rank].scales
        for i, stream in enumerate(streams):
            program = programs(plan, len(stream.sizes))[rank]
            if (i + 1) % accumulate:
                program = without_update(program)
            for done in executors[rank].run(RankProgram(program), stream):
                for m, loss in done.losses.items():
                    found[stream[m].step][stream[m].microbatch] = loss
                events[rank].append(done.events)
                if scales is not None:
                    scales.note(
                        [skips.tell(next(updated), done.skipped) for _ in range(done.num_minibatches)]
                    )

    each_in_a_thread(plan, train, barriers)
    first = _first_replicas(plan, executors)
    held = [pair for each in first for pair in zip(each.held, each.stages, strict=True)]
    in_order = sorted(held, key=lambda pair: pair[0])
    seen = [] if plan.is_asynchronous or plan.chunks > 1 else range(len(minibatches) // accumulate)
    return Result(
        [LossSum(*map(sum, zip(*(part[m] for m in sorted(part)), strict=True))).mean for part in found],
        [list(chain(*(each.sync.seen[i] for each in first))) for i in seen],
        [parameter for _, stage in in_order for parameter in stage.module.parameters()],
        events,
        executors,
    )


def _first_replicas(plan: Plan, executors: dict[int, Executor]) -> list[Executor]:
    """Return each stage's first replica; assert that the others are equal and all stashes empty."""
    first = []
    for spec in plan.stages[: plan.num_groups]:
        replicas = [executors[rank] for rank in spec.ranks]
        for others in replicas[1:]:
            for mine, theirs in zip(_parameters(replicas[0]), _parameters(others), strict=True):
                assert torch.equal(mine, theirs), "replicas differ"
        assert all(stage.num_stashed == 0 for each in replicas for stage in each.stages)
        first.append(replicas[0])
    return first


def _stage(plan: Plan, model: nn.Sequential, s: int, loss, precision: Precision) -> Stage:
    spec = plan.stages[s]
    return Stage(
        stage_module(copy.deepcopy(model), spec.start, spec.stop, precision),
        CPU,
        loss=loss if s == plan.num_stages - 1 else None,
        split_backward=plan.traits.splits_backward,
        recompute=plan.recomputes(s),
        batches_wgrad=plan.traits.batches_wgrad,
    )


def _parameters(executor: Executor) -> list[Tensor]:
    return [parameter for stage in executor.stages for parameter in stage.module.parameters()]


def assert_same(result: Result, expected: Result, within: float = 1e-12) -> None:
    """Assert that losses, gradients and parameters are equal up to rounding."""
    torch.testing.assert_close(result.losses, expected.losses, rtol=0, atol=within)
    for seen, wanted in zip(result.gradients, expected.gradients, strict=False):
        for gradient, reference in zip(seen, wanted, strict=True):
            if reference is None or gradient is None:
                assert gradient is reference
            else:
                torch.testing.assert_close(gradient, reference, rtol=0, atol=within)
    torch.testing.assert_close(result.parameters, expected.parameters, rtol=0, atol=within)
