"""The state of a training, as every rank knows it: what a checkpoint says of it beside weights.

Pure. Invariant: at a resume point, and once the losses up to it are in, it is the same on every rank.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

from hybridpipe.errors import UserError, shown
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import ceil_div, resume_points_every
from hybridpipe.planning.schedules.resume_point import ResumePoint

_COUNTS = ("dataset_samples", "position", "recorded", "stream_start", "num_samples")


@dataclass
class EpochProgress:
    """Progress within the current epoch.

    Args:
        dataset_samples, shuffle: the order of the samples follows from them, beside seed and epoch.
        position: minibatches that are in this rank's weights.
        recorded: those whose losses, times their samples, are in `loss_sum`.
        stream_start: where the asynchronous stream began that `position` lies in.
        seconds: of training.
    """

    dataset_samples: int
    shuffle: bool
    position: int = 0
    recorded: int = 0
    stream_start: int = 0
    loss_sum: float = 0.0
    num_samples: int = 0
    seconds: float = 0.0

    def note(self, loss: float, num_samples: int) -> None:
        """Count one more loss that has come in."""
        self.recorded += 1
        self.loss_sum += loss * num_samples
        self.num_samples += num_samples

    @property
    def losses_in(self) -> int:
        """Minibatches of its stream whose losses are in."""
        return self.recorded - self.stream_start

    def resume_point(self, minibatch_size: int) -> ResumePoint:
        """The place in its stream, which ends with the epoch."""
        total = ceil_div(self.dataset_samples, minibatch_size)
        return ResumePoint(self.position - self.stream_start, total - self.stream_start)

    @classmethod
    def read(cls, document: object, where: str) -> "EpochProgress":
        """The inverse of `asdict`. Raises UserError for anything else."""
        wanted = {field.name for field in fields(cls)}
        if not isinstance(document, Mapping) or document.keys() != wanted:
            raise UserError(f"{where}: so_far: must have {', '.join(sorted(wanted))}, got {shown(document)}")
        values: dict[str, Any] = dict(document)
        for name in _COUNTS:
            if type(values[name]) is not int or values[name] < 0:
                raise UserError(f"{where}: so_far.{name}: must be an integer >= 0, got {shown(values[name])}")
        found = cls(**values)
        if not found.stream_start <= found.position == found.recorded:
            raise UserError(f"{where}: so_far: cannot be {found}")
        return found


@dataclass
class TrainState:
    """Where a training stands.

    Args:
        step: minibatches trained on.
        epoch: complete epochs.
        progress: of the epoch that is under way, or is to be gone on with; None between epochs.
        history: an entry for each complete epoch, of the runs before a checkpoint, too.
        stop_from: `fit` is to end at the first resume point at or behind this step, or at the epoch's end.
        preempted: because a rank was asked to stop.
        under_way: minibatches are between ranks.
    """

    step: int = 0
    epoch: int = 0
    progress: EpochProgress | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    stop_from: int | None = None
    preempted: bool = False
    under_way: bool = False

    def preempt(self, step: int) -> None:
        """A rank was asked to stop: end at the first resume point at or behind `step`, if not before."""
        self.preempted = True
        self.stop_from = step if self.stop_from is None else min(step, self.stop_from)

    def check_nothing_under_way(self, method: str) -> None:
        """Raises RuntimeError while minibatches of an asynchronous schedule are between ranks."""
        if self.under_way:
            self.refuse(method)

    @staticmethod
    def refuse(method: str) -> NoReturn:
        """Raises RuntimeError for a method that is called while minibatches are under way."""
        raise RuntimeError(f"{method} was called while minibatches are under way; call it between epochs")

    def begin_epoch(self, dataset_samples: int, shuffle: bool) -> EpochProgress:
        """Go on with the epoch that a checkpoint, or a stop, has left begun; else begin one."""
        begun = self.progress
        if begun is None or not begun.position:
            begun = self.progress = EpochProgress(dataset_samples, shuffle)
        elif (begun.dataset_samples, begun.shuffle) != (dataset_samples, shuffle):
            raise UserError(
                f"epoch {self.epoch} was begun with {begun.dataset_samples} samples and shuffle = "
                f"{begun.shuffle}, and cannot go on with {dataset_samples} and {shuffle}"
            )
        return begun

    def end_epoch(self, validation: dict[str, float] | None) -> dict[str, Any]:
        """Count the epoch as complete. Returns its entry of the history."""
        assert self.progress is not None
        entry: dict[str, Any] = {
            "epoch": self.epoch,
            "loss": self.progress.loss_sum / self.progress.num_samples,
            "seconds": self.progress.seconds,
        }
        if validation is not None:
            entry["validation"] = validation
        self.history.append(entry)
        self.epoch, self.progress = self.epoch + 1, None
        return entry

    def resume_point(self, minibatch_size: int) -> ResumePoint:
        """The place between two epochs, or where training was stopped."""
        return (self.progress or _NO_PROGRESS).resume_point(minibatch_size)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint says of it, of the minibatches whose losses are in."""
        progress = self.progress or _NO_PROGRESS
        return {
            "history": self.history,
            "so_far": asdict(replace(progress, position=progress.recorded)),
        }

    def load(self, step: int, epoch: int, progress: EpochProgress, history: list[dict[str, Any]]) -> None:
        """Stand where a checkpoint does."""
        self.step, self.epoch, self.history = step, epoch, history
        self.progress = progress if progress.position else None
        self.stop_from, self.preempted = None, False


_NO_PROGRESS = EpochProgress(0, shuffle=True)


def is_resume_point(plan: Plan, point: ResumePoint) -> bool:
    """Whether every stage, once it gets there, has the same minibatches in its weights."""
    return point.done == point.total or point.done % resume_points_every(plan) == 0
