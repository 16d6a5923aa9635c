"""Trainer: an ordinary PyTorch model, trained under a plan by as many ranks as mpirun has started.

The same script runs under `mpirun -n 4 python train.py` and, with one rank, by itself.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.autoplan import Choice, autoplan, check_options
from hybridpipe.batches import microbatch_size_of, minibatches, parts_of, slice_minibatch
from hybridpipe.config import SOURCES
from hybridpipe.files import read_plan
from hybridpipe.judging import judge, reached
from hybridpipe.planning.checks import non_negative, positive_int
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import Measurement
from hybridpipe.planning.schedules import ceil_div, losses_late
from hybridpipe.planning.timeline import Event, Timeline
from hybridpipe.recorder import MinibatchRecord, Recorder, Traced
from hybridpipe.runtime import failure, faults
from hybridpipe.runtime.agreement import check_alike, facts
from hybridpipe.runtime.allocator import keep_freed_memory
from hybridpipe.runtime.communicators import default_num_threads, ranks_on_host
from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.stream import Minibatch
from hybridpipe.runtime.update import SchedulerFactory, UpdateRule
from hybridpipe.runtime.watchdog import DEFAULT_SECONDS, Watchdog, watch
from hybridpipe.runtime.worker import Sums, Worker
from hybridpipe.stage.measure import OptimizerFactory, Rehearsal
from hybridpipe.stage.split import check_plan, layers_of
from hybridpipe.stage.stage import Loss
from hybridpipe.stage.values import Value
from hybridpipe.together import measure_together

PlanLike = Plan | str | os.PathLike[str]
# What an update of this rank was made of, each minibatch's losses on their way, and what went on till then.
Trained = tuple[list[tuple[Minibatch, Sums]], list[Event]]


class Trainer:
    """Trains `model` in place: each rank the layers of its own stage. Every method is collective.

    Args:
        model: an `nn.Sequential`; every rank passes the same one, and rank 0's weights count.
        loss: `loss(outputs, targets)` is the mean over the samples.
        optimizer: called with the parameters of this stage, such as `partial(torch.optim.SGD, lr=0.1)`.
        plan: a `Plan`, the path of a plan.json, or a name: "auto" measures model and machines and searches;
            "dp" is data parallelism on all ranks; "straight" a pipeline with one rank a stage.
        minibatch_size: samples behind one update.
        microbatch_size: for a plan that goes by a name; defaults to an equal share for each rank, and with
            "auto" to that, a half or a quarter of it, whichever is fastest by prediction (BatchNorm's
            statistics are a microbatch's). A `Plan` says itself how many microbatches there are.
        schedule, vertical_sync, max_in_flight, recompute: likewise for a plan that goes by a name; "auto"
            is the best synchronous schedule.
        lr_scheduler: called with the optimizer, such as `partial(torch.optim.lr_scheduler.StepLR,
            step_size=100)`; it counts minibatches, those of `no_sync` and the one that applies them as one.
        clip_grad_norm: gradients are scaled down to this norm over the whole model, if they exceed it. Not
            under asynchronous schedules, where no such norm ever is.
        scale_learning_rate: under pipedream a stage's learning rate is multiplied by its replicas over the
            first stage's, as it updates that much more seldom (PipeDream's code).
        delay_warm_up: under asynchronous schedules, for so many minibatches a stage whose gradients are d
            updates late takes smaller steps, at first by d, then by less (PipeMare, MLSys 2021, section 3.1).
            Not under pipedream-2bw, where d is 1 everywhere.
        predict: measure model and machines under a given plan, too, so that the summary can set a prediction
            beside what was measured; takes some seconds before the first minibatch.
        seed: of the order of the data and of every random number that a layer draws.
        device: of this rank; defaults to one GPU for each rank of the host if there are any, else the CPU.
        world: the ranks that train together; defaults to MPI.COMM_WORLD.
        hang_timeout: after so many seconds in one instruction, or in one wait for others, a rank tells what
            every rank is doing and ends the job; 0: never.
        on_nonfinite: where a loss or a gradient is NaN or infinite: "stop" ends the job with one line that
            names it; "skip" leaves the update out on all ranks (under asynchronous schedules, where no two
            stages update together, on all replicas of the stage); "ignore" does not look.

    Raises:
        TypeError: the model is not an `nn.Sequential`.
        ValueError: the plan does not fit model, world or minibatch, with the arithmetic; or optimizer,
            scheduler or clipping make no sense under it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        plan: PlanLike = "auto",
        minibatch_size: int,
        microbatch_size: int | None = None,
        schedule: str = "1f1b",
        vertical_sync: bool = False,
        max_in_flight: int | None = None,
        recompute: bool = False,
        lr_scheduler: SchedulerFactory | None = None,
        clip_grad_norm: float | None = None,
        scale_learning_rate: bool = True,
        delay_warm_up: int = 0,
        predict: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        world: MPI.Comm | None = None,
        hang_timeout: float = DEFAULT_SECONDS,
        on_nonfinite: str = "stop",
    ) -> None:
        self.world = MPI.COMM_WORLD if world is None else world
        failure.install()
        layers_of(model)
        positive_int("minibatch_size", minibatch_size)
        if microbatch_size is not None:
            positive_int("microbatch_size", microbatch_size)
        non_negative("hang_timeout", hang_timeout)
        self.model, self.loss, self.seed = model, loss, seed
        self.rule = UpdateRule(
            optimizer, lr_scheduler, clip_grad_norm, scale_learning_rate, delay_warm_up, on_nonfinite
        )
        self._autoplan = partial(
            autoplan,
            schedule=schedule,
            vertical_sync=vertical_sync,
            max_in_flight=max_in_flight,
            recompute=recompute,
        )
        self._updates = True
        self._under_way = False  # minibatches, between ranks
        self.minibatch_size = minibatch_size
        keep_freed_memory()
        self.device, num_threads = _device(self.world, device)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._hang_timeout = hang_timeout
        self._watchdog: Watchdog | None = None
        self.step = 0
        self.epoch = 0
        self.choice: Choice | None = None
        self.recorder = Recorder()
        self._worker: Worker | None = None
        self._smaller_sizes: list[int] = []  # of the microbatch, which "auto" may choose
        self._plan = plan if isinstance(plan, Plan) or plan in SOURCES else read_plan(Path(plan))
        sizes = {"minibatch_size": minibatch_size, "microbatch_size": microbatch_size}
        check_alike(
            self.world, facts(model, loss, self.rule, self._plan, seed=seed, schedule=schedule, **sizes)
        )
        if isinstance(self._plan, Plan):
            options = {"vertical_sync": vertical_sync, "max_in_flight": max_in_flight, "recompute": recompute}
            check_options(self._plan, schedule, options)
            self.microbatch_size = microbatch_size_of(self._plan, minibatch_size, microbatch_size)
            self.rule.check(self._plan)
            check_plan(model, self._plan)
            self._plan.check_world(self.world.size)
            if not predict:
                self._start(self._plan)
        else:
            self.microbatch_size = microbatch_size or ceil_div(minibatch_size, self.world.size)
            if microbatch_size is None and plan == "auto":
                self._smaller_sizes = parts_of(self.microbatch_size, minibatch_size)

    @property
    def plan(self) -> Plan:
        """The plan that is run. One that goes by a name is made when the first samples are there."""
        return self.worker.plan

    @property
    def worker(self) -> Worker:
        """This rank's running pieces. Raises RuntimeError before they are there."""
        if self._worker is None:
            raise RuntimeError("model and machines are measured with the first minibatch; train one first")
        return self._worker

    def train_step(self, inputs: Value, targets: Value) -> float:
        """Train on one minibatch, samples in the first dimension; every rank passes the same one.

        Returns:
            the mean loss over the minibatch, the same float on every rank.

        Raises:
            ValueError: the schedule is an asynchronous one, which wants the next minibatch before the end.
        """
        began = time.perf_counter()
        if self._worker is None:
            self._make_plan(slice_minibatch(inputs, targets, self.microbatch_size))
        if self.plan.is_asynchronous:
            raise ValueError(
                f"train_step makes no sense under {self.plan.schedule}, whose minibatches follow each other "
                "without a pause; use fit"
            )
        minibatch = slice_minibatch(inputs, targets, self.microbatch_size)
        sums, events = self._train(minibatch)
        sums.wait()
        seconds = time.perf_counter() - began
        self._keep([minibatch], events, seconds)
        return self._record(self.epoch, minibatch, sums, seconds).loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `train_step` adds its gradients up and leaves the weights as they are.

        The first one outside applies the sum, as with DistributedDataParallel; every rank does the same.
        For the mean over k minibatches, divide the loss by k.

        Raises:
            ValueError: the schedule is an asynchronous one, where every minibatch ends in an update.
        """
        if self._worker is not None and self.plan.is_asynchronous:
            raise ValueError(f"no_sync makes no sense under {self.plan.schedule}, which never stops updating")
        before, self._updates = self._updates, False
        try:
            yield
        finally:
            self._updates = before

    def fit(
        self,
        dataset: Any,
        epochs: int = 1,
        *,
        validation: Any = None,
        shuffle: bool = True,
        on_minibatch: Callable[[MinibatchRecord], None] | None = None,
        target_accuracy: float | None = None,
        target_loss: float | None = None,
    ) -> list[dict[str, Any]]:
        """Train on a map-style data set of (inputs, target).

        Each rank loads only the microbatches that its stage needs. The order follows from seed and epoch.

        Args:
            validation: evaluated after each epoch.
            shuffle: False: in the data set's order.
            on_minibatch: called on every rank with what is known of each minibatch, one minibatch late, or as
                many as are under way. What it raises on every rank ends `fit`; under an asynchronous
                schedule, with minibatches on their way between ranks, it ends the job.
            target_accuracy, target_loss: the first epoch whose validation has at least this accuracy, at most
                this loss, is the last; with both, the first that has both. The summary tells when it was.

        Returns:
            for each epoch its number, mean loss, seconds of training on this rank and, with `validation`,
            what `evaluate` says of it.

        Raises:
            ValueError: inside `no_sync`; a target without `validation`, or target_accuracy where its targets
                are no classes.
        """
        self._check_nothing_under_way("fit")
        if not self._updates:
            raise ValueError("fit makes no sense inside no_sync, where nothing is learnt; use train_step")
        history = []
        targets = {"accuracy": target_accuracy, "loss": target_loss}
        wanted = {name: value for name, value in targets.items() if value is not None}
        if wanted and validation is None:
            raise ValueError(f"target_{min(wanted)} = {wanted[min(wanted)]} needs validation, got None")
        self.prepare(dataset)
        for epoch in range(self.epoch, self.epoch + epochs):
            losses = []
            began = time.perf_counter()
            with closing(self._epoch(dataset, epoch, shuffle)) as records:  # an error closes it at once
                for record in records:
                    losses.append((record.loss, record.num_samples))
                    if on_minibatch is not None:
                        on_minibatch(record)
            mean = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
            seconds = time.perf_counter() - began
            self.recorder.training_seconds += seconds
            entry: dict[str, Any] = {"epoch": epoch, "loss": mean, "seconds": seconds}
            if validation is not None:
                entry["validation"] = self.recorder.metrics = self.evaluate(validation)
            history.append(entry)
            self.epoch += 1
            if wanted and reached(entry["validation"], wanted):
                self.recorder.reach_target(self.epoch)
                break
        return history

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Mean loss over a data set, and the accuracy where targets are classes; the same on every rank.

        Raises:
            RuntimeError: minibatches of an asynchronous schedule are under way (called from `on_minibatch`).
        """
        self._check_nothing_under_way("evaluate")
        self.prepare(dataset)
        self.worker.average_statistics()
        totals = np.zeros(3)
        previous: Sums | None = None
        for minibatch in minibatches(dataset, self.minibatch_size, self.microbatch_size):
            faults.at("evaluate", step=self.step)
            current = self.worker.infer(minibatch, partial(judge, self.loss), width=3)
            if previous is not None:  # one minibatch late: the pipeline stays full, but never runs away
                totals += previous.wait().sum(axis=0)
            previous = current
        if previous is not None:
            totals += previous.wait().sum(axis=0)
        loss, correct, judged = totals
        metrics = {"loss": float(loss) / max(len(dataset), 1)}
        if judged:
            metrics["accuracy"] = float(correct / judged)
        return metrics

    def not_split(self) -> list[str] | None:
        """The modules whose backward is whole, though the schedule splits it; None on other ranks than 0."""
        return self.worker.not_split()

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """On rank 0 what `model.state_dict()` would be in one process; None elsewhere.

        Raises:
            RuntimeError: as `evaluate`; each stage would be at another update.
        """
        self._check_nothing_under_way("full_state_dict")
        return self.worker.full_state_dict()

    def prepare(self, dataset: Any) -> None:
        """Make the plan now, from the data set's first minibatch, if there is none yet; else `fit` does."""
        if self._worker is None:
            self._make_plan(next(minibatches(dataset, self.minibatch_size, self.microbatch_size)))

    def timeline(self) -> Timeline | None:
        """On rank 0 what every rank did in a typical full minibatch; None elsewhere."""
        return self.recorder.timeline(self.worker)

    def traced(self) -> Traced | None:
        """On rank 0 what every rank did in the last full minibatches, and where its time went; else None."""
        return self.recorder.traced(self.worker)

    def summary(self) -> dict[str, Any] | None:
        """On rank 0 the figures of the training so far, as in summary.json; None elsewhere."""
        return self.recorder.summary(self.worker)

    def close(self) -> None:
        """End the communication thread and give back the communicators; the model keeps its weights."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def _epoch(self, dataset: Any, epoch: int, shuffle: bool) -> Generator[MinibatchRecord, None, None]:
        batches = minibatches(
            dataset, self.minibatch_size, self.microbatch_size, seed=self.seed, epoch=epoch, shuffle=shuffle
        )
        trained = self._stream(list(batches)) if self.plan.is_asynchronous else map(self._train_one, batches)
        late = losses_late(self.plan)
        pending: deque[tuple[Minibatch, Sums, float]] = deque()  # whose losses travel while others run
        began = time.perf_counter()
        for together, events in trained:
            began, seconds = (now := time.perf_counter()), now - began
            self._keep([minibatch for minibatch, _ in together], events, seconds)
            pending += [(*each, seconds / len(together)) for each in together]
            while len(pending) > late:
                yield self._record(epoch, *pending.popleft())
        for each in pending:
            yield self._record(epoch, *each)

    def _keep(self, trained: Sequence[Minibatch], events: list[Event], seconds: float) -> None:
        full = all(minibatch.num_samples == self.minibatch_size for minibatch in trained)
        self.recorder.keep(events, seconds, full, len(trained))

    def _record(self, epoch: int, minibatch: Minibatch, sums: Sums, seconds: float) -> MinibatchRecord:
        full = minibatch.num_samples == self.minibatch_size
        return self.recorder.note(epoch, _total(sums), minibatch.num_samples, seconds, full)

    def _train(self, minibatch: Minibatch) -> tuple[Sums, list[Event]]:
        trained = self.worker.train(minibatch, self.step, self._updates)
        self.step += 1
        return trained

    def _train_one(self, minibatch: Minibatch) -> Trained:
        sums, events = self._train(minibatch)
        return [(minibatch, sums)], events

    def _stream(self, batches: list[Minibatch]) -> Iterator[Trained]:
        """An epoch without a flush, by updates."""
        ahead = deque(batches)
        self._under_way = True
        try:
            for sums, events in self.worker.stream(batches, self.step):
                together = [(ahead.popleft(), each) for each in sums]
                self.step += len(together)
                yield together, events
        finally:
            self._under_way = False

    def _check_nothing_under_way(self, method: str) -> None:
        if self._under_way:
            raise RuntimeError(
                f"{method} was called while minibatches are under way under {self.plan.schedule}; "
                "call it between epochs"
            )

    def _make_plan(self, minibatch: Minibatch) -> None:
        self._watch()
        self.rule.try_out([p for p in self.model.parameters() if p.requires_grad][:1])
        try:
            self.choice = self._choose(minibatch)
        except ValueError as error:  # the same on every rank
            if not isinstance(self._plan, Plan):
                raise
            if self.world.rank == 0:
                print(f"hybridpipe: the plan runs as given, without a prediction: {error}", file=sys.stderr)
            self._start(self._plan)
        else:
            self._start(self.choice.plan)

    def _choose(self, minibatch: Minibatch) -> Choice:
        with failure.guard():  # ranks that can be measured would wait for one that cannot
            try:
                rehearsal = Rehearsal(
                    self.model, minibatch.inputs(0), minibatch.targets(0), self.loss, self.device
                )
                measure = partial(rehearsal.measure, self.rule.optimizer)
                profile = measure_together(self.world, measure)
                for size in self._smaller_sizes:
                    if size < profile.samples:  # the data may hold no more
                        other = measure_together(self.world, partial(measure, size=size))
                        measurement = Measurement(other.samples, other.layers)
                        profile = replace(profile, others=(*profile.others, measurement))
            except (TypeError, ValueError) as error:  # the model's own, whose traceback is to be seen
                raise RuntimeError("the first microbatch failed while the model was measured") from error
        count = ceil_div(self.minibatch_size, self.microbatch_size)
        return self._autoplan(self._plan, self.world, profile, count, work=rehearsal.run)

    def _watch(self) -> None:
        """From now on ranks wait for each other."""
        if self._watchdog is None:
            self._watchdog = watch(self.world, self._hang_timeout)

    def _start(self, plan: Plan) -> None:
        self._watch()
        self.rule.check(plan)
        self.microbatch_size = microbatch_size_of(plan, self.minibatch_size)
        self.recorder.begin()
        self._worker = Worker(self.model, plan, self.loss, self.rule, self.world, self.device, self.seed)


def _total(sums: Sums) -> float:
    """Added up in the order of the microbatches: the same float on every rank and under every plan."""
    return float(sum(sums.wait().tolist()))


def _device(world: MPI.Comm, device: torch.device | str | None) -> tuple[torch.device, int | None]:
    """This rank's device, and its compute threads (None: the user has set them)."""
    local_rank, local_size = ranks_on_host(world)
    if device is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = f"cuda:{local_rank % gpus}" if gpus else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for pinned memory, and what layers make on "cuda"
    return device, default_num_threads(local_size)
