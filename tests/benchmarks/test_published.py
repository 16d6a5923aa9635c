"""Published: what is chosen for PipeDream's profiles under its assumptions. Skipped without these."""

import pytest
from published import CLUSTERS, PROFILES, rows

pytestmark = pytest.mark.skipif(not PROFILES.exists(), reason=f"no published profiles in {PROFILES}")

FLAT, QUARTER = "16, 10 Gbit/s each", "4×4, 10 Gbit/s a server, a quarter each"


@pytest.fixture(scope="module")
def chosen():
    """By model and cluster."""
    return {(row.model, row.cluster): row for row in rows()}


def seconds(plan):
    return plan.predicted.minibatch_seconds


def test_ours_is_never_worse_than_the_published_choice(chosen):
    compared = [row for row in chosen.values() if row.published]
    assert len(compared) > 10
    for row in compared:
        assert seconds(row.ours) <= seconds(row.published) * (1 + 1e-9), (row.model, row.cluster)


def test_vgg_has_replicated_convolutions_and_dense_layers_on_one_rank(chosen):
    """On a server's quarter of a link 12-4 is 1 % faster than the published 15-1."""
    assert chosen["vgg16", FLAT].ours.replicas == (15, 1)
    row = chosen["vgg16", QUARTER]
    assert seconds(row.data_parallel) >= 3 * seconds(row.ours)
    assert seconds(row.data_parallel) >= 3 * seconds(row.published)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_resnet_is_data_parallel(chosen, cluster):
    assert chosen["resnet50", cluster].ours.num_stages == 1


def test_gnmt_is_straight_on_four_ranks_and_in_many_stages_on_more(chosen):
    for cluster in CLUSTERS:
        plan = chosen["gnmt", cluster].ours
        assert plan.num_stages >= 4 and (plan.num_ranks > 4 or set(plan.replicas) == {1})
