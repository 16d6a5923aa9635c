"""Trainer: an ordinary PyTorch model, trained under a plan by as many ranks as mpirun has started.

The same script runs under `mpirun -n 4 python train.py` and, with one rank, by itself.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.checkpoint.names import name_of
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.comm.mpi import MPI
from hybridpipe.data.batches import Microbatches, minibatches
from hybridpipe.data.loader import loaded
from hybridpipe.data.stream import Minibatch, slice_minibatch
from hybridpipe.engine import consistency
from hybridpipe.engine.allocator import keep_freed_memory
from hybridpipe.engine.worker import Worker
from hybridpipe.health import failure, preemption
from hybridpipe.health.watchdog import DEFAULT_SECONDS, watch
from hybridpipe.model import structure
from hybridpipe.model.sequential import check_plan, num_layers
from hybridpipe.model.tensors import TensorTree, tensors_of
from hybridpipe.optim.update import SchedulerFactory, UpdateRule
from hybridpipe.planning.checks import non_negative
from hybridpipe.planning.cluster import NO_COMPRESSION
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.schedules.registry import DEFAULT
from hybridpipe.planning.timeline import Timeline
from hybridpipe.training import planmaker
from hybridpipe.training import validation as valid
from hybridpipe.training.autoplan import Choice
from hybridpipe.training.checkpoints import CheckpointManager, Sizes
from hybridpipe.training.evaluation import Metric, MicrobatchMetrics, evaluate, targets_wanted
from hybridpipe.training.fit import FitLoop
from hybridpipe.training.metrics import MinibatchRecord, Recorder, Traced
from hybridpipe.training.planmaker import ClusterLike, PlanLike, PlanMaker
from hybridpipe.training.train_state import TrainState
from hybridpipe.types import Loss, OptimizerFactory

_FIXED = ("model", "loss", "seed", "minibatch_size", "rule", "world", "device")


class Trainer:
    """Trains `model` in place: each rank the layers of its own stage. Every method is collective.

    Args:
        model: an `nn.Sequential`; every rank passes the same one, and rank 0's weights count.
        loss: `loss(outputs, targets)` is the mean over the samples.
        optimizer: called with the parameters of this stage, such as `partial(torch.optim.SGD, lr=0.1)`.
        plan: a `Plan`, the path of a plan.json, or a name: "auto" measures model and machines and searches;
            "dp" is data parallelism on all ranks; "straight" a pipeline with one rank a stage.
        cluster: a `Cluster`, or the path of a cluster.json, of as many ranks: then none is measured.
        minibatch_size: samples behind one update.
        microbatch_size: for a plan that goes by a name; defaults to an equal share for each rank, and with
            "auto" to that, a half or a quarter of it, whichever is fastest by prediction (BatchNorm's
            statistics are a microbatch's). A `Plan` says itself how many microbatches there are.
        schedule, asynchronous, vertical_sync, max_in_flight, recompute: likewise for a plan that goes by a
            name (`PlanRequest`); the schedule "auto" is the fastest, of the synchronous ones by default.
        lr_scheduler: called with the optimizer, such as `partial(torch.optim.lr_scheduler.StepLR,
            step_size=100)`; it counts minibatches, those of `no_sync` and the one that applies them as one.
        clip_grad_norm: gradients are scaled down to this norm over the whole model, if they exceed it. Not
            under asynchronous schedules, where no such norm ever is.
        scale_learning_rate: under pipedream a stage's learning rate is multiplied by its replicas over the
            first stage's, as it updates that much more seldom (PipeDream's code).
        delay_warm_up: under asynchronous schedules, for so many minibatches a stage whose gradients are d
            updates late takes smaller steps, at first by d, then by less (PipeMare, MLSys 2021, section 3.1).
            Not under pipedream-2bw, where d is 1 everywhere.
        compression: "fp16": float32 gradients travel between replicas as float16, half the bytes. Sums then
            have three digits, and those beyond 65504 are infinite.
        predict: measure model and machines under a given plan, too, so that the summary can set a prediction
            beside what was measured; takes some seconds before the first minibatch.
        seed: of the order of the data and of every random number that a layer, or a data set, draws.
        num_workers: processes of each rank of the first and the last stage that load microbatches before
            they are due, as DataLoader's; 0: they are loaded when they are due.
        device: of this rank; defaults to one GPU for each rank of the host if there are any, else the CPU.
        world: the ranks that train together; defaults to MPI.COMM_WORLD.
        hang_timeout: after so many seconds in one instruction, or in one wait for others, a rank tells what
            every rank is doing and ends the job; 0: never.
        on_nonfinite: where a loss or a gradient is NaN or infinite: "stop" ends the job with one line that
            names it; "skip" leaves the update out on all ranks (under asynchronous schedules, where no two
            stages update together, on all replicas of the stage); "ignore" does not look.
        metrics: functions by name, called with (outputs, targets) of a microbatch in evaluation; each returns
            (sum, count). `evaluate` tells sum over count of the whole data set. One called "accuracy" takes
            the place of the one that is counted where targets are classes.

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
        cluster: ClusterLike | None = None,
        minibatch_size: int,
        microbatch_size: int | None = None,
        schedule: str = DEFAULT,
        asynchronous: bool = False,
        vertical_sync: bool = False,
        max_in_flight: int | None = None,
        recompute: bool = False,
        lr_scheduler: SchedulerFactory | None = None,
        clip_grad_norm: float | None = None,
        scale_learning_rate: bool = True,
        delay_warm_up: int = 0,
        compression: str = NO_COMPRESSION,
        predict: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        device: torch.device | str | None = None,
        world: MPI.Comm | None = None,
        hang_timeout: float = DEFAULT_SECONDS,
        on_nonfinite: str = "stop",
        metrics: Mapping[str, Metric] = MappingProxyType({}),
    ) -> None:
        self.world = MPI.COMM_WORLD if world is None else world
        failure.install()
        num_layers(model)  # refuses what cannot be cut
        valid.check_model(model)
        valid.check_loss(loss, model)
        valid.check_factories(optimizer, lr_scheduler)
        self._metrics = MicrobatchMetrics(loss, metrics)
        minibatch_size, microbatch_size = valid.sizes(minibatch_size, microbatch_size)
        non_negative("hang_timeout", hang_timeout)
        seed, self._num_workers = (
            valid.integer("seed", seed),
            valid.integer("num_workers", num_workers, least=0),
        )
        self.model, self.loss, self.seed, self.minibatch_size = model, loss, seed, minibatch_size
        delay_warm_up = valid.integer("delay_warm_up", delay_warm_up, least=0)
        rates = optimizer, lr_scheduler, clip_grad_norm, scale_learning_rate, delay_warm_up
        self.rule = UpdateRule(*rates, compression, on_nonfinite)
        self._updates = True
        self._fitting: FitLoop | None = None  # the last one
        self._accumulated = False  # gradients of `no_sync`, which no update has used yet
        keep_freed_memory()
        self.device = planmaker.device_with_threads(self.world, valid.check_device(device))
        trained_by = partial(consistency.settings, model, loss, self.rule)
        self.state, self.recorder = TrainState(), Recorder()
        self._checkpoints = CheckpointManager(
            Sizes(seed, minibatch_size), self.world, self.state, self.recorder, trained_by
        )
        self.choice: Choice | None = None
        self._worker: Worker | None = None
        given = planmaker.read_given(plan)
        if isinstance(given, Plan) and schedule == DEFAULT:
            schedule = given.schedule
        request = PlanRequest(schedule, asynchronous, recompute, vertical_sync, max_in_flight)
        alike = {
            "seed": seed,
            **asdict(request),
            "hang_timeout": hang_timeout,
            "metrics": {name: consistency.callable_text(metric) for name, metric in metrics.items()},
            "minibatch_size": minibatch_size,
            "microbatch_size": microbatch_size,
        }
        consistency.check_alike(self.world, consistency.facts(model, loss, self.rule, given, **alike))
        self._watchdog = watch(self.world, hang_timeout)  # from now on ranks wait for each other
        trained = model, loss, self.rule, self.world, self.device
        self._maker = PlanMaker(given, request, *trained, minibatch_size, microbatch_size, cluster)
        if self._maker.plan is not None and not predict:
            self._start(self._maker.plan)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and hasattr(self, name):
            raise AttributeError(f"{name} of a Trainer cannot be changed: make a new Trainer")
        super().__setattr__(name, value)

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch, but for the last one of a short minibatch."""
        return self._maker.microbatch_size

    @property
    def step(self) -> int:
        """Minibatches trained on."""
        return self.state.step

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return self.state.epoch

    @property
    def stopped(self) -> bool:
        """Whether the last `fit` has ended where `stop_from` said."""
        return self._fitting is not None and self._fitting.stopped

    @property
    def history(self) -> list[dict[str, Any]]:
        """What `fit` has returned for each epoch, of the runs before a checkpoint, too."""
        return self.state.history

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

    def train_step(self, inputs: TensorTree, targets: TensorTree) -> float:
        """Train on one minibatch, samples in the first dimension; every rank passes the same one.

        Returns:
            the mean loss over the minibatch, the same float on every rank.

        Raises:
            ValueError: the schedule is an asynchronous one, which wants the next minibatch before the end.
        """
        began = time.perf_counter()
        self._check_now("train_step")
        consistency.check_same_minibatch(self.world, (*tensors_of(inputs), *tensors_of(targets)))
        if self._worker is None:
            self._make_plan(slice_minibatch(inputs, targets, self.microbatch_size))
        self.worker.renew()
        if not self._accumulated:
            self.worker.zero_grad()
        if not self.worker.flushes:
            what = f"{self.plan.schedule}, whose minibatches follow each other without a pause"
            raise ValueError(f"train_step makes no sense under {what}; use fit")
        minibatch = slice_minibatch(inputs, targets, self.microbatch_size)
        losses, events = self.worker.train(minibatch, self.step, self._updates)
        self.state.step += 1
        self.state.progress = None
        self._accumulated = not self._updates
        loss, seconds = losses.total(), time.perf_counter() - began
        full = minibatch.num_samples == self.minibatch_size
        self.recorder.keep(events, seconds, full)
        return self.recorder.note(self.epoch, loss, minibatch.num_samples, seconds, full).loss

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
        checkpoint: Checkpointing | None = None,
    ) -> list[dict[str, Any]]:
        """Train on a map-style data set of (inputs, target).

        Each rank loads only the microbatches that its stage needs. The order follows from seed and epoch.

        Args:
            validation: evaluated after each epoch.
            shuffle: False: in the data set's order.
            on_minibatch: called on every rank with what is known of each minibatch, one minibatch late, or as
                many as are under way. What it raises on every rank ends `fit`; under an asynchronous
                schedule, with minibatches on their way between ranks, it ends the job.
            checkpoint: save on the way, while training goes on, and at the end; and when USR1 or TERM asks
                any rank to stop, after which all of them end (`Preempted`).
            target_accuracy, target_loss: the first epoch whose validation has at least this accuracy, at most
                this loss, is the last; with both, the first that has both. The summary tells when it was.

        After `resume` the first epoch is the rest of the one that the checkpoint stands in.

        Returns:
            for each epoch its number, mean loss, seconds of training on this rank and, with `validation`,
            what `evaluate` says of it.

        Raises:
            Preempted: with `checkpoint`: a rank was asked to stop; all have, and what was trained is saved.
            UserError: the state is such that it cannot be saved.
            NotSaved: it could not be written.
            ValueError: inside `no_sync`; a target without `validation`, or target_accuracy where its targets
                are no classes.
        """
        self._check_now("fit")
        if not self._updates or self._accumulated:
            raise ValueError("fit makes no sense inside no_sync, or before the update that is to follow it")
        epochs = valid.integer("epochs", epochs, least=0)
        wanted = targets_wanted(validation, accuracy=target_accuracy, loss=target_loss)
        of_fit = {"epochs": epochs, "shuffle": shuffle, "targets": wanted}
        consistency.check_alike(self.world, {name: repr(value) for name, value in of_fit.items()})
        self.prepare(dataset, validation)
        if self.world.rank == 0:
            valid.warn_if_in_evaluation_mode(self.model)
        self.worker.zero_grad()
        keeper = None
        if checkpoint is not None:
            keeper = self._checkpoints.keeper(self.worker, checkpoint, self.microbatch_size)
        trained = self.worker, self.state, self.recorder, keeper, self.minibatch_size
        batches = partial(self._begin_epoch, dataset, shuffle)
        validate = None if validation is None else partial(self._evaluate, validation, may_stop=True)
        self._fitting = FitLoop(*trained, batches, validate, wanted, on_minibatch)
        first = len(self.history)
        with preemption.listening(keeper is not None):
            if keeper is not None and self.worker.share(np.zeros(0)).ask_to_stop():
                self.state.preempted, epochs = True, 0
            self._fitting.run(epochs)
            if keeper is not None and self.step:
                keeper.finish(self.step, self.state.resume_point(self.minibatch_size))
            if checkpoint is not None:
                self._checkpoints.leave_if_preempted(checkpoint.folder)
        return self.history[first:]

    def stop_from(self, step: int) -> None:
        """Let `fit` end at the first resume point at or behind `step`, or with the epoch if that is earlier.

        Every rank names the same step, before it has trained on so many. `fit` then saves and returns, with
        `stopped` set and all ranks at one step. Under an asynchronous schedule messages of later minibatches
        stay under way: the process has to end then, without `close`.
        """
        self.state.stop_from = step

    def save(self, root: str | os.PathLike[str], keep: int = 3) -> Path:
        """Save the state between two steps as `root/step-...`, of which the last `keep` stay. Collective.

        Raises:
            RuntimeError: inside `fit`, which has `checkpoint` for that, or between `no_sync` and the update.
            UserError: it cannot be saved.
        """
        if self._fitting is not None and self._fitting.is_training:
            raise RuntimeError("save was called while fit trains, which has checkpoint=Checkpointing(...)")
        if self._accumulated:
            raise RuntimeError("save was called between no_sync and the update that is to use its gradients")
        asked = Checkpointing(root, keep=keep)
        keeper = self._checkpoints.keeper(self.worker, asked, self.microbatch_size, anew=True)
        keeper.finish(self.step, self.state.resume_point(self.minibatch_size))
        return Path(root) / name_of(self.step)

    def resume(
        self, source: str | os.PathLike[str], or_anew: bool = False, allow_changed: bool = False
    ) -> list[str]:
        """Go on from a checkpoint, from the last good one in a folder, or with a safetensors file's weights.

        Under the checkpoint's own plan, which "auto" prefers where it fits, training goes on bit for bit.
        Under any other the weights, buffers and optimizer state are bit-equal by name. Collective.

        Args:
            or_anew: a folder may hold none; training then starts anew.
            allow_changed: optimizer options, scheduler, clipping, loss, data set and what is frozen may have
                changed. The new ones count, and are told; a scheduler stands where it would by now.

        Returns:
            what there is to tell, in lines.

        Raises:
            UserError: it is damaged, of another model, optimizer class, seed or minibatch, or of other
                settings that were not allowed; nothing has changed. Of another data set: raised by `fit`.
        """
        self.state.check_nothing_under_way("resume")
        of_resume = {"or_anew": or_anew, "allow_changed": allow_changed}
        consistency.check_alike(self.world, {name: repr(bool(value)) for name, value in of_resume.items()})
        found, lines = self._checkpoints.find(Path(source), self.model, or_anew, allow_changed)
        if found is not None and self._worker is not None:
            self._checkpoints.load(self._worker)
        elif found is not None and (line := self._maker.prefer(found.plan, found.run.get("ranks"))):
            lines.append(line)
        return lines

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Mean loss and metrics over a data set, the same on every rank.

        An accuracy is among them where all targets are classes, those that the loss ignores left out.

        Raises:
            RuntimeError: minibatches of an asynchronous schedule are under way (called from `on_minibatch`).
        """
        self._check_now("evaluate")
        self._make_ready(dataset)
        metrics = self._evaluate(dataset)
        assert metrics is not None
        return metrics

    def _evaluate(self, dataset: Any, may_stop: bool = False) -> dict[str, float] | None:
        """As `evaluate`; None if it was left, by all ranks alike, because one was asked to stop."""
        loads = self.worker.loads_to_infer
        batches = loaded(self._microbatches(dataset), loads, self._num_workers)
        return evaluate(self.worker, batches, self._metrics, len(dataset), self.step, may_stop)

    def not_split(self) -> list[str] | None:
        """The modules whose backward is whole, though the schedule splits it; None on other ranks than 0."""
        return self.worker.not_split()

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """On rank 0 what `model.state_dict()` would be in one process; None elsewhere.

        Raises:
            RuntimeError: as `evaluate`; each stage would be at another update.
        """
        self.state.check_nothing_under_way("full_state_dict")
        return self.worker.full_state_dict()

    def prepare(self, dataset: Any, validation: Any = None) -> None:
        """Check data sets and model, and make the plan if there is none yet, from the first minibatch.

        `fit` does so first.

        Raises:
            TypeError, ValueError: the data set is not the same on all ranks, or cannot be trained on; or the
                model has changed in a way that cannot be taken up.
        """
        if validation is not None:
            consistency.check_data_alike(self.world, "validation", validation, self.seed)
        self._checkpoints.check_data(self._make_ready(dataset))

    def _make_ready(self, dataset: Any) -> dict[str, str]:
        """For a data set to train or to evaluate on. Returns its fingerprint."""
        facts = consistency.check_data_alike(self.world, "dataset", dataset, self.seed)
        consistency.check_alike(self.world, consistency.modes_and_requires_grad(self.model))
        if self._worker is None:
            self._make_plan(next(minibatches(self._microbatches(dataset))))
        self.worker.renew()
        consistency.check_repeatable(self.plan, facts)
        return facts

    def _check_now(self, method: str) -> None:
        """Refuse what users may have changed, or put around the call, since the last one."""
        if self.state.under_way:
            self.state.refuse(method)
        structure.check_surroundings(method)
        structure.check_model_now(self.model)
        if method != "evaluate":
            structure.check_trains(self.model)

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
        """End what goes on in the background, give back the communicators; the model keeps its weights."""
        self._checkpoints.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def _begin_epoch(self, dataset: Any, shuffle: bool) -> Iterator[Minibatch]:
        progress = self.state.begin_epoch(len(dataset), shuffle)
        loads = partial(self.worker.loads, begin=progress.position, stream_start=progress.stream_start)
        microbatches = self._microbatches(dataset, epoch=self.epoch, shuffle=shuffle)
        return loaded(microbatches, loads, self._num_workers)

    def _microbatches(self, dataset: Any, **which: Any) -> Microbatches:
        return Microbatches(dataset, self.minibatch_size, self.microbatch_size, seed=self.seed, **which)

    def _make_plan(self, minibatch: Minibatch) -> None:
        plan, self.choice = self._maker.make(minibatch)
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        check_plan(self.model, plan)
        self.recorder.begin()
        trained = self.model, plan, self.loss, self.rule
        self._worker = Worker(*trained, self.world, self.device, self.seed, self._maker.progress_thread)
        self._checkpoints.load(self._worker)
