"""Pictures to the letter, so that no change of the drawing goes unseen.

`python -m tests.planning.test_pictures` draws them anew: look at them before they take the place of the old.
"""

from pathlib import Path

import pytest

from hybridpipe.planning import draw
from hybridpipe.planning.cost.formula import StageCost
from hybridpipe.planning.cost.memory import curves
from hybridpipe.planning.draw import svg, text
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.simulator.predict import predict, simulate
from tests.planning.helpers import free, layer, model, plan

FOLDER = Path(__file__).with_name("pictures")


def replicas() -> str:
    """Data parallel in front, with an all-reduce, and memory below."""
    profile = model(
        layer(2e-3, 4e-3, parameters=3_000_000, output=500_000, activation=2_000_000, update=2e-3),
        layer(1e-3, 2e-3, parameters=4_000, activation=1_000),
    )
    made = plan([2, 1], 4)
    timeline, prediction = predict(made, profile, free(3))
    return svg(timeline, made, "2-1 under 1F1B", curves(profile, made, timeline), prediction)


def chunks() -> str:
    """Three stages on each of two ranks, in shades."""
    made = plan([1, 1], 4, "interleaved-1f1b", chunks=3)
    costs = [StageCost(1.0 + s / 4, 2.0) for s in range(6)]
    return svg(simulate(programs(made), made, costs, free(2)), made)


def halves() -> str:
    """Backwards in halves, without a plan, hours long."""
    made = plan([1, 1], 3, "zero-bubble")
    timeline = simulate(programs(made), made, [StageCost(900.0, 2000.0, weight_seconds=800.0)] * 2, free(2))
    return svg(timeline) + text(timeline, 79) + "\n"


def thinned() -> str:
    """Too many ranks, bars and steps of memory: some of them."""
    made = plan([1] * 7, 12)
    profile = model(*[layer(1e-5, 2e-5, output=1000, activation=3000)] * 7)
    timeline, _ = predict(made, profile, free(7))
    before = draw.MAX_RANKS, draw.MAX_MARKS
    draw.MAX_RANKS, draw.MAX_MARKS = 4, 60
    try:
        return svg(timeline, made, "thinned", curves(profile, made, timeline)) + text(timeline, 60) + "\n"
    finally:
        draw.MAX_RANKS, draw.MAX_MARKS = before


PICTURES = (replicas, chunks, halves, thinned)


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_drawn_as_before(picture):
    assert picture() == (FOLDER / f"{picture.__name__}.svg.txt").read_text()


if __name__ == "__main__":
    for picture in PICTURES:
        (FOLDER / f"{picture.__name__}.svg.txt").write_text(picture())
