from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.profile import LayerProfile, Measurement, ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import NoPlanFits, fits
from hybridpipe.training.planner.choice import choose

LAYER = LayerProfile("layer", 1e-2, 2e-2, 10**7, 10**5, 10**5)
PROFILE, CLUSTER = ModelProfile((LAYER,) * 8, samples=2), Cluster.flat(4, 1e8, 1e-5)


def test_auto_compares_schedules_and_the_baselines_are_the_simplest():
    choice = choose("auto", PROFILE, CLUSTER, 8, PlanRequest(schedule="auto"))
    assert choice.plan == choice.candidates[0].plan and choice.profile == PROFILE
    compared = {candidate.plan.schedule for candidate in choice.candidates}
    assert compared == set(PlanRequest(schedule="auto").compared(is_limited=False))
    assert choose("dp", PROFILE, CLUSTER, 8, PlanRequest(schedule="auto")).plan.schedule == "1f1b"
    assert set(choose("straight", PROFILE, CLUSTER, 8, PlanRequest(schedule="auto")).plan.replicas) == {1}


@pytest.mark.parametrize("name", ["auto", "dp", "straight"])
def test_under_pipedream_a_minibatch_travels_whole(name):
    choice = choose(name, PROFILE, CLUSTER, 8, PlanRequest(schedule="pipedream"))
    assert choice.plan.num_microbatches == 1 and choice.profile.samples == 16
    predicted = choice.plan.predicted
    assert predicted.samples_per_second * predicted.minibatch_seconds == approx(16)


def test_what_is_asked_for_is_in_the_plan():
    choice = choose(
        "auto", PROFILE, CLUSTER, 1, PlanRequest(schedule="pipedream", vertical_sync=True, max_in_flight=2)
    )
    assert choice.plan.vertical_sync and choice.plan.max_in_flight == 2
    for name in ("dp", "straight"):
        named = choose(
            name, PROFILE, CLUSTER, 1, PlanRequest(schedule="pipedream", vertical_sync=True, max_in_flight=1)
        )
        assert named.plan.vertical_sync and named.plan.max_in_flight == 1
        assert named.plan in [candidate.plan for candidate in named.candidates], "the report points at it"
        roomy = choose(name, PROFILE, CLUSTER, 8, PlanRequest(recompute=True)).plan
        assert not any(map(roomy.recomputes, range(roomy.num_stages)))
    limited = replace(CLUSTER, memory_bytes=41_300_000)  # hardly more than weights, gradients, messages
    assert choose("auto", PROFILE, limited, 16, PlanRequest(recompute=True)).plan.recomputes(0)
    straight = choose("straight", PROFILE, limited, 16, PlanRequest(recompute=True)).plan
    assert straight.num_stages > 1 and fits(straight, PROFILE, limited)
    assert choose("dp", PROFILE, limited, 16, PlanRequest(recompute=True)).plan.recomputes(0)
    with pytest.raises(NoPlanFits, match=r"recomputation would help\n"):
        choose("auto", PROFILE, limited, 16)


@pytest.mark.parametrize("seconds_at_2, samples, replicas", [(1e-2, 8, (4,)), (2.5e-3, 2, (1, 1, 1, 1))])
def test_auto_chooses_the_size_of_the_microbatch(seconds_at_2, samples, replicas):
    """Four ranks, 32 samples. Small ones cost as much as large ones, or their share; then a pipeline wins."""

    def at(seconds: float) -> tuple[LayerProfile, ...]:
        return (replace(LAYER, forward_seconds=seconds, backward_seconds=2 * seconds),) * 8

    profile = ModelProfile(at(1e-2), samples=8, others=(Measurement(2, at(seconds_at_2)),))
    cluster = Cluster.flat(4, 1e10 if samples == 8 else 1e8, 1e-5)
    choice = choose("auto", profile, cluster, 4)
    assert (choice.profile.samples, choice.plan.replicas) == (samples, replicas)
    assert choice.plan.num_microbatches == 32 // samples
    assert choose("dp", profile, cluster, 4).profile.samples == 8


def only_pairs(plan) -> None:
    """As `sync_batchnorm = 2` wants it of stages with BatchNorm."""
    if any(replicas % 2 for replicas in plan.replicas):
        raise ValueError(f"{plan.name} has no pairs")


def test_auto_takes_the_fastest_plan_that_the_model_allows():
    anyway = choose("auto", PROFILE, CLUSTER, 8)
    checked = choose("auto", PROFILE, CLUSTER, 8, check=only_pairs)
    allowed = [each for each in anyway.candidates if not any(count % 2 for count in each.plan.replicas)]
    assert 0 < len(allowed) < len(anyway.candidates)
    assert list(checked.candidates) == allowed and checked.plan == allowed[0].plan


def test_if_none_of_them_is_allowed_replicas_on_fewer_ranks_are():
    """Three ranks have no pairs in any plan that was found; two of them do."""
    cluster = Cluster.flat(3, 1e9, 1e-5)

    def one_stage_of_pairs(plan) -> None:
        only_pairs(plan)
        if plan.num_stages > 1:
            raise ValueError(f"{plan.name} has a cut")

    assert choose("auto", PROFILE, cluster, 8).plan.name != "2"
    found = choose("auto", PROFILE, cluster, 8, check=one_stage_of_pairs)
    assert found.plan.name == "2" and found.plan.predicted is not None


def test_if_the_model_allows_no_plan_that_was_found_the_first_reason_is_told():
    def none(plan):
        raise ValueError(f"{plan.name} has no pairs")

    fastest = choose("auto", PROFILE, CLUSTER, 8).plan.name
    with pytest.raises(ValueError) as raised:
        choose("auto", PROFILE, CLUSTER, 8, check=none)
    told = f"no plan that was found can be trained, give a Plan: of the fastest, {fastest} has no pairs"
    assert str(raised.value) == told
