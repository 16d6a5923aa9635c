"""Standing: where a training stands, as every rank knows it; what a checkpoint says of it beside weights.

Pure. Invariant: at a resume point, and once the losses up to it are in, it is the same on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hybridpipe.errors import UserError, shown
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import ceil_div, resume_points_every
from hybridpipe.planning.schedules.resume_point import ResumePoint

_COUNTS = ("dataset_samples", "position", "recorded", "stream_start", "num_samples")


@dataclass
class SoFar:
    """What there is of an epoch.

    Args:
        dataset_samples, shuffle: what the order of the samples follows from, beside seed and epoch.
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
        """One more loss has come in."""
        self.recorded += 1
        self.loss_sum += loss * num_samples
        self.num_samples += num_samples

    @property
    def losses_in(self) -> int:
        """Minibatches of its stream whose losses are in."""
        return self.recorded - self.stream_start

    def resume_point(self, minibatch_size: int) -> ResumePoint:
        """Where this is in its stream, which ends with the epoch."""
        total = ceil_div(self.dataset_samples, minibatch_size)
        return ResumePoint(self.position - self.stream_start, total - self.stream_start)


@dataclass
class Standing:
    """Where a training stands.

    Args:
        step: minibatches trained on.
        epoch: complete epochs.
        so_far: of the epoch that is under way, or is to be gone on with; None between epochs.
        stop_from: `fit` is to end at the first resume point at or behind this step, or at the epoch's end.
        preempted: because a rank was asked to stop.
        under_way: minibatches are between ranks.
    """

    step: int = 0
    epoch: int = 0
    so_far: SoFar | None = None
    stop_from: int | None = None
    preempted: bool = False
    under_way: bool = False

    def preempt(self, step: int) -> None:
        """A rank was asked to stop: end at the first resume point at or behind `step`, if not before."""
        self.preempted = True
        self.stop_from = step if self.stop_from is None else min(step, self.stop_from)


def is_resume_point(plan: Plan, point: ResumePoint) -> bool:
    """Has every stage, once it gets there, the same minibatches in its weights?"""
    return point.done == point.total or point.done % resume_points_every(plan) == 0


def read_so_far(document: object, where: str) -> SoFar:
    """What `asdict` made of one; UserError if it is not that."""
    wanted = {field.name for field in fields(SoFar)}
    if not isinstance(document, Mapping) or document.keys() != wanted:
        raise UserError(f"{where}: so_far: must have {', '.join(sorted(wanted))}, got {shown(document)}")
    values: dict[str, Any] = dict(document)
    for name in _COUNTS:
        if type(values[name]) is not int or values[name] < 0:
            raise UserError(f"{where}: so_far.{name}: must be an integer >= 0, got {shown(values[name])}")
    found = SoFar(**values)
    if not found.stream_start <= found.position == found.recorded:
        raise UserError(f"{where}: so_far: cannot be {found}")
    return found
