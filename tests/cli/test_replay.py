from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.cli.replay import Replay, enough_minibatches, pace, round_length
from hybridpipe.cli.replay import replay as run_replay
from hybridpipe.errors import UserError
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile

LAYER = LayerProfile("layer", 1.0, 2.0, 30 * 2**20, 100, 100)
PROFILE = ModelProfile((LAYER, LAYER), samples=4)
DP = Plan.data_parallel(2, 3, 3)
HYBRID = Plan((StageSpec(0, 1, 3), StageSpec(1, 2, 1)), "pipedream")


def asked(plan=DP, overlap=True, scale=1.0, cluster=None) -> Replay:
    return Replay(PROFILE, plan, cluster, scale, None, overlap)


def test_pace_is_the_median_round_of_the_middle():
    fill, steady, drain = [9.0] * 4, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0], [7.0] * 2
    assert pace(fill + steady + drain, 3) == approx(2.0)
    assert pace(fill + steady + drain, 1) == approx(2.0)
    assert pace([5.0], 4) == approx(5.0)  # less than a round


def test_rounds():
    assert (round_length(DP), round_length(HYBRID)) == (1, 3)
    assert enough_minibatches(DP) == 10
    assert enough_minibatches(HYBRID) >= 10 * 3 + HYBRID.num_ranks


def test_prediction_with_and_without_overlap():
    seconds = 4 / 3 * 30 * 2**20 / 1e8  # of one layer's all-reduce
    cluster = Cluster.flat(3, 1e8, 0.0)
    assert asked(cluster=cluster, overlap=False).predicted() == approx(6.0 + 2 * seconds)
    assert asked(cluster=cluster).predicted() == approx(6.0 + seconds)
    assert asked().predicted() is None


def test_a_plan_that_predicts_weights_is_replayed(tmp_path):
    quick = replace(LAYER, forward_seconds=1e-4, backward_seconds=2e-4, parameter_bytes=8)
    plan = Plan((StageSpec(0, 2),), "pipedream", prediction="xpipe")
    settings = Replay(ModelProfile((quick, quick), samples=1), plan, None, 1.0, 3, overlap=True)
    assert run_replay(settings, tmp_path) == 0 and (tmp_path / "summary.json").is_file()


def test_refusals():
    with pytest.raises(UserError, match="the plan cuts 3 layers, the profile has 2"):
        asked(Plan.data_parallel(3, 3, 3))
    with pytest.raises(UserError, match="--no-overlap goes with a synchronous schedule, got pipedream"):
        asked(HYBRID, overlap=False)
