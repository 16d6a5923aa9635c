"""Train state: step, epoch, progress and history, which a checkpoint stores beside weights. Pure.

Invariant: at a resume point, once the losses before it are in, the train state is the same on every rank.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from hybridpipe.errors import UserError, shown
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import ceil_div, resume_points_every
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.stage.losses import LossSum

_INSIDE_FIT = {"save": "use its checkpoint=Checkpointing(...)"}
_COUNTS = ("dataset_samples", "position", "recorded", "stream_start")


@dataclass
class EpochProgress:
    """Progress within the current epoch.

    Args:
        dataset_samples: samples of an epoch, of all groups; with shuffle, seed and epoch they determine the
            order. 0 while only the end of the epoch can tell.
        shuffle: True if the samples are shuffled.
        position: minibatches in this rank's weights.
        recorded: minibatches whose losses are in `loss_sum`.
        stream_start: first minibatch of the current asynchronous stream.
        loss_sum: sum of the losses' sums.
        loss_weight: sum of their weights: samples, unless the loss returns (sum, weight).
        seconds: training time.
        data_state: `state_dict()` of an iterable data set after `position` minibatches; None if it has none.
    """

    dataset_samples: int
    shuffle: bool
    position: int = 0
    recorded: int = 0
    stream_start: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    seconds: float = 0.0
    data_state: Any = None

    def note(self, loss: LossSum) -> None:
        """Add the loss of the next minibatch."""
        self.recorded += 1
        self.loss_sum += loss.sum
        self.loss_weight += loss.weight

    @property
    def losses_in(self) -> int:
        """Minibatches of the stream whose losses are in."""
        return self.recorded - self.stream_start

    def resume_point(self, minibatch_size: int) -> ResumePoint:
        """Resume point in the stream, which ends with the epoch."""
        total = ceil_div(self.dataset_samples, minibatch_size) if self.dataset_samples else self.position + 1
        return ResumePoint(self.position - self.stream_start, total - self.stream_start)

    @classmethod
    def read(cls, document: object, where: str) -> "EpochProgress":
        """Inverse of `asdict`; UserError for any other document."""
        wanted = {field.name for field in fields(cls)}
        if isinstance(document, Mapping):  # checkpoints of older versions have no state of the data set
            document = {"data_state": None, **document}
        if not isinstance(document, Mapping) or document.keys() != wanted:
            raise UserError(f"{where}: so_far: must have {', '.join(sorted(wanted))}, got {shown(document)}")
        values: dict[str, Any] = dict(document)
        for name in _COUNTS:
            if type(values[name]) is not int or values[name] < 0:
                raise UserError(f"{where}: so_far.{name}: must be an integer >= 0, got {shown(values[name])}")
        for name in ("loss_sum", "loss_weight", "seconds"):
            if type(values[name]) not in (int, float):
                raise UserError(f"{where}: so_far.{name}: must be a number, got {shown(values[name])}")
        if type(values["shuffle"]) is not bool:
            raise UserError(f"{where}: so_far.shuffle: must be true or false, got {shown(values['shuffle'])}")
        found = cls(**values)
        if not found.stream_start <= found.position == found.recorded:
            raise UserError(f"{where}: so_far: cannot be {found}")
        return found


@dataclass
class TrainState:
    """State of a training.

    Args:
        step: minibatches trained on.
        epoch: complete epochs.
        progress: progress within the current epoch; None between epochs.
        history: an entry for each complete epoch, those of earlier runs included.
        stop_from: step from which `fit` ends at the next resume point or the epoch's end; None for no stop.
        preempted: True if `stop_from` was set because a rank was asked to stop.
        under_way: True while minibatches of an asynchronous schedule are between ranks.
        in_fit: True during `fit`, its validations included.
        in_epoch: True while `fit` trains.
        accumulated: True while gradients of `no_sync` await an update.
        closed: True after `Trainer.close`.
        data_states: the latest states of an iterable data set, by minibatches in the epoch.
    """

    step: int = 0
    epoch: int = 0
    progress: EpochProgress | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    stop_from: int | None = None
    preempted: bool = False
    under_way: bool = False
    in_fit: bool = False
    in_epoch: bool = False
    accumulated: bool = False
    closed: bool = False
    data_states: Mapping[int, Any] = field(default_factory=dict)

    def preempt(self, step: int) -> None:
        """End at the first resume point from `step` on, or earlier, because a rank was asked to stop."""
        self.preempted = True
        self.end_from(step)

    def end_from(self, step: int) -> None:
        """End at the first resume point from `step` on, or earlier."""
        self.stop_from = step if self.stop_from is None else min(step, self.stop_from)

    @property
    def losses_travel(self) -> bool:
        """True while this rank's weights have minibatches whose losses are not in."""
        return self.progress is not None and self.progress.recorded != self.progress.position

    def check_call(self, method: str, in_fit: bool = False, with_gradients: bool = True) -> None:
        """Raise RuntimeError for a call at a wrong time: after `close`, inside `fit`, or in mid-stream.

        Args:
            in_fit: True allows the call while `fit` trains.
            with_gradients: False refuses the call while gradients of `no_sync` await an update.
        """
        when = None
        if self.closed:
            when = "after close; make a new Trainer"
        elif self.in_epoch and not in_fit:
            when = f"while fit trains; {_INSIDE_FIT.get(method, 'call it before or after')}"
        elif self.under_way:
            when = "while minibatches are under way; call it between epochs"
        elif in_fit and not with_gradients and self.losses_travel:
            when = "while losses are under way; call it in on_evaluate, on_epoch_end or on_fit_end"
        elif self.accumulated and not with_gradients:
            when = "between no_sync and the update that uses its gradients"
        if when is not None:
            raise RuntimeError(f"{method} was called {when}")

    def end_step(self, accumulates: bool) -> None:
        """Count a minibatch that was trained by hand; True if its gradients await an update."""
        self.step += 1
        self.progress, self.accumulated = None, accumulates

    def begin_epoch(self, dataset_samples: int | None, shuffle: bool) -> EpochProgress:
        """Continue an epoch interrupted by a checkpoint or a stop, else begin one.

        Args:
            dataset_samples: samples of an epoch; None where only its end can tell.

        Raises:
            UserError: the interrupted epoch had another number of samples, or another order.
        """
        begun = self.progress
        if begun is None or not begun.position:
            begun = self.progress = EpochProgress(dataset_samples or 0, shuffle)
            self.data_states = {}
        elif (dataset_samples not in (None, begun.dataset_samples)) or begun.shuffle != shuffle:
            raise UserError(
                f"epoch {self.epoch + 1} was begun with {begun.dataset_samples} samples and shuffle = "
                f"{begun.shuffle}, and cannot continue with {dataset_samples} and {shuffle}: give it the "
                "same data and groups, or resume where an epoch ends"
            )
        return begun

    def last_step(
        self, epochs: int, epoch_samples: int | None, minibatch_size: int, max_steps: int | None
    ) -> int | None:
        """Return the step at which `fit` ends at the latest; None if nobody knows.

        Args:
            epochs: epochs of this `fit`, the current one among them.
            epoch_samples: samples of an epoch; None where only its end can tell.
            max_steps: as in `fit`.
        """
        ends = [] if max_steps is None else [max_steps]
        if epoch_samples is not None:
            begun = 0 if self.progress is None else self.progress.position
            if self.only_ends_epoch(minibatch_size):
                begun = 0
            ends.append(self.step + epochs * ceil_div(epoch_samples, minibatch_size) - begun)
        return min(ends, default=None)

    def only_ends_epoch(self, minibatch_size: int) -> bool:
        """Return True if all minibatches of an epoch are trained on, and its validation is still to come."""
        point = self.resume_point(minibatch_size)
        return self.progress is not None and point.done == point.total

    def complete_epochs(self, minibatch_size: int) -> int:
        """Return the number of epochs whose minibatches are all trained on, without one that `fit` is in."""
        return self.epoch + (not self.in_fit and self.only_ends_epoch(minibatch_size))

    def end_epoch(self, validation: dict[str, float] | None) -> dict[str, Any]:
        """Count the epoch as complete, and return its entry of the history."""
        assert self.progress is not None
        entry: dict[str, Any] = {
            "epoch": self.epoch,
            "loss": LossSum(self.progress.loss_sum, self.progress.loss_weight).mean,
            "seconds": self.progress.seconds,
        }
        if validation is not None:
            entry["validation"] = validation
        self.history.append(entry)
        self.epoch, self.progress = self.epoch + 1, None
        return entry

    def resume_point(self, minibatch_size: int) -> ResumePoint:
        """Resume point of the current position."""
        return ResumePoint(0, 0) if self.progress is None else self.progress.resume_point(minibatch_size)

    def state_dict(self) -> dict[str, Any]:
        """Contents for a checkpoint, up to the last minibatch whose loss is in."""
        progress = self.progress or _NO_PROGRESS
        position, data_state = progress.recorded, self.data_states.get(progress.recorded)
        return {
            "history": self.history,
            "so_far": asdict(replace(progress, position=position, data_state=data_state)),
        }

    def load(self, step: int, epoch: int, progress: EpochProgress, history: list[dict[str, Any]]) -> None:
        """Take over a checkpoint's state."""
        self.step, self.epoch, self.history = step, epoch, history
        self.progress = progress if progress.position else None
        self.data_states = {progress.position: progress.data_state}
        self.stop_from, self.preempted = None, False


_NO_PROGRESS = EpochProgress(0, shuffle=True)


def is_resume_point(plan: Plan, point: ResumePoint) -> bool:
    """True if every stage has the same minibatches in its weights at this point of the stream."""
    return point.done == point.total or point.done % resume_points_every(plan) == 0
