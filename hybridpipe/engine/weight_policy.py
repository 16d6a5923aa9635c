"""WeightPolicy: which weights the microbatches of a stream see, and where their gradients go.

Between the plan, which says the version, and `stage.weights`, which keeps it. A synchronous schedule has one
version at a time, the parameters themselves.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.generators import versions
from hybridpipe.stage.recompute import ChangingBuffers
from hybridpipe.stage.statistics import RunningStatistics
from hybridpipe.stage.weights import Weights, WeightVersions


class Before(NamedTuple):
    """The state that a microbatch's forward found and changed: all that it takes to run it again.

    Args:
        num_samples: that the stage's statistics had seen.
        buffers: by their path in the stage.
    """

    num_samples: int
    buffers: Mapping[str, Tensor]


class WeightPolicy(Protocol):
    """What the executor needs of the weights.

    `notes_flight`: what is in flight can be saved; to be set before a stream begins.
    """

    notes_flight: bool

    def renew(self) -> None:
        """Take up which parameters are trained now, with no microbatch under way."""

    def begin(self, num_updates: int = 0) -> None:
        """A stream begins, or goes on after so many updates: what is numbered counts from its beginning."""

    def of(self, microbatch: int) -> Weights | None:
        """Before its forward, and its data: what a microbatch is to be given; None: the parameters."""

    def ran(self, microbatch: int) -> None:
        """After its forward."""

    def final(self, microbatch: int, factor: float) -> AbstractContextManager[None]:
        """Around the last backward before gradients are used: they arrive at the parameters amid it."""

    def collect(self, microbatch: int, factor: float) -> None:
        """After its backward: its gradients, times `factor`, add up in the parameters'."""

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around an update."""

    def end(self) -> None:
        """No microbatch is under way any more."""


class LatestWeights:
    """One version at a time."""

    notes_flight = False

    def renew(self) -> None:
        """Nothing depends on it."""

    def begin(self, num_updates: int = 0) -> None:
        """Nothing to count."""

    def of(self, microbatch: int) -> Weights | None:
        """The parameters."""
        return None

    def ran(self, microbatch: int) -> None:
        """At a resume point nothing is in flight."""

    def final(self, microbatch: int, factor: float) -> AbstractContextManager[None]:
        """They always do."""
        return nullcontext()

    def collect(self, microbatch: int, factor: float) -> None:
        """Gradients arrive where they belong, weighted by the loss."""

    @contextmanager
    def update(self) -> Iterator[None]:
        """In place."""
        yield

    def end(self) -> None:
        """Nothing is kept."""


class StashedWeights:
    """The versions that an asynchronous plan names, of the stage at `place`.

    For each microbatch in flight it keeps, too, the buffers that its forward has changed, as a run that
    resumes from a checkpoint runs the forward again. `notes_flight = False` leaves that out.
    """

    notes_flight = True

    def __init__(
        self, plan: Plan, place: Place, layers: nn.Sequential, statistics: RunningStatistics
    ) -> None:
        self.versions = WeightVersions(layers)
        self._layers, self._statistics = layers, statistics
        self._number = versions(plan, place.stage)
        self._replicas = plan.replicas[place.stage]
        self._buffers = ChangingBuffers(layers)
        self._of: dict[int, Weights] = {}
        self._before: dict[int, Before] = {}
        self._first = 0

    def renew(self) -> None:
        """Versions hold what is trained, and buffers what forwards change, as modes let them."""
        self.versions.renew(self._layers)
        self._buffers = ChangingBuffers(self._layers)

    def begin(self, num_updates: int = 0) -> None:
        """The newest weights are the stream's first, or those after `num_updates`."""
        self._of, self._before = {}, {}
        self._first = self.versions.newest - num_updates
        self.versions.keep_from(self._first)

    def of(self, microbatch: int) -> Weights:
        """The version it is due. Older than the next microbatch's: kept by those in flight only."""
        if self.notes_flight:
            self._num_samples, self._unchanged = self._statistics.num_samples, self._buffers.before()
        weights = self._of[microbatch] = self.versions.version(self._first + self._number(microbatch))
        self.versions.keep_from(self._first + self._number(microbatch + self._replicas))
        return weights

    def ran(self, microbatch: int) -> None:
        """What it has changed is known."""
        if self.notes_flight:
            self._before[microbatch] = Before(self._num_samples, self._buffers.after(self._unchanged))

    def final(self, microbatch: int, factor: float) -> AbstractContextManager[None]:
        """One by one, where there are replicas to sum them with; all at once is cheaper."""
        if self._replicas == 1:
            return nullcontext()
        return self.versions.handing_over(self._of[microbatch], factor)

    def collect(self, microbatch: int, factor: float) -> None:
        """From the version's leaves."""
        self._before.pop(microbatch, None)
        self.versions.collect(self._of.pop(microbatch), factor)

    @contextmanager
    def update(self) -> Iterator[None]:
        """What it changes is a new version."""
        with self.versions.update():
            yield

    def end(self) -> None:
        """Only the newest is left."""
        self.versions.keep_from(self.versions.newest)

    def kept(self, numbers: Iterable[int]) -> dict[int, Weights]:
        """Versions that microbatches in flight, or still to come, see; numbered as the plan does."""
        in_flight = {self._number(microbatch): weights for microbatch, weights in self._of.items()}
        return {
            number: in_flight.get(number) or self.versions.version(self._first + number) for number in numbers
        }

    def restore(self, newest: int, older: Mapping[int, Mapping[Tensor, Tensor]]) -> None:
        """What an earlier run kept; the parameters are `newest` already, nothing is in flight."""
        self._of, self._before, self._first = {}, {}, 0
        self.versions.restore(newest, older)

    def before_flight(self) -> Before | None:
        """The state that the first microbatch in flight found; None if there is none."""
        assert self.notes_flight or not self._of, "it was not noted"
        return self._before[min(self._before)] if self._before else None
