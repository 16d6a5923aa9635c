"""StashedWeights: each microbatch's version of the weights under an asynchronous schedule.

The plan names the version, `stage.weights` keeps it. Knows no messages and no optimizer.
Sources: weight stashing and vertical sync, PipeDream (SOSP 2019); PipeDream-2BW (ICML 2021); prediction
before the forward, PipeOptim (Guan et al. 2023).
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor, nn

from hybridpipe.model.precision import FP32, Precision
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.generators import delay_of, weights_numbers
from hybridpipe.planning.schedules.resume_point import ResumePoint, first_microbatch, num_updates
from hybridpipe.stage.recompute import ChangingBuffers
from hybridpipe.stage.statistics import RunningStatistics
from hybridpipe.stage.weights import Predict, Weights, WeightVersions


class ForwardState(NamedTuple):
    """The state before a microbatch's forward, as far as the forward changed it; enough to run it again.

    Args:
        num_samples: samples in the stage's running statistics.
        buffers: the buffers that the forward changed, by their path in the stage.
    """

    num_samples: int
    buffers: Mapping[str, Tensor]


class StashedWeights:
    """The versions of the weights of the stage at `place`, as an asynchronous plan names them.

    It also keeps, for each microbatch in flight, the buffers that its forward has changed: a run that resumes
    from a checkpoint repeats that forward. `keeps_forward_state = False` turns this off.

    Args:
        predict: predicts weights, if the plan asks for it.
    """

    keeps_forward_state = True

    def __init__(
        self,
        plan: Plan,
        place: Place,
        layers: nn.Sequential,
        statistics: RunningStatistics,
        precision: Precision = FP32,
        predict: Predict | None = None,
    ) -> None:
        self._plan, self._place = plan, place
        ahead = delay_of(plan, place.stage) if plan.predicts_weights else 0
        self.versions = WeightVersions(layers, precision, predict, ahead)
        self._layers, self._statistics = layers, statistics
        self._number = weights_numbers(plan, place.stage)
        self._replicas = plan.replicas[place.stage]
        self._buffers = ChangingBuffers(layers)
        self._of: dict[int, Weights] = {}
        self._forward_states: dict[int, ForwardState] = {}
        self._first = 0

    def renew(self) -> None:
        """Adopt the layers' present modes and requires_grad flags."""
        self.versions.renew(self._layers)
        self._buffers = ChangingBuffers(self._layers)

    def begin(self, point: ResumePoint) -> None:
        """Start a stream, or continue it at a resume point."""
        self._of, self._forward_states = {}, {}
        if not point.is_inside:  # else the newest may be one that was predicted, and is restored
            self.versions.begin()
        self._first = self.versions.newest - num_updates(self._plan, self._place.stage, point)
        first = first_microbatch(self._plan, self._place, point)
        self.versions.keep_from(self._first + self._number(first))

    def weights_for(self, microbatch: int) -> Weights:
        """Return the microbatch's version of the weights; call this before its forward.

        Versions older than the next microbatch's are then kept only for microbatches in flight.
        """
        if self.keeps_forward_state:
            self._num_samples, self._unchanged = self._statistics.num_samples, self._buffers.before()
        weights = self._of[microbatch] = self.versions.version(self._first + self._number(microbatch))
        self.versions.keep_from(self._first + self._number(microbatch + self._replicas))
        return weights

    def forward_done(self, microbatch: int) -> None:
        """Note the buffers that the microbatch's forward has changed; call this after it."""
        if self.keeps_forward_state:
            changed = self._buffers.after(self._unchanged)
            self._forward_states[microbatch] = ForwardState(self._num_samples, changed)

    def handing_over(self, microbatch: int, factor: float) -> AbstractContextManager[None]:
        """Return a context for the last backward before an update: gradients reach the parameters during it.

        A stage with one replica has no all-reduce to start early, so `collect` moves all of them afterwards.
        """
        if self._replicas == 1:
            return nullcontext()
        return self.versions.handing_over(self._of[microbatch], factor)

    def collect(self, microbatch: int, factor: float) -> None:
        """Add the microbatch's gradients times `factor` to the parameters'; call this after its backward."""
        self._forward_states.pop(microbatch, None)
        self.versions.collect(self._of.pop(microbatch), factor)

    def update(self) -> AbstractContextManager[None]:
        """Return a context for an update, which makes a new version of the weights."""
        return self.versions.update()

    def end(self) -> None:
        """Drop all versions: the Parameters have the newest."""
        self.versions.keep_from(self.versions.newest)
        self.versions.begin()

    def kept(self, numbers: Iterable[int]) -> dict[int, Weights]:
        """Return versions that microbatches in flight or still to come use, by the plan's numbers."""
        in_flight = {self._number(microbatch): weights for microbatch, weights in self._of.items()}
        return {
            number: in_flight.get(number) or self.versions.version(self._first + number) for number in numbers
        }

    def restore(self, newest: int, older: Mapping[int, Mapping[Tensor, Tensor]]) -> None:
        """Load the versions that an earlier run kept; the parameters already hold `newest`."""
        self._of, self._forward_states, self._first = {}, {}, 0
        self.versions.restore(newest, older)

    def oldest_forward_state(self) -> ForwardState | None:
        """Return the state before the forward of the oldest microbatch in flight; None without one."""
        assert self.keeps_forward_state or not self._of, "forward states were not kept"
        return self._forward_states[min(self._forward_states)] if self._forward_states else None
