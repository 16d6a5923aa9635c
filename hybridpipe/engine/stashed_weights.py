"""StashedWeights: the weights that microbatches see under an asynchronous schedule, and their gradients.

Between the plan, which says the version, and `stage.weights`, which keeps it. Knows no messages and no
optimizer. Sources: weight stashing and vertical sync, PipeDream (SOSP 2019); PipeDream-2BW (ICML 2021).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from torch import Tensor, nn

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.generators import versions
from hybridpipe.planning.schedules.resume_point import ResumePoint, num_updates
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


class StashedWeights:
    """The versions that an asynchronous plan names, of the stage at `place`.

    For each microbatch in flight it keeps, too, the buffers that its forward has changed, as a run that
    resumes from a checkpoint runs the forward again. `notes_flight = False` leaves that out.
    """

    notes_flight = True

    def __init__(
        self, plan: Plan, place: Place, layers: nn.Sequential, statistics: RunningStatistics
    ) -> None:
        self._plan, self._stage = plan, place.stage
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

    def begin(self, point: ResumePoint) -> None:
        """Start a stream, or continue it after the minibatches that are done."""
        self._of, self._before = {}, {}
        self._first = self.versions.newest - num_updates(self._plan, self._stage, point)
        self.versions.keep_from(self._first)

    def of(self, microbatch: int) -> Weights:
        """Before its forward, and its data: the version that the microbatch is due.

        From now on versions older than the next microbatch's are kept by those in flight only.
        """
        if self.notes_flight:
            self._num_samples, self._unchanged = self._statistics.num_samples, self._buffers.before()
        weights = self._of[microbatch] = self.versions.version(self._first + self._number(microbatch))
        self.versions.keep_from(self._first + self._number(microbatch + self._replicas))
        return weights

    def ran(self, microbatch: int) -> None:
        """After its forward: note which buffers it has changed."""
        if self.notes_flight:
            self._before[microbatch] = Before(self._num_samples, self._buffers.after(self._unchanged))

    def handing_over(self, microbatch: int, factor: float) -> AbstractContextManager[None]:
        """Around the last backward before gradients are used: they arrive at the parameters while it runs.

        One by one, where there are replicas to sum them with; all at once, in `collect`, is cheaper.
        """
        if self._replicas == 1:
            return nullcontext()
        return self.versions.handing_over(self._of[microbatch], factor)

    def collect(self, microbatch: int, factor: float) -> None:
        """After its backward: add its gradients, times `factor`, to the parameters'."""
        self._before.pop(microbatch, None)
        self.versions.collect(self._of.pop(microbatch), factor)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around an update: it makes a new version."""
        with self.versions.update():
            yield

    def end(self) -> None:
        """Forget all versions but the newest."""
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
