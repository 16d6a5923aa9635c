"""A problem's figures: kept for fewer ranks and other limits, not for another profile or cluster."""

from dataclasses import replace

import pytest

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimates
from hybridpipe.planning.cost.formula import stage_costs
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.problem import Problem
from tests.planning.helpers import layer, model

PROFILE = model(*[layer(1, 2, parameters=100, output=10)] * 4)
CLUSTER = Cluster.flat(4, bandwidth=100.0, latency_seconds=0.1)
PLAN = Plan((StageSpec(0, 2), StageSpec(2, 4)), "1f1b", 4)


def problem() -> Problem:
    made = Problem(PROFILE, CLUSTER, 4, 4, PlanRequest("1f1b"))
    made.estimates(PLAN)
    return made


@pytest.mark.parametrize(
    "change", [{"num_ranks": 2}, {"cluster": replace(CLUSTER, memory_bytes=1000)}, {"is_alternative": True}]
)
def test_ranks_and_limits_change_no_figure(change):
    made = problem()
    assert replace(made, **change).figures is made.figures
    assert made.without_limit().figures is made.figures and PLAN in made.figures.estimated


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": Cluster.flat(4, bandwidth=1.0, latency_seconds=0.1)},
        {"cluster": Cluster.flat(8, bandwidth=50.0, latency_seconds=0.1), "num_ranks": 8},
        {"profile": model(*[layer(2, 3, parameters=100, output=20)] * 4)},
    ],
)
def test_figures_of_another_profile_or_cluster_are_not_taken(change):
    """Advice on more ranks and on smaller microbatches changes a problem so."""
    made = problem()
    other = replace(made, **change)
    expected = estimates(PLAN, stage_costs(other.profile, PLAN), other.cluster)
    assert other.estimates(PLAN) == expected != made.estimates(PLAN)
