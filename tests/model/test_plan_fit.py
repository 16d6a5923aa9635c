"""Whether a plan fits a model, by the number of layers and by what stages would share."""

from itertools import pairwise

import pytest
from torch import nn

from hybridpipe import Plan, StageSpec
from hybridpipe.model.plan_fit import shared_parameters
from hybridpipe.model.sequential import check_plan, holders


def plan(*edges: int, **options) -> Plan:
    return Plan(tuple(StageSpec(start, stop) for start, stop in pairwise(edges)), **options)


def test_the_plan_must_know_the_number_of_layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    check_plan(model, plan(0, 1, 3))
    with pytest.raises(ValueError, match="num_layers = 2, the model has 3 layers"):
        check_plan(model, plan(0, 1, 2))


def tied() -> nn.Sequential:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), last)


def test_stages_that_update_at_different_times_may_not_share_a_parameter():
    told = (
        r"separates 0\.weight \(stage 0\) and 2\.weight \(stage 1\), .* at different times under pipedream;"
    )
    check_plan(tied(), plan(0, 3, schedule="pipedream"))
    with pytest.raises(ValueError, match=told):
        check_plan(tied(), plan(0, 1, 3, schedule="pipedream"))


def test_a_shared_embedding_may_not_have_sparse_gradients():
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Tanh(), nn.Linear(2, 3, bias=False))
    model[2].weight = model[0].weight
    check_plan(model, plan(0, 3))
    with pytest.raises(ValueError, match=r"separates 0\.weight .* whose gradients are sparse"):
        check_plan(model, plan(0, 1, 3))


def test_a_cut_may_not_separate_two_uses_of_a_buffer_that_training_writes_to():
    norm = nn.BatchNorm1d(2, affine=False)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    check_plan(model, plan(0, 3))
    with pytest.raises(ValueError, match=r"separates 0\.running_mean \(stage 0\) and 2\.running_mean"):
        check_plan(model, plan(0, 2, 3))


def test_what_layers_share_is_told_with_its_bytes_and_whether_stages_may():
    norm = nn.BatchNorm1d(2, affine=False)
    model = nn.Sequential(*tied(), norm, norm)
    model[0].bias.requires_grad_(False)
    model[2].bias = model[0].bias
    found = shared_parameters(model, holders(model, plan(0, 1, 2, 3, 4, 5)))
    told = [(each.name, each.layers, each.parameter_bytes, each.separable) for each in found]
    assert told[:2] == [("0.weight", (0, 2), 16, True), ("0.bias", (0, 2), 0, True)]
    assert told[2] == ("3.running_mean", (3, 4), 0, False)
