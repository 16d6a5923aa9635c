from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.report.stage_figures import StageFigures, bottleneck, stage_figures


def layer(name="layer", parameters=0, output=0, update=0.0, gradient=None):
    return LayerProfile(name, 1.0, 2.0, parameters, output, 0, update, gradient)


CHAIN = ModelProfile((layer("a", output=100, gradient=40), layer("b", parameters=50), layer("c")), samples=2)


def test_figures_of_a_stage():
    """Two microbatches a replica of stage 0, four in stage 1, whose weights need no all-reduce."""
    plan = Plan((StageSpec(0, 1, 2), StageSpec(1, 3, 1)), num_microbatches=4)
    cluster = replace(Cluster.flat(3, 100.0, 0.5), message_seconds=0.1, message_seconds_per_byte=0.01)
    first, second = stage_figures(plan, CHAIN, cluster)
    handling = 0.2 + 140 * 0.01
    assert first == StageFigures(3 + handling, 100, 40, 0.0, approx(2 * (3 + handling)), 0.0, approx(4.0))
    assert second == StageFigures(6 + handling, 40, 100, 0.0, approx(4 * (6 + handling)), 0.0, 0.0)


def test_figures_of_replicas_that_take_turns():
    """Under an asynchronous schedule each minibatch is one replica's, and they reduce once a round."""
    profile = ModelProfile((layer(parameters=50, update=1.0),), samples=1)
    (each,) = stage_figures(Plan.data_parallel(1, 2, 1, "pipedream"), profile, Cluster.flat(2, 10.0, 0.0))
    assert each.allreduce_seconds == approx(5.0)
    assert each.compute_seconds == approx((3 + 1) / 2) and each.exposed_seconds == approx((5 - 2) / 2)


@pytest.mark.parametrize(
    "compute, exposed, link, seconds, name",
    [
        ((5, 9), (0, 0), (1, 0), 10, "computing in stage 1"),
        ((1, 1), (9, 0), (1, 0), 11, "the all-reduce of stage 0"),
        ((1, 1), (0, 0), (9, 0), 11, "the traffic between stages 0 and 1"),
        ((2, 3), (0, 1), (1, 0), 10, "filling, draining and waiting"),
    ],
)
def test_the_bottleneck_is_the_largest_part(compute, exposed, link, seconds, name):
    figures = [StageFigures(0, 0, 0, 0, c, e, x) for c, e, x in zip(compute, exposed, link, strict=True)]
    what, how_long = bottleneck(figures, seconds)
    assert what == name and how_long == (6 if "filling" in name else 9)
