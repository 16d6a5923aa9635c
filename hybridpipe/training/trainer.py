"""Trainer: trains an ordinary PyTorch model under a plan, on all ranks that mpirun has started.

The same script runs under `mpirun -n 4 python train.py` and as a single process.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.comm.gpus import device_with_threads
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status
from hybridpipe.comm.training_group import training_group
from hybridpipe.config.options import (
    SINGLE,
    DataOptions,
    PlanLike,
    RankOptions,
    UpdateOptions,
    gathered,
    values,
)
from hybridpipe.data.samples import plain
from hybridpipe.data.source import Source
from hybridpipe.data.stream import slice_minibatch
from hybridpipe.engine import consistency
from hybridpipe.engine.worker import Worker
from hybridpipe.environment.allocator import keep_freed_memory
from hybridpipe.errors import suggesting
from hybridpipe.health import failure, preemption
from hybridpipe.health.watchdog import watch
from hybridpipe.model import structure
from hybridpipe.model.deferred_init.deferred import Factory, build_alike
from hybridpipe.model.tensors import Tree, num_samples, split
from hybridpipe.optim.update import SchedulerFactory, UpdateRule
from hybridpipe.planning.checks import integer
from hybridpipe.planning.request import AUTO
from hybridpipe.training import validation as valid
from hybridpipe.training.callbacks import Callback, CallbackList, OnMinibatch, Run, check_callbacks, names_of
from hybridpipe.training.checkpoints import CheckpointManager, Sizes
from hybridpipe.training.console import Console
from hybridpipe.training.evaluation import Metric, MicrobatchMetrics, evaluate, targets_wanted
from hybridpipe.training.feed import Feed
from hybridpipe.training.fit import FitLoop
from hybridpipe.training.metrics import Metrics, MinibatchRecord
from hybridpipe.training.planner.choice import Choice
from hybridpipe.training.planner.planner import Planned, Planner
from hybridpipe.training.prediction import predict
from hybridpipe.training.train_state import TrainState
from hybridpipe.training.view import TrainerView
from hybridpipe.types import Loss, OptimizerFactory


@partial(suggesting, also=SINGLE)
class Trainer(TrainerView):
    """Trains `model` in place: each rank trains the layers of its own stage. Every method is collective.

    Methods raise RuntimeError after `close`, and inside `fit` if they would change the training's state.

    Args:
        model: the same on every rank; rank 0's weights are used. An `nn.Sequential` is cut between its
            children. Any other model is called with a dict by keyword, a tuple by position, and recorded. On
            the meta device, or as a function that makes it, each rank makes only what its stage holds.
        loss: a function `loss(outputs, targets)` that returns the mean over the samples, or (sum, weight),
            such as the sum over the tokens and their number, for a mean over the whole minibatch.
        optimizer: called with the parameters of this stage, such as `partial(torch.optim.SGD, lr=0.1)`; with
            pairs (name, parameter), if its argument is called `named_parameters`.
        minibatch_size: samples behind one update, over all ranks.
        microbatch_size: samples of a microbatch, for a plan by name; a `Plan` has its own number of them. By
            default each rank's equal share; "auto" also tries a half and a quarter of it.
        plan: a `Plan`, the path of a plan.json, or a name: "auto" measures model and machines and searches;
            "dp" is data parallelism on all ranks; "straight" is a pipeline with one rank a stage. Or
            `PlanOptions`.
        lr_scheduler: called with the optimizer, such as `partial(torch.optim.lr_scheduler.StepLR,
            step_size=100)`. It counts minibatches; those of `no_sync` and the one after them count as one.
        update: how minibatches become updates: clipping, precision, what is not finite (`UpdateOptions`).
        data: how samples are drawn and loaded: seed, workers, `collate_fn` (`DataOptions`).
        ranks: who trains, on what, and how they wait: world, device, cluster, sync (`RankOptions`).
        metrics: functions by name for evaluation, called with (outputs, targets) of a microbatch; each
            returns (sum, count), and `evaluate` returns sum over count of the data set. One called "accuracy"
            replaces the accuracy that is counted for targets that are classes.
        callbacks: called by `fit` at its events (`hybridpipe.callbacks`); the same on every rank.
        verbose: rank 0 says on stderr who trains, what is measured, which plan runs, and how far `fit` is.
        options: fields of `plan`, `update`, `data` and `ranks` by themselves, such as `schedule="auto"` or
            `clip_grad_norm=1.0`, which go before those of the objects.

    Raises:
        TypeError: the model is not an `nn.Module`, or there is no such option.
        ValueError: the plan does not fit model, world or minibatch, or optimizer, scheduler or clipping
            cannot be used under it.
    """

    def __init__(
        self,
        model: nn.Module | Factory,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        minibatch_size: int,
        microbatch_size: int | None = None,
        plan: PlanLike = AUTO,
        lr_scheduler: SchedulerFactory | None = None,
        update: UpdateOptions = UpdateOptions(),
        data: DataOptions = DataOptions(),
        ranks: RankOptions = RankOptions(),
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        callbacks: Sequence[Callback] = (),
        verbose: bool = True,
        **options: Any,
    ) -> None:
        valid.warn_if_apart(MPI.COMM_WORLD.size)
        failure.install()
        wanted = gathered(plan, update, data, ranks, options)
        self.world = MPI.COMM_WORLD if wanted.ranks.world is None else wanted.ranks.world
        valid.check_groups(wanted.ranks.groups, wanted.plan)
        consistency.check_alike(self.world, {"groups": repr(wanted.ranks.groups)})  # they divide the ranks
        self.group = training_group(self.world, wanted.ranks.groups)
        rank_status.first_rank = self.group.first_rank
        model, numbers, *_ = build_alike(model, self.world)
        precision = wanted.update.precision
        valid.check_trainable(model, loss, optimizer, lr_scheduler, precision, numbers is not None)
        self._microbatch_metrics = MicrobatchMetrics(loss, metrics)
        self._callbacks = check_callbacks(callbacks)
        minibatch_size, microbatch_size = valid.sizes(minibatch_size, microbatch_size)
        self.model, self.loss, self.minibatch_size = model, loss, minibatch_size
        self.seed, hang_timeout = wanted.data.seed, wanted.ranks.hang_timeout
        self._feed = Feed(self.group, minibatch_size, wanted.data)
        self.rule = UpdateRule(optimizer, lr_scheduler, **values(wanted.update, UpdateOptions))
        keep_freed_memory()
        self.device = device_with_threads(self.world, valid.check_device(wanted.ranks.device))
        facts = values(wanted.plan) | {"sync": wanted.ranks.sync, "hang_timeout": hang_timeout}
        del facts["source"]  # a path may differ where the plan does not
        facts |= {"minibatch_size": minibatch_size, "microbatch_size": microbatch_size, "seed": self.seed}
        facts |= {"callbacks": names_of(self._callbacks)}
        consistency.check_arguments(self.world, model, loss, self.rule, wanted.given, metrics, **facts)
        self._watchdog = watch(self.world, hang_timeout)  # from here on ranks wait for each other
        self._console = Console(self.group, verbose)
        rule, device, say = self.rule, self.device, self._console.say
        self._planner = Planner(
            wanted, model, numbers, loss, rule, self.group, device, minibatch_size, microbatch_size, say
        )
        self._begin_state()
        if not self._planner.waits:
            self._start(self._planner.plan_for(None))

    def _begin_state(self) -> None:
        """Set the state of a training that has not begun."""
        self._updates, self._fitting = True, None
        self.choice: Choice | None = None
        self._worker, self._continues_plan = None, False
        self.state, self.metrics = TrainState(), Metrics()
        sizes = Sizes(self.seed, self.minibatch_size)
        settings = partial(consistency.settings, self.model, self.loss, self.rule, self.group.options)
        self._checkpoints = CheckpointManager(sizes, self.group, self.state, self.metrics, settings)

    def train_step(self, inputs: Tree, targets: Tree) -> float:
        """Train on one minibatch; every rank passes the same one.

        Args:
            inputs, targets: trees of tensors, with samples in the first dimension of each.

        Returns:
            The mean loss over the minibatch, the same float on every rank.

        Raises:
            ValueError: the schedule is asynchronous, and needs the next minibatch before this one ends.
        """
        began, inputs, targets = time.perf_counter(), plain(inputs), plain(targets)
        self._check_now("train_step")
        if self._worker is None:
            valid.check_flushes(self._planner.schedule)
        consistency.check_same_minibatch(self.world, inputs, targets)
        if self.group.options.count > 1:
            inputs, targets = self._dealt(inputs, targets)
        if self._worker is None:
            self._start(self._planner.plan_for(slice_minibatch(inputs, targets, self.microbatch_size)))
        worker, state = self._worker, self.state
        assert worker is not None
        if not worker.flushes:
            valid.check_flushes(worker.plan.schedule)
        minibatch = slice_minibatch(inputs, targets, self._planner.microbatch_size)
        worker.renew()
        worker.expect_shapes(vary=True)
        if not state.accumulated:
            worker.zero_grad()
        losses, events = worker.train(minibatch, state.step, self._updates)
        state.end_step(accumulates=not self._updates)
        loss, seconds = losses.total().mean, time.perf_counter() - began
        samples = sum(minibatch.sizes) * self.group.options.count
        full, made = samples == self.minibatch_size, worker.executor.update.made
        self.metrics.keep(events, seconds, full)
        epoch = state.complete_epochs(self.minibatch_size)
        return self.metrics.note(epoch, loss, samples, seconds, full, made).loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let `train_step` accumulate gradients without an update inside the context.

        The first `train_step` outside applies the sum, as with DistributedDataParallel. For the mean over k
        minibatches, divide the loss by k.

        Raises:
            ValueError: the schedule is asynchronous, where every minibatch ends in an update.
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
        epochs: int | None = None,
        *,
        max_steps: int | None = None,
        validation: Any = None,
        eval_every: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        on_minibatch: Callable[[MinibatchRecord], None] | None = None,
        target_accuracy: float | None = None,
        target_loss: float | None = None,
        checkpoint: Checkpointing | None = None,
        resume: str | None = None,
    ) -> list[dict[str, Any]]:
        """Train on a data set whose samples are pairs (inputs, target) or dicts, or on a DataLoader of one.

        Each rank loads only the microbatches that its stage needs, but iterates a whole IterableDataset. Seed
        and epoch determine the order. After `resume` the first epoch is the rest of one, if any is left.

        Args:
            epochs: at most that many; by default one, or with `max_steps` as many as that takes.
            max_steps: end once that many minibatches are trained on, those before a checkpoint included. Like
                `eval_every` not under asynchronous schedules, whose minibatches overlap within an epoch.
            validation: data set to evaluate on after each epoch.
            eval_every: evaluate also each time after that many minibatches.
            shuffle: False to keep the data set's order. A DataLoader's sampler decides for itself, and an
                IterableDataset is read in its own order.
            drop_last: leave out the samples behind the last full minibatch, in each epoch others.
            on_minibatch: called on every rank with the record of each minibatch, at least one minibatch late.
                An error that it raises on every rank ends `fit`; under an asynchronous schedule it ends the
                job, because minibatches are between ranks.
            checkpoint: save in the background during training, at the end, and after USR1 or TERM to any
                rank, which ends all of them (`Preempted`).
            resume: "auto" first resumes from the last good checkpoint in the folder of `checkpoint`, if there
                is one and nothing is trained yet. `epochs` then counts from the training's beginning.
            target_accuracy, target_loss: end with the first epoch whose validation has at least this accuracy
                and at most this loss; the summary has its time.

        Returns:
            The number, mean loss and training seconds (on this rank) of each epoch and, with `validation`,
            the result of `evaluate`.

        Raises:
            Preempted: with `checkpoint`, after a signal to any rank; all have stopped and saved.
            UserError, NotSaved: a checkpoint cannot be saved or written, or another training writes there.
            ValueError: inside `no_sync`; a target or `eval_every` without `validation`, target_accuracy with
                targets that are no classes; `resume` without `checkpoint`; `max_steps` or `eval_every` under
                an asynchronous schedule.
        """
        self._check_now("fit")
        if not self._updates or self.state.accumulated:
            raise ValueError("fit makes no sense inside no_sync, or before the update that follows it")
        breaks = valid.breaks(max_steps, eval_every, validation)
        valid.check_breaks(breaks, self._planner.schedule)
        most = 1 if max_steps is None else breaks.max_steps  # an epoch has a minibatch at least
        epochs = integer("epochs", most if epochs is None else epochs, least=0)
        valid.check_resume(resume, checkpoint)
        valid.check_validated(self._callbacks, validation)
        wanted = targets_wanted(validation, accuracy=target_accuracy, loss=target_loss)
        of_fit = {"epochs": epochs, "shuffle": shuffle, "targets": wanted, "resume": resume}
        of_fit |= {"breaks": breaks[:2], "drop_last": drop_last, "checkpoint": checkpoint}
        consistency.check_alike(self.world, {name: repr(value) for name, value in of_fit.items()})
        with preemption.listening(checkpoint is not None):  # measuring may take a minute
            epochs = self._checkpoints.enter(checkpoint, self._callbacks, resume and self.resume, epochs)
            dataset = self._feed.training_set(dataset, drop_last)
            validation = None if validation is None else self._feed.held_out_set("validation", validation)
            self.prepare(dataset, validation, folder=None if checkpoint is None else checkpoint.folder)
            valid.check_breaks(breaks, self.plan.schedule)
            if self.world.rank == 0:
                valid.warn_if_in_evaluation_mode(self.model)
            self.worker.zero_grad()
            noting = [] if on_minibatch is None else [OnMinibatch(on_minibatch)]
            samples = self._feed.num_samples(dataset)
            steps = self.state.last_step(epochs, samples, self.minibatch_size, max_steps)
            run = Run(self, self._save, epochs, steps)
            callbacks = CallbackList([*self._callbacks, *noting, self._console], run)
            keeper = self._checkpoints.begin_fit(self.worker, checkpoint, self.microbatch_size, callbacks)
            validate = None if validation is None else partial(self._evaluate, validation, may_stop=True)
            state, size = self.state, self.minibatch_size
            batches = partial(self._feed.epoch, self.worker, dataset, self.microbatch_size, shuffle, state)
            self._fitting = FitLoop(
                self.worker, state, self.metrics, keeper, size, batches, validate, wanted, callbacks, breaks
            )
            first = len(self.history)
            self._fitting.run(epochs)
            self._checkpoints.leave_if_preempted(checkpoint)
        return self.history[first:]

    def stop_from(self, step: int) -> None:
        """Let `fit` end at the first resume point from `step` on, or with the epoch if that is earlier.

        Every rank passes the same step, before it has trained on that many minibatches. `fit` then saves and
        returns with `stopped` set, and all ranks are at one step. Under an asynchronous schedule later
        minibatches stay between ranks: the process must then end, without `close`.
        """
        self.state.stop_from = step

    def save(self, root: str | os.PathLike[str], keep: int = 3) -> Path:
        """Save the state between two steps as `root/step-...`, and return that path. Collective.

        Args:
            keep: number of latest checkpoints in `root` that stay.

        Raises:
            RuntimeError: inside `fit`, which has `checkpoint` for that, or between `no_sync` and the update.
            UserError: the state cannot be saved.
        """
        self.state.check_call("save", with_gradients=False)
        return self._save(root, keep)

    def _save(self, root: str | os.PathLike[str], keep: int) -> Path:
        """Save between two minibatches, inside `fit` as well."""
        self.state.check_call("save", in_fit=True, with_gradients=False)
        return self._checkpoints.save(self.worker, Checkpointing(root, keep=keep), self.microbatch_size)

    def resume(
        self, source: str | os.PathLike[str], or_anew: bool = False, allow_changed: bool = False
    ) -> list[str]:
        """Resume from a checkpoint, the last good one in a folder, or a file of weights, or a folder of them.

        Under the checkpoint's plan, which "auto" prefers if it fits, training continues bit for bit. Under
        another plan weights, buffers and optimizer state are bit-equal by name. Collective.

        Args:
            or_anew: start again if a folder has no checkpoint.
            allow_changed: allow other optimizer options, scheduler, clipping, loss, data set and frozen
                parameters. The new ones are used and listed; a scheduler is advanced to the current step.

        Returns:
            Lines for the user.

        Raises:
            RuntimeError: inside `fit`, or between `no_sync` and the update.
            UserError: the checkpoint is damaged, or of another model, optimizer class, seed or minibatch, or
                of other settings without `allow_changed`; nothing has changed. `fit` raises it for another
                data set.
        """
        self.state.check_call("resume", with_gradients=False)
        where, later, numbers = Path(source), self._worker is None, self._planner.numbers
        found, lines = self._checkpoints.find(
            where, self.model, or_anew, allow_changed, later, numbers, self._worker
        )
        if found is not None and self._worker is not None:
            self._checkpoints.load(self._worker)
        elif found is not None and (line := self._planner.prefer(found.plan, found.run.get("ranks"))):
            lines.append(line)
        return lines

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Mean loss and metrics over a data set, the same on every rank.

        They include an accuracy if all targets, without those that the loss ignores, are classes.

        Raises:
            RuntimeError: minibatches of an asynchronous schedule are under way (called from `on_minibatch`).
        """
        self._check_now("evaluate")
        source = self._feed.held_out_set("dataset", dataset)
        self._make_ready(source)
        metrics = self._evaluate(source)
        assert metrics is not None
        return metrics

    def predict(self, dataset: Any) -> Tree | None:
        """Outputs of the model in evaluation mode, for all samples in their order; on rank 0, else None.

        Returns:
            what the model returns for all of them, with tensors in the host's memory (`prediction.joined`).

        Raises:
            RuntimeError: minibatches of an asynchronous schedule are under way.
        """
        self._check_now("predict")
        source = self._feed.held_out_set("dataset", dataset)
        self._make_ready(source)
        with self.worker.evaluating():
            batches = self._feed.evaluation(self.worker, source, self.microbatch_size)
            outputs = predict(self.worker, batches, partial(self._feed.first_samples, source))
        return outputs if self.group.tells else None

    def _evaluate(self, source: Source, may_stop: bool = False) -> dict[str, float] | None:
        """Evaluate; with `may_stop`, return None on all ranks once one was asked to stop."""
        with self.worker.evaluating():
            batches = self._feed.evaluation(self.worker, source, self.microbatch_size)
            return evaluate(self.worker, batches, self._microbatch_metrics, self.step, may_stop)

    def prepare(
        self, dataset: Any, validation: Any = None, *, folder: str | os.PathLike[str] | None = None
    ) -> None:
        """Check data sets and model, and make a plan by name from the first minibatch; `fit` does so as well.

        Args:
            folder: keeps what is measured of the machines for the next start; for `fit` that of `checkpoint`.

        Raises:
            TypeError: the data set or its samples have another type.
            ValueError: the data set differs between ranks, is empty or is iterated under an asynchronous
                schedule, a module or parameter was replaced, or no plan fits.
            UserError: the checkpoint was trained on another data set.
        """
        self.state.check_call("prepare")
        self._planner.folder = None if folder is None else Path(folder)
        source = self._feed.training_set(dataset)
        if validation is not None:
            self._feed.check("validation", self._feed.held_out_set("validation", validation))
        facts = self._make_ready(source)
        valid.check_length_known(source, self.plan)
        self._checkpoints.check_data(facts)

    def _dealt(self, inputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
        """Return this group's part of a minibatch that is in memory."""
        index, count = self.group.index, self.group.options.count
        share = self.group.share_of("samples of a minibatch", num_samples(inputs=inputs, targets=targets))
        return split(inputs, share, count)[index], split(targets, share, count)[index]

    def _make_ready(self, source: Source) -> dict[str, str]:
        """Prepare for training or evaluation on a data set; return its fingerprint."""
        facts = self._feed.check("dataset", source)
        consistency.check_alike(self.world, consistency.modes_and_requires_grad(self.model))
        if self._worker is None:
            self._start(self._planner.plan_for(self._feed.first(source, self.microbatch_size)))
        self.worker.renew()
        consistency.check_repeatable(self.plan, facts, self.worker.layers)
        return facts

    def _check_now(self, method: str) -> None:
        """Refuse calls at a wrong time, and changes of the model or its surroundings since the last call."""
        self.state.check_call(method, in_fit=method in ("evaluate", "predict"))
        structure.check_now(self.model, method)

    def close(self) -> None:
        """End background threads and free the communicators; the model keeps its weights."""
        self.state.closed = True
        self._checkpoints.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        self.group.free()

    def _start(self, planned: Planned) -> None:
        self.choice = planned.choice
        self.metrics.begin(planned.memory)
        self._checkpoints.limit_bytes = planned.memory.limit_bytes if self.device.type == "cpu" else None
        plan, numbers = planned.plan, planned.numbers
        worker = Worker(
            planned.layers,
            plan,
            self.loss,
            self.rule,
            self.group,
            self.device,
            self.group.seed(self.seed),
            planned.progress_thread,
            numbers,
            planned.splittable,
        )
        self._continues_plan = self._checkpoints.continues(plan)
        self._console.say_plan(plan, self.choice, self.microbatch_size, self._continues_plan)
        self._checkpoints.load(worker, is_new=True)
        self.metrics.end_start(self.device)
        self._worker, self._planner.numbers = worker, None
