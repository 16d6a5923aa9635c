"""Seen: which weights the microbatches of a stream see, and where their gradients go.

Between the plan, which says the version, and `stage.weights`, which keeps it. A synchronous schedule has one
version at a time, the parameters themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules import versions
from hybridpipe.stage.weights import Weights, WeightVersions


class Seen(Protocol):
    """What the executor needs of the weights."""

    def begin(self) -> None:
        """A stream begins: its microbatches and versions are counted from here."""

    def of(self, microbatch: int) -> Weights | None:
        """What a microbatch's forward is to be given; None: the parameters."""

    def collect(self, microbatch: int, factor: float) -> None:
        """After its backward: its gradients, times `factor`, add up in the parameters'."""

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around an update."""

    def end(self) -> None:
        """No microbatch is under way any more."""


class Newest:
    """One version at a time."""

    def begin(self) -> None:
        """Nothing to count."""

    def of(self, microbatch: int) -> Weights | None:
        """The parameters."""
        return None

    def collect(self, microbatch: int, factor: float) -> None:
        """Gradients arrive where they belong, weighted by the loss."""

    @contextmanager
    def update(self) -> Iterator[None]:
        """In place."""
        yield

    def end(self) -> None:
        """Nothing is kept."""


class Stashed:
    """The versions that an asynchronous plan names, of the stage at `place`."""

    def __init__(self, plan: Plan, place: Place, layers: nn.Sequential) -> None:
        self.versions = WeightVersions(layers)
        self._number = versions(plan, place.stage)
        self._replicas = plan.replicas[place.stage]
        self._of: dict[int, Weights] = {}
        self._first = 0

    def begin(self) -> None:
        """The newest weights are the stream's first."""
        self._first = self.versions.newest
        self.versions.keep_from(self._first)

    def of(self, microbatch: int) -> Weights:
        """The version it is due. Older than the next microbatch's: kept by those in flight only."""
        weights = self._of[microbatch] = self.versions.version(self._first + self._number(microbatch))
        self.versions.keep_from(self._first + self._number(microbatch + self._replicas))
        return weights

    def collect(self, microbatch: int, factor: float) -> None:
        """From the version's leaves."""
        self.versions.collect(self._of.pop(microbatch), factor)

    @contextmanager
    def update(self) -> Iterator[None]:
        """What it changes is a new version."""
        with self.versions.update():
            yield

    def end(self) -> None:
        """Only the newest is left."""
        self.versions.keep_from(self.versions.newest)
