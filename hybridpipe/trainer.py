"""Trainer: an ordinary PyTorch model, trained under a plan by as many ranks as mpirun has started.

The same script runs under `mpirun -n 4 python train.py` and, with one rank, by itself.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.autoplan import Choice, autoplan, check_options
from hybridpipe.batches import microbatch_size_of, minibatches, parts_of, slice_minibatch
from hybridpipe.checkpoint.names import name_of, step_of
from hybridpipe.checkpointing import Checkpointing, Keeper, check_run, described
from hybridpipe.config import SOURCES
from hybridpipe.epoch import Epoch, total
from hybridpipe.errors import UserError
from hybridpipe.files import read_plan
from hybridpipe.judging import judge, reached
from hybridpipe.planning.checks import positive_int
from hybridpipe.planning.cuts import Cut
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules import ceil_div
from hybridpipe.planning.timeline import Timeline
from hybridpipe.recorder import MinibatchRecord, Past, Recorder, Traced
from hybridpipe.rehearsing import device_and_threads, measured
from hybridpipe.runtime import failure, faults
from hybridpipe.runtime.allocator import keep_freed_memory
from hybridpipe.runtime.checkpoint import Saver
from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.resume import Found, Nothing, check_model, find, is_exact, load, load_plain
from hybridpipe.runtime.stream import Minibatch
from hybridpipe.runtime.update import SchedulerFactory, UpdateRule
from hybridpipe.runtime.worker import Sums, Worker
from hybridpipe.stage.measure import OptimizerFactory
from hybridpipe.stage.split import check_plan, layers_of
from hybridpipe.stage.stage import Loss
from hybridpipe.stage.values import Value
from hybridpipe.standing import SoFar, Standing, read_so_far

PlanLike = Plan | str | os.PathLike[str]


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
    ) -> None:
        self.world = MPI.COMM_WORLD if world is None else world
        failure.install()
        layers_of(model)
        positive_int("minibatch_size", minibatch_size)
        if microbatch_size is not None:
            positive_int("microbatch_size", microbatch_size)
        self.model, self.loss, self.seed = model, loss, seed
        self.rule = UpdateRule(optimizer, lr_scheduler, clip_grad_norm, scale_learning_rate, delay_warm_up)
        self._autoplan = partial(
            autoplan,
            schedule=schedule,
            vertical_sync=vertical_sync,
            max_in_flight=max_in_flight,
            recompute=recompute,
        )
        self._asked = {"schedule": schedule, "vertical_sync": vertical_sync, "max_in_flight": max_in_flight}
        self._updates, self._in_fit = True, False
        self._accumulated = False  # gradients of `no_sync`, which no update has used yet
        self.minibatch_size = minibatch_size
        keep_freed_memory()
        self.device, num_threads = device_and_threads(self.world, device)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.standing = Standing()
        self.history: list[dict[str, Any]] = []  # what `fit` has returned, also before a checkpoint
        self.stopped = False
        self.choice: Choice | None = None
        self._found: Found | None = None  # to be loaded when there is a plan
        self._came_from: Path | None = None
        self._saver: Saver | None = None
        self.recorder = Recorder()
        self._worker: Worker | None = None
        self._smaller_sizes: list[int] = []  # of the microbatch, which "auto" may choose
        self._plan = plan if isinstance(plan, Plan) or plan in SOURCES else read_plan(Path(plan))
        if isinstance(self._plan, Plan):
            options = {"vertical_sync": vertical_sync, "max_in_flight": max_in_flight, "recompute": recompute}
            check_options(self._plan, schedule, options)
            self.microbatch_size = self._fitting(self._plan, microbatch_size)
            if not predict:
                self._start(self._plan)
        else:
            self.microbatch_size = microbatch_size or ceil_div(minibatch_size, self.world.size)
            if microbatch_size is None and plan == "auto":
                self._smaller_sizes = parts_of(self.microbatch_size, minibatch_size)

    @property
    def step(self) -> int:
        """Minibatches trained on."""
        return self.standing.step

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return self.standing.epoch

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
        sums, events = self.worker.train(minibatch, self.step, self._updates)
        self.standing.step += 1
        self.standing.so_far = None
        self._accumulated = not self._updates
        loss, seconds = total(sums), time.perf_counter() - began
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
            checkpoint: save on the way, while training goes on, and at the end.
            target_accuracy, target_loss: the first epoch whose validation has at least this accuracy, at most
                this loss, is the last; with both, the first that has both. The summary tells when it was.

        After `resume` the first epoch is the one that the checkpoint stands in, whatever is left of it. After
        `stop_from` it ends early, with `stopped` set, and all ranks at one step.

        Returns:
            for each epoch its number, mean loss, seconds of training on this rank and, with `validation`,
            what `evaluate` says of it.

        Raises:
            UserError: the state is such that it cannot be saved, or could not be written.
            ValueError: inside `no_sync`; a target without `validation`, or target_accuracy where its targets
                are no classes.
        """
        self._check_nothing_under_way("fit")
        if not self._updates:
            raise ValueError("fit makes no sense inside no_sync, where nothing is learnt; use train_step")
        targets = {"accuracy": target_accuracy, "loss": target_loss}
        wanted = {name: value for name, value in targets.items() if value is not None}
        if wanted and validation is None:
            raise ValueError(f"target_{min(wanted)} = {wanted[min(wanted)]} needs validation, got None")
        self.prepare(dataset)
        keeper = None if checkpoint is None else self._keeper(checkpoint)
        first, self.stopped = len(self.history), False
        for _ in range(epochs):
            self._train_epoch(dataset, shuffle, keeper, on_minibatch)
            if self._stops():
                break
            entry = self._end_epoch(validation)
            if wanted and reached(entry["validation"], wanted):
                self.recorder.reach_target(self.epoch)
                break
            if self._stops():
                break
        if keeper is not None:
            keeper.finish(self.step, *self._so_far())
        return self.history[first:]

    def stop_from(self, step: int) -> None:
        """Let `fit` end at the first cut at or behind `step`, or with the epoch, whatever comes first.

        A cut is where every stage has updated with the same minibatches. Every rank says the same step before
        it has trained on so many; `fit` then saves, returns, and `stopped` is set. Under an asynchronous
        schedule messages of later minibatches stay under way: the process has to end then, without `close`.
        """
        self.standing.stop_from = step

    def save(self, root: str | os.PathLike[str], keep: int = 3) -> Path:
        """Save the state between two steps as `root/step-...`, of which the last `keep` stay. Collective.

        Raises:
            RuntimeError: inside `fit`, which has `checkpoint` for that, or between `no_sync` and the update.
            UserError: it cannot be saved.
        """
        if self._in_fit:
            raise RuntimeError(
                "save was called while fit is training, which has checkpoint=Checkpointing(...)"
            )
        if self._accumulated:
            raise RuntimeError("save was called between no_sync and the update that is to use its gradients")
        keeper = self._keeper(Checkpointing(root, keep=keep), anyway=True)
        keeper.finish(self.step, *self._so_far())
        return Path(root) / name_of(self.step)

    def resume(self, source: str | os.PathLike[str], or_anew: bool = False) -> list[str]:
        """Go on from a checkpoint, from the last good one in a folder, or with a safetensors file's weights.

        Under the checkpoint's own plan, which "auto" prefers where it fits, training goes on bit for bit.
        Under any other the weights, buffers and optimizer state are bit-equal by name. Collective.

        Args:
            or_anew: a folder may hold none; training then starts anew.

        Returns:
            what there is to tell, in lines.

        Raises:
            UserError: it is damaged, or of another model, optimizer, seed or minibatch; nothing has changed.
        """
        self._check_nothing_under_way("resume")
        path = Path(source)
        if path.suffix == ".safetensors":
            load_plain(self.world, self.model, path)
            return [f"weights of {path}; all else starts anew"]
        found = find(self.world, path)
        if isinstance(found, Nothing):
            if not or_anew:
                raise UserError("; ".join([f"{path}: holds no checkpoint to resume from", *found.notes]))
            return [*found.notes, f"no checkpoint in {path}: training starts anew"]
        where = str(found.path)
        check_model(found, self.model)
        check_run(found.run, {"seed": self.seed, "minibatch_size": self.minibatch_size}, where)
        read_so_far(found.run.get("so_far"), where)
        self._found = found
        told = [*found.notes, f"resuming from {found.path}: {found.place}"]
        if self._worker is not None:
            self._load()
        elif self._plan == "auto":
            told.append(self._take_plan(found.plan))
        return told

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
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _train_epoch(
        self,
        dataset: Any,
        shuffle: bool,
        keeper: Keeper | None,
        on_minibatch: Callable[[MinibatchRecord], None] | None,
    ) -> None:
        standing = self.standing
        standing.so_far = self._begun(dataset, shuffle)
        batches = minibatches(
            dataset,
            self.minibatch_size,
            self.microbatch_size,
            seed=self.seed,
            epoch=self.epoch,
            shuffle=shuffle,
        )
        epoch = Epoch(self.worker, self.recorder, standing, self.minibatch_size, keeper)
        self._in_fit = True
        try:
            with closing(epoch.run(batches)) as records:  # an error closes it at once
                for record in records:
                    if on_minibatch is not None:
                        on_minibatch(record)
        except BaseException:
            standing.so_far = None  # the next `fit` begins the epoch anew
            raise
        finally:
            self._in_fit = False

    def _begun(self, dataset: Any, shuffle: bool) -> SoFar:
        """The epoch that a checkpoint, or a stop, has left begun; else a new one."""
        begun = self.standing.so_far
        if begun is None or not begun.position:
            return SoFar(len(dataset), shuffle)
        if (begun.dataset_samples, begun.shuffle) != (len(dataset), shuffle):
            raise UserError(
                f"epoch {self.epoch} was begun with {begun.dataset_samples} samples and shuffle = "
                f"{begun.shuffle}, and cannot go on with {len(dataset)} and {shuffle}"
            )
        return begun

    def _end_epoch(self, validation: Any) -> dict[str, Any]:
        so_far = self.standing.so_far
        assert so_far is not None
        self.recorder.training_seconds += so_far.seconds
        mean = so_far.loss_sum / so_far.num_samples
        entry: dict[str, Any] = {"epoch": self.epoch, "loss": mean, "seconds": so_far.seconds}
        if validation is not None:
            entry["validation"] = self.recorder.metrics = self.evaluate(validation)
        self.history.append(entry)
        self.standing.epoch += 1
        self.standing.so_far = None
        return entry

    def _stops(self) -> bool:
        if self.standing.stop_from is None:
            return False
        self.standing.stop_from, self.stopped = None, True
        return True

    def _so_far(self) -> tuple[SoFar, Cut]:
        """Where the training stands between two calls."""
        so_far = self.standing.so_far or SoFar(0, shuffle=True)
        return so_far, so_far.cut(self.minibatch_size)

    def _keeper(self, asked: Checkpointing, anyway: bool = False) -> Keeper:
        if self._saver is None:
            self._saver = Saver(self.worker.control.Dup())
        came = self._came_from
        saved = None
        if came is not None and not anyway and came.parent.resolve() == Path(asked.folder).resolve():
            saved = step_of(came)
        return Keeper(asked, self._saver, self.worker, self.step, saved, self._describe)

    def _describe(self, so_far: SoFar) -> dict[str, Any]:
        run = {
            "seed": self.seed,
            "minibatch_size": self.minibatch_size,
            "microbatch_size": self.microbatch_size,
            "ranks": self.world.size,
            "past": asdict(self.recorder.past()),
            "history": self.history,
        }
        return described(self.worker, self.epoch, so_far, run)

    def _take_plan(self, plan: Plan) -> str:
        """Run a checkpoint's plan, if that can be, instead of searching for one; says which it will be."""
        what = f"its plan {plan.name}, {plan.schedule}"
        try:
            for name, value in self._asked.items():
                if value not in ("auto", getattr(plan, name)):
                    raise ValueError(f"{name} = {value} is asked for")
            self.microbatch_size = self._fitting(plan)
        except ValueError as error:
            return f"{what}, does not fit here, so one is searched for: {error}"
        self._plan, self._smaller_sizes = plan, []
        return f"with {what}"

    def _fitting(self, plan: Plan, microbatch_size: int | None = None) -> int:
        """The size of the plan's microbatches. Raises ValueError if it fits model, world or minibatch not."""
        size = microbatch_size_of(plan, self.minibatch_size, microbatch_size)
        self.rule.check(plan)
        check_plan(self.model, plan)
        plan.check_world(self.world.size)
        return size

    def _load(self) -> None:
        found, self._found = self._found, None
        if found is None:
            return
        load(self.worker, found)
        so_far = read_so_far(found.run["so_far"], str(found.path))
        if not is_exact(found, self.plan):
            so_far.stream_start = so_far.position
        standing = Standing(found.manifest.step, found.manifest.epoch, so_far if so_far.position else None)
        self.standing, self._came_from = standing, found.path
        self.history = found.run["history"]
        self.recorder.go_on(Past(**found.run["past"]))

    def _check_nothing_under_way(self, method: str) -> None:
        if self.standing.under_way:
            raise RuntimeError(
                f"{method} was called while minibatches are under way under {self.plan.schedule}; "
                "call it between epochs"
            )

    def _make_plan(self, minibatch: Minibatch) -> None:
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
            profile, work = measured(
                self.model, minibatch, self.loss, self.device, self.rule, self.world, self._smaller_sizes
            )
        count = ceil_div(self.minibatch_size, self.microbatch_size)
        return self._autoplan(self._plan, self.world, profile, count, work=work)

    def _start(self, plan: Plan) -> None:
        self.rule.check(plan)
        self.microbatch_size = microbatch_size_of(plan, self.minibatch_size)
        self.recorder.begin()
        self._worker = Worker(self.model, plan, self.loss, self.rule, self.world, self.device, self.seed)
        self._load()
