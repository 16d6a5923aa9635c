"""Rounds: what interleaved benchmarks measured, and the medians, ratios and tables made of it.

In a round every way runs once, each as a fresh job, one after the other. A machine whose speed drifts treats
the ways of one round about alike, so a ratio is taken within a round, and then the median over the rounds.

Pure but for `read` and `write`.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WARM_UP = 3  # minibatches that are not looked at
SAME_LOSS = 1e-3  # relative; float32, summed in another order


@dataclass(frozen=True)
class Outcome:
    """One job; `seconds` a minibatch, and the `loss` of the last one, where it has any.

    `group` is what ways are compared within; `error` is why it did not run; `load` is the mean number of
    processes that wanted to run, of whoever they were.
    """

    group: str
    way: str
    round: int
    seconds: float | None = None
    loss: float | None = None
    plan: str = ""
    error: str = ""
    load: float = 0.0


def steady_seconds(seconds: Sequence[float]) -> float:
    """A typical minibatch's, after warm-up."""
    return statistics.median(seconds[WARM_UP:] or seconds)


def of(outcomes: Iterable[Outcome], group: str, way: str) -> list[Outcome]:
    """The outcomes of one way."""
    return [o for o in outcomes if (o.group, o.way) == (group, way)]


def median_seconds(outcomes: Iterable[Outcome], group: str, way: str) -> float | None:
    """Over the rounds in which it ran."""
    found = [o.seconds for o in of(outcomes, group, way) if o.seconds is not None]
    return statistics.median(found) if found else None


def times_as_fast(outcomes: Sequence[Outcome], group: str, way: str, reference: str) -> float | None:
    """How many times as fast as `reference`: the median of the ratios within a round."""
    base = {o.round: o.seconds for o in of(outcomes, group, reference)}
    ratios = [
        seconds / o.seconds for o in of(outcomes, group, way) if o.seconds and (seconds := base.get(o.round))
    ]
    return statistics.median(ratios) if ratios else None


def other_losses(
    outcomes: Iterable[Outcome], reference: str, but: Sequence[str] = ()
) -> list[tuple[Outcome, float]]:
    """Outcomes whose loss is not that of `reference` in their group, with the one it should be."""
    outcomes = list(outcomes)
    expected = {o.group: o.loss for o in outcomes if o.way == reference and o.loss is not None}
    return [
        (o, wanted)
        for o in outcomes
        if o.way not in but and o.loss is not None and (wanted := expected.get(o.group)) is not None
        if not abs(o.loss - wanted) <= SAME_LOSS * abs(wanted)
    ]


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    """For a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def line(outcome: Outcome) -> str:
    """For who watches."""
    loss = "" if outcome.loss is None else f", loss {outcome.loss:.6f}"
    plan = f", {outcome.plan}" if outcome.plan else ""
    figure = number(outcome.seconds and outcome.seconds * 1e3, " ms", 1) + loss + plan
    return f"{outcome.group}: {outcome.way}, round {outcome.round}: {outcome.error or figure}"


def read(path: Path) -> list[Outcome]:
    """What earlier calls have measured: a benchmark can be run in pieces, whose rounds are counted on."""
    if not path.is_file():
        return []
    return [Outcome(**each) for each in json.loads(path.read_text())["outcomes"]]


def write(path: Path, outcomes: Iterable[Outcome]) -> None:
    """JSON for `read`."""
    path.write_text(json.dumps({"outcomes": [asdict(o) for o in outcomes]}, indent=1) + "\n")


def next_round(outcomes: Iterable[Outcome], group: str) -> int:
    """The number of a group's next round."""
    return 1 + max((o.round for o in outcomes if o.group == group), default=-1)
