"""What a loss returned: which results are accepted, and how microbatches become a minibatch's loss."""

import math

import numpy as np
import pytest
import torch

from hybridpipe.model.stage_module import StageModule
from hybridpipe.stage.losses import LossSum, MicrobatchLoss, SameKind, checked, computed
from hybridpipe.stage.stage import Stage
from tests.stage.helpers import batch, double

ONE = torch.ones((), dtype=torch.float64)
PAD = 0


@pytest.mark.parametrize("weight", [3, 3.0, np.float32(3), torch.tensor(3), torch.tensor([3.0])])
def test_a_weight_is_any_number(weight):
    assert checked((ONE, weight)).summed(num_samples=7) == LossSum(1.0, 3.0)


def test_a_mean_counts_by_its_samples():
    assert checked(2 * ONE).summed(num_samples=7) == LossSum(14.0, 7)
    assert LossSum(14.0, 7).mean == 2.0 and math.isnan(LossSum(0.0, 0.0).mean)


@pytest.mark.parametrize(
    "result, got",
    [
        (3.0, "float"),
        (None, "NoneType"),
        ((ONE, 1, 2), "tuple"),
        ([ONE, 1], "list"),
        (torch.ones(4), r"shape \(4,\)"),
        ((3.0, 1), "a pair with float"),
        ((torch.ones(4), 1), r"a pair with shape \(4,\)"),
        ((ONE, -1), r"the weight -1\.0"),
        ((ONE, math.nan), "the weight nan"),
        ((ONE, math.inf), "the weight inf"),
        ((ONE, torch.tensor(-2.0)), r"the weight -2\.0"),
        ((ONE, torch.ones(2)), r"a weight of shape \(2,\), float32"),
        ((ONE, torch.ones((), dtype=torch.complex64)), r"a weight of shape \(\), complex64"),
        ((ONE, torch.ones((), requires_grad=True)), "a weight that requires grad"),
        ((ONE, "3"), "a weight of type str"),
        ((ONE, None), "a weight of type NoneType"),
    ],
)
def test_anything_else_is_refused_in_one_line(result, got):
    with pytest.raises(ValueError, match=f"^loss must return a tensor of one number.*, got {got}$"):
        checked(result)


def test_an_error_inside_a_loss_says_what_it_was_called_with():
    with pytest.raises(KeyError) as caught:
        computed(
            lambda outputs, targets: targets["labels"], ONE, {"ids": torch.ones(2, 3), "rest": [None, 1]}
        )
    with_what = "outputs = float64 (), targets = {'ids': float32 (2, 3), 'rest': (None, int)}"
    assert caught.value.__notes__ == [f"in loss(outputs, targets) with {with_what}"]


def test_losses_of_both_kinds_are_refused():
    kind = SameKind()
    kind.see(True), kind.see(True)
    with pytest.raises(ValueError, match=r"^loss must return the same kind for every microbatch.*got both$"):
        kind.see(False)


def test_the_only_microbatch_is_divided_by_its_weight_at_once():
    assert MicrobatchLoss(ONE, 4.0).factor(share=1.0, num_samples=8) == 0.25
    assert MicrobatchLoss(ONE, 0.0).factor(share=1.0, num_samples=8) == 0.0
    assert MicrobatchLoss(ONE, 4.0).factor(share=0.5, num_samples=8) == 0.125
    assert MicrobatchLoss(ONE).factor(share=0.5, num_samples=8) == 0.5


def squares(outputs, targets):
    """Sum over the rows that are not padding, and their number."""
    kept = (targets[:, 0] != PAD).to(outputs.dtype)
    return ((outputs - targets).square().sum(1) * kept).sum(), kept.sum()


@pytest.mark.parametrize("options", [{}, {"split_backward": True}, {"recompute": True}], ids=str)
def test_samples_make_way_for_weights_once_all_are_known(options):
    """The second microbatch is padding only."""
    inputs, targets = batch(7, 3), batch(7, 2)
    targets[[1, 3, 4, 5]] = PAD
    model = double(torch.nn.Linear(3, 2))
    total, weight = squares(model(inputs), targets)
    expected = torch.autograd.grad(total / weight, list(model.parameters()))
    stage = Stage(StageModule(list(model)), torch.device("cpu"), loss=squares, **options)
    found = []
    for m, part in enumerate([slice(0, 3), slice(3, 6), slice(6, 7)]):
        share = len(inputs[part]) / 7
        loss = stage.forward_loss(m, inputs[part], targets[part], share, step=0, num_samples=7)
        found.append(loss.summed(len(inputs[part])))
        if options.get("split_backward"):
            stage.backward_input(m), stage.backward_weight(m)
        else:
            stage.backward(m)
    assert found[1] == (0.0, 0.0)
    sums, weights = map(sum, zip(*found, strict=True))
    assert sums / weights == pytest.approx((total / weight).item(), abs=1e-14)
    for parameter, reference in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad * (7 / weights), reference, rtol=0, atol=1e-14)
