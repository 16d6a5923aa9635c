"""Pictures: a colour has one meaning, and peers are four bars a model."""

import pytest
import results
from cases import peers

from hybridpipe.planning.draw import COLOURS, MEMORY_COLOUR

CEILING, DDP, HOROVOD = peers.TUNED_CEILING, "torch DDP, tuned", "plain Horovod"


def test_no_colour_has_a_second_meaning():
    ways = {results.DATA_PARALLEL, results.SYNCHRONOUS, results.ASYNCHRONOUS, results.OTHERS}
    assert len(ways) == 4 and not ways & {*COLOURS.values(), MEMORY_COLOUR}


def test_peers_are_four_bars_a_model_each_the_best_of_its_kind():
    pytest.importorskip("matplotlib")
    one = {CEILING: 2.0, DDP: 1.5, HOROVOD: 1.7, peers.AUTO: 1.6, peers.PIPEDREAM: 1.9}
    two = {CEILING: 2.0, DDP: 1.2, "DeepSpeed's pipeline": 0.5, peers.AUTO: 1.1, peers.PIPEDREAM: 1.8}
    figure = peers.draw({(m, way): x for m, ways in (("gpt", one), ("mlp", two)) for way, x in ways.items()})
    (axes,) = figure.axes
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[1.7, 1.2], [0.0, 0.5], [1.6, 1.1], [1.9, 1.8]]
