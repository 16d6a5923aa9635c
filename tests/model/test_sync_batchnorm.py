"""The replicas of each stage that normalise together, and what is refused before a training."""

from dataclasses import replace

import pytest
from torch import nn

from hybridpipe.model.layers import known_layers
from hybridpipe.model.sync_batchnorm import check_has_norms, synchronised
from hybridpipe.planning.plan import Plan, StageSpec


def model(norm=nn.BatchNorm1d, other=nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), norm(4)), other(), nn.Linear(4, 3))


def plan(*replicas: int, cut: int = 2, **options) -> Plan:
    edges = [0, cut, 3] if len(replicas) > 1 else [0, 3]
    stages = (StageSpec(*each) for each in zip(edges, edges[1:], replicas, strict=False))
    return Plan(tuple(stages), num_microbatches=4, **options)


def found(made: Plan, layers: nn.Sequential, together: int) -> list[int]:
    return [stage.sync_batchnorm for stage in synchronised(made, known_layers(layers), together).stages]


@pytest.mark.parametrize(
    "made, together, expected",
    [
        (plan(2), 2, [2]),
        (plan(4), 2, [2]),
        (plan(2, 1), 2, [2, 1]),  # the head needs none
        (plan(4, 3), 2, [2, 1]),
        (plan(2), 1, [1]),
        (plan(1), 1, [1]),
    ],
)
def test_stages_with_batchnorm_say_how_many_replicas_normalise_together(made, together, expected):
    assert found(made, model(), together) == expected


@pytest.mark.parametrize("made, expected", [(plan(3), [3]), (plan(4, 2), [4, 1]), (plan(1), [1])])
def test_a_syncbatchnorm_takes_all_replicas_of_its_stage(made, expected):
    assert found(made, model(nn.SyncBatchNorm), 1) == expected


def test_a_number_goes_before_what_a_syncbatchnorm_would_take():
    assert found(plan(4), model(nn.SyncBatchNorm, lambda: nn.BatchNorm1d(4)), 2) == [2]


def test_a_plan_without_batchnorm_stays_the_same_object():
    made = plan(3)
    assert synchronised(made, known_layers(model(nn.LayerNorm)), 2) is made


@pytest.mark.parametrize(
    "made, layers, together, told",
    [
        (
            plan(3),
            model(),
            2,
            "stage 0 of plan 3 has BatchNorm and replicas = 3, which must be a multiple of sync_batchnorm = "
            "2: give it as many, or let it end before the first BatchNorm",
        ),
        (
            plan(2, 1),
            model(other=lambda: nn.BatchNorm1d(4)),
            4,
            "stage 0 of plan 2-1 has BatchNorm and replicas = 2, which must be a multiple of sync_batchnorm "
            "= 4: give it as many, or let it end before the first BatchNorm",
        ),
        (
            plan(2),
            model(nn.SyncBatchNorm, lambda: nn.BatchNorm1d(4)),
            1,
            "stage 0 of plan 2 has both BatchNorm and SyncBatchNorm: make all of one kind "
            "(nn.SyncBatchNorm.convert_sync_batchnorm), or set sync_batchnorm",
        ),
        (
            plan(2),
            model(other=lambda: nn.InstanceNorm1d(4, track_running_stats=True)),
            2,
            "stage 0 of plan 2 has BatchNorm, which normalises 2 replicas together, and an InstanceNorm with "
            "running statistics, which does not: cut between them, or set track_running_stats=False",
        ),
        (
            replace(plan(2), stages=(StageSpec(0, 3, 2, sync_batchnorm=2),)),
            model(),
            1,
            "stages[0].sync_batchnorm must be 1, as the training has sync_batchnorm = 1, got 2",
        ),
        (
            plan(2, schedule="pipedream-2bw"),
            model(nn.SyncBatchNorm),
            1,
            "stages[0].sync_batchnorm must be 1 under pipedream-2bw, got 2: it goes with 1f1b, gpipe, "
            "zero-bubble; nn.SyncBatchNorm normalises all replicas of a stage together",
        ),
        (
            plan(2, schedule="pipedream-2bw"),
            model(),
            2,
            "stages[0].sync_batchnorm must be 1 under pipedream-2bw, got 2: it goes with 1f1b, gpipe, "
            "zero-bubble; the training has sync_batchnorm = 2",
        ),
        (
            plan(2, zero=2),
            model(),
            2,
            "stages[0].sync_batchnorm must be 1 where zero is 2, got 2: set zero = 1; the training "
            "has sync_batchnorm = 2",
        ),
        (
            plan(2, max_in_flight=1),
            model(),
            2,
            "max_in_flight must not be given where stages synchronise BatchNorm, got 1: replicas wait for "
            "each other in each pass, so they must have enough in flight; the training has sync_batchnorm = "
            "2",
        ),
    ],
)
def test_what_cannot_normalise_together_is_refused_in_a_line(made, layers, together, told):
    with pytest.raises(ValueError) as raised:
        synchronised(made, known_layers(layers), together)
    assert str(raised.value) == told


def test_a_number_for_a_model_without_batchnorm_is_refused():
    """It had no effect, as with norms of a user's own."""
    check_has_norms(model(), 2)
    check_has_norms(model(nn.LayerNorm), 1)
    with pytest.raises(ValueError) as raised:
        check_has_norms(model(nn.LayerNorm), 2)
    assert str(raised.value) == (
        "sync_batchnorm must be 1 for a model without a BatchNorm layer of torch's, got 2"
    )
