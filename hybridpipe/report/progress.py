"""Progress: what a training says of itself while it runs, as lines for people.

Pure: clock and terminal are read elsewhere. Invariant: samples a second are those of the last seconds, and
the time left is by all minibatches since the first, validations included.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from hybridpipe.report.words import counted, few, rounded

WINDOW_SECONDS = 10.0
WIDTH = 120  # of a line, without the clock


class Speed:
    """Speed of a training over its last WINDOW_SECONDS, and the time that the rest of it takes."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque()
        self._seconds = 0.0  # of `_last`
        self._begun: float | None = None
        self._done = 0  # minibatches since then

    def note(self, num_samples: int, seconds: float, now: float) -> None:
        """Add a minibatch.

        Args:
            seconds: of training.
            now: seconds by a clock that also runs during validations.
        """
        self._last.append((num_samples, seconds))
        self._seconds += seconds
        while self._seconds - self._last[0][1] >= WINDOW_SECONDS:
            self._seconds -= self._last.popleft()[1]
        if self._begun is None:  # what came before the first minibatch is no measure for the others
            self._begun = now
        else:
            self._done += 1

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of training over the last seconds; None before the first minibatch."""
        return sum(samples for samples, _ in self._last) / self._seconds if self._seconds > 0 else None

    def seconds_left(self, minibatches: int, now: float) -> float | None:
        """Return the time of that many minibatches and their validations; None for none, or if unknown."""
        if self._begun is None or not self._done or not minibatches:
            return None
        return (now - self._begun) / self._done * minibatches


class Progress(NamedTuple):
    """Progress of a training; all counts begin with 1, those before a checkpoint included.

    Args:
        epochs, minibatches: of the whole training; None: not known.
    """

    epoch: int
    epochs: int | None
    minibatch: int
    minibatches: int | None

    def __str__(self) -> str:
        epoch = _of("epoch", self.epoch, self.epochs)
        return f"{epoch}, {_of('minibatch', self.minibatch, self.minibatches)}"


def progress_line(
    progress: Progress,
    loss: float,
    samples_per_second: float | None,
    seconds_left: float | None,
    *,
    validation: Mapping[str, float] | None = None,
    learning_rate: float | None = None,
) -> str:
    """Return a line about a minibatch or, with validation and learning rate, about an epoch.

    Where it is wider than WIDTH, learning rate and speed, which metrics.jsonl has, are left out in turn.
    """
    figures = [f"loss {rounded(loss)}"]
    if validation:
        figures.append("validation " + ", ".join(f"{name} {rounded(v)}" for name, v in validation.items()))
    less = [] if learning_rate is None else [f"lr {learning_rate:.3g}"]
    less += [] if samples_per_second is None else [f"{samples_per_second:,.0f} samples/s"]
    left = [] if seconds_left is None else [f"{timedelta(seconds=round(seconds_left))} left"]
    while True:
        line = f"{progress}: {'; '.join([*figures, *less, *left])}"
        if len(line) <= WIDTH or not less:
            return line
        del less[0]


def hosts_line(hosts: Sequence[str]) -> str:
    """Return a line about the ranks of a training.

    Args:
        hosts: by rank, the name of its host.
    """
    names = list(dict.fromkeys(hosts))
    where = names[0] if len(names) == 1 else f"{counted(len(names), 'host')}: {few(names, ', ')}"
    return f"{counted(len(hosts), 'rank')} on {where}"


def exchange_line(count: int, every: int, rule: str) -> str:
    """Return a line about the groups of a training, each of which has a plan's ranks and time."""
    often = "each update" if every == 1 else f"{every} updates"
    exchange = f"they exchange weights after {often} ({rule}), which is in no prediction"
    return f"{count} groups, each under the plan below; {exchange}"


def _of(what: str, number: int, total: int | None) -> str:
    return f"{what} {number}" if total is None else f"{what} {number}/{total}"
