"""Published: what is chosen for PipeDream's profiles under its assumptions. Skipped without these."""

import pytest
from cases.published import CLUSTERS, PROFILES, SAMPLES, compared

pytestmark = pytest.mark.skipif(not PROFILES.exists(), reason=f"no published profiles in {PROFILES}")

FLAT, QUARTER = "16, 10 Gbit/s each", "4×4, 10 Gbit/s a server, a quarter each"


@pytest.fixture(scope="module")
def chosen():
    """The figures by model and cluster."""
    return {
        (model, name): compared(model, cluster) for model in SAMPLES for name, cluster in CLUSTERS.items()
    }


def test_ours_is_never_worse_than_the_published_choice(chosen):
    found = {key: each for key, each in chosen.items() if each["published"]}
    assert len(found) > 10
    for key, each in found.items():
        assert each["seconds"] <= each["published_seconds"] * (1 + 1e-9), key


def test_vgg_has_replicated_convolutions_and_dense_layers_on_one_rank(chosen):
    """On a server's quarter of a link 12-4 is 1 % faster than the published 15-1."""
    assert chosen["vgg16", FLAT]["ours"] == "15-1"
    figures = chosen["vgg16", QUARTER]
    assert figures["dp_seconds"] >= 3 * figures["seconds"]
    assert figures["dp_seconds"] >= 3 * figures["published_seconds"]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_resnet_is_data_parallel_or_little_better(chosen, cluster):
    figures = chosen["resnet50", cluster]
    assert figures["ours"].isdecimal() or 0.97 < figures["seconds"] / figures["dp_seconds"] < 1


def test_gnmt_is_straight_on_four_ranks_and_in_many_stages_on_more(chosen):
    for name, cluster in CLUSTERS.items():
        replicas = chosen["gnmt", name]["ours"].split("-")
        assert len(replicas) >= 4 and (cluster.num_ranks > 4 or set(replicas) == {"1"})
