"""What outputs are worth, and when that is enough."""

import pytest
import torch
from torch import nn

from hybridpipe.judging import judge, reached

cross_entropy, mse = nn.functional.cross_entropy, nn.functional.mse_loss


class PerToken(nn.Module):
    """(N, T, C) and (N, T) as cross_entropy has them."""

    def forward(self, logits, targets):
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "shape, targets, loss, classes",
    [
        ((6, 4), (6,), cross_entropy, -1),
        ((6, 5, 4), (6, 5), PerToken(), -1),
        ((6, 4, 5, 5), (6, 5, 5), cross_entropy, 1),
    ],
    ids=["(N, C)", "(N, T, C)", "(N, C, H, W)"],
)
def test_losses_and_right_answers_add_up(shape, targets, loss, classes):
    outputs, labels = torch.randn(shape).double(), torch.randint(0, 4, targets)
    total, right, judged = judge(loss, outputs, labels)
    assert total == pytest.approx(6 * loss(outputs, labels).item())
    assert (right, judged) == ((outputs.argmax(classes) == labels).sum(), labels.numel())


def test_regression_has_no_right_answers():
    outputs, targets = torch.randn(10, 3).double(), torch.randn(10, 3).double()
    assert judge(mse, outputs, targets) == [pytest.approx(10 * mse(outputs, targets).item()), 0.0, 0.0]


def test_a_target_is_reached_where_all_that_is_wanted_is():
    metrics = {"accuracy": 0.9, "loss": 0.4}
    assert reached(metrics, {"accuracy": 0.9}) and reached(metrics, {"accuracy": 0.8, "loss": 0.4})
    assert not reached(metrics, {"accuracy": 0.91}) and not reached(metrics, {"accuracy": 0.9, "loss": 0.3})
    with pytest.raises(ValueError, match=r"target_accuracy = 0\.9 needs targets that are classes"):
        reached({"loss": 0.1}, {"accuracy": 0.9})
