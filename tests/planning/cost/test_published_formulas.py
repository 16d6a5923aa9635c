"""What the papers say of p ranks with equal stages, m microbatches and free communication."""

import pytest
from pytest import approx

from hybridpipe.planning.cost.formula import StageCost
from hybridpipe.planning.cost.memory import peak_memory_bytes, versions_per_stage
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import Backward, BackwardWeight, Forward
from hybridpipe.planning.simulator.predict import predict, simulate
from tests.planning.helpers import free, layer, model, plan

FULL = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (4, 32), (8, 16)]  # m is a multiple of p


def run(schedule, p, m, forward=1.0, inputs=1.0, weights=1.0, chunks=1):
    """What a minibatch takes if a rank's stages together take so long for a microbatch."""
    made = plan([1] * p, m, schedule, chunks=chunks)
    cost = StageCost(forward / chunks, (inputs + weights) / chunks, weight_seconds=weights / chunks)
    return simulate(programs(made), made, [cost] * made.num_stages, free(p))


def stashed(made, rank):
    """The most (stages of) microbatches that a rank holds between forward and backward."""
    held = most = 0
    for instruction in programs(made)[rank]:
        held += isinstance(instruction, Forward) - isinstance(instruction, Backward | BackwardWeight)
        most = max(most, held)
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p, m", [(1, 1), (1, 8), (2, 1), (2, 3), (3, 7), (4, 2), (4, 8), (8, 32)])
def test_the_bubble_of_gpipe_and_1f1b(schedule, p, m):
    """(p - 1) / (m + p - 1): GPipe, Huang et al. 2019, section 2.3."""
    timeline = run(schedule, p, m)
    assert timeline.bubble_fraction == approx((p - 1) / (m + p - 1))
    assert timeline.seconds == approx(3 * (m + p - 1))


@pytest.mark.parametrize("p, m", FULL)
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("weights", [1.0, 0.5])
def test_the_bubble_of_interleaved_1f1b(p, m, chunks, weights):
    """(p - 1) / (m v) of the work: Narayanan et al., SC 2021, section 2.2.2."""
    seconds = run("interleaved-1f1b", p, m, weights=weights, chunks=chunks).seconds
    work = m * (2 + weights)
    assert (seconds - work) / work == approx((p - 1) / (m * chunks))


@pytest.mark.parametrize("p, m", FULL)
def test_the_bubble_of_zero_bubble_is_a_third(p, m):
    """(p - 1)(F + I - W), against (p - 1)(F + I + W) of 1F1B: ZB-H1, Qi et al., ICLR 2024, table 1."""
    bubbles = {schedule: run(schedule, p, m).seconds - 3 * m for schedule in ("1f1b", "zero-bubble")}
    assert bubbles == approx({"1f1b": 3 * (p - 1), "zero-bubble": p - 1})


@pytest.mark.parametrize("p, m", FULL)
@pytest.mark.parametrize("forward, inputs, weights", [(1, 1.2, 0.8), (1, 1, 0.5), (0.8, 1, 1)])
def test_the_bubble_of_zero_bubble_with_unequal_halves(p, m, forward, inputs, weights):
    """No less than the formula, as a lone W fits no gap exactly; always less than that of 1F1B."""
    work = m * (forward + inputs + weights)
    whole = run("1f1b", p, m, forward, inputs, weights).seconds - work
    halves = run("zero-bubble", p, m, forward, inputs, weights).seconds - work
    assert (p - 1) * (forward + inputs - weights) - 1e-9 <= halves < 0.8 * whole


@pytest.mark.parametrize("p, m", [(1, 3), (2, 1), (4, 2), (4, 8), (8, 5)])
def test_the_activations_of_1f1b(p, m):
    """min(p - s, m) on stage s, where GPipe has m: PipeDream-2BW, ICML 2021, section 2.2."""
    profile = model(*[layer(activation=10)] * p)
    for s, peak in enumerate(peak_memory_bytes(profile, plan([1] * p, m))):
        assert peak == 10 * min(p - s, m) == 10 * stashed(plan([1] * p, m), s)
    assert set(peak_memory_bytes(profile, plan([1] * p, m, "gpipe"))) == {10 * m}


@pytest.mark.parametrize("p, m", [(2, 1), (4, 2), (4, 8), (8, 32)])
def test_the_activations_of_zero_bubble(p, m):
    """Nowhere more than 1F1B's first stage holds: ZB-H1, Qi et al., ICLR 2024, section 2.2."""
    profile = model(*[layer(activation=10)] * p)
    peaks = peak_memory_bytes(profile, plan([1] * p, m, "zero-bubble"))
    assert max(peaks) == peak_memory_bytes(profile, plan([1] * p, m))[0]
    assert peaks == tuple(10 * stashed(plan([1] * p, m, "zero-bubble"), s) for s in range(p))


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_the_activations_of_interleaved_1f1b(p, m, chunks):
    """1 + (p - 1) / (p v) times 1F1B's on the first rank: Korthikanti et al., MLSys 2023, section 4.2.3."""
    profile = model(*[layer(activation=10)] * p * chunks)
    made = plan([1] * p, m, "interleaved-1f1b", chunks=chunks)
    peaks = peak_memory_bytes(profile, made)
    assert peaks[0] / chunks == approx(10 * p * (1 + (p - 1) / (p * chunks)))
    assert peaks == tuple(10 * stashed(made, rank) for rank in range(p))


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_the_versions_of_pipedream(p):
    """One for each minibatch in flight, p - s; with vertical sync p everywhere; PipeDream-2BW has two."""
    assert versions_per_stage(plan([1] * p, 1, "pipedream")) == tuple(range(p, 0, -1))
    assert versions_per_stage(plan([1] * p, 1, "pipedream", vertical_sync=True)) == (p,) * p
    assert versions_per_stage(plan([1] * p, 2 * p, "pipedream-2bw")) == (2,) * p


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("schedule, size", [("pipedream", 1), ("pipedream-2bw", 8), ("pipedream-2bw", 11)])
def test_without_a_flush_no_rank_idles(p, schedule, size):
    """Once the pipeline is full: PipeDream, SOSP 2019, section 3.2; 2BW, ICML 2021, section 3.1."""
    profile = model(*[layer(1, 2, parameters=10)] * p)
    _, prediction = predict(plan([1] * p, size, schedule), profile, free(p))
    assert prediction.minibatch_seconds == approx(3 * size)
    assert prediction.bubble_fraction == approx(0.0, abs=1e-9)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 1), (2, 2), (4, 2, 1), (1, 2, 1)])
def test_balanced_replicas_do_not_idle_either(schedule, replicas):
    """A stage with m replicas costs m times as much; 1F1B-RR, SOSP 2019, section 3.3."""
    profile = model(*(layer(m, 2 * m) for m in replicas))
    made = plan(replicas, 1 if schedule == "pipedream" else 24, schedule)
    _, prediction = predict(made, profile, free(made.num_ranks))
    assert prediction.bubble_fraction < 0.01
