"""What outputs are worth, and when that is enough."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.training.evaluation import Accuracy, MicrobatchMetrics, evaluate, reached, targets_wanted

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
    total, weight, right, judged, others = MicrobatchMetrics(loss, {})(outputs, labels, 6)
    assert total == pytest.approx(6 * loss(outputs, labels).item()) and weight == 6
    assert (right, judged, others) == ((outputs.argmax(classes) == labels).sum(), labels.numel(), 0)


def accuracy(loss, outputs, targets) -> float | None:
    """Of microbatches of three samples."""
    microbatch_metrics = MicrobatchMetrics(loss, {})
    slices = [slice(i, i + 3) for i in range(0, len(targets), 3)]
    numbers = [microbatch_metrics(outputs[each], targets[each], len(targets[each])) for each in slices]
    totals = np.sum(numbers, axis=0)
    return microbatch_metrics.metrics(totals).get("accuracy")


def one_hot(classes: torch.Tensor, num_classes: int = 4) -> torch.Tensor:
    return 9 * nn.functional.one_hot(classes, num_classes).double()


CLASSES = torch.tensor([0, 1, 2, 3, 1, 2])


@pytest.mark.parametrize(
    "loss, ignored",
    [
        (cross_entropy, -100),
        (partial(cross_entropy, ignore_index=2), 2),
        (nn.CrossEntropyLoss(ignore_index=2), 2),
        (lambda outputs, targets: cross_entropy(outputs, targets), -100),
    ],
)
def test_ignored_targets_are_not_judged(loss, ignored):
    """They counted as wrong answers."""
    targets = CLASSES.clone()
    targets[::2] = ignored
    assert accuracy(loss, one_hot(CLASSES), targets) == 1.0
    assert accuracy(loss, one_hot(CLASSES), torch.full((6,), ignored)) is None


@pytest.mark.parametrize(
    "loss, outputs, targets",
    [
        (lambda o, t: o.sum(), torch.randn(6, 1), torch.tensor([0, 1, 0, 1, 0, 1])),
        (lambda o, t: o.sum(), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 4, 0])),
        (lambda o, t: o.sum(), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -1, 0])),
        (nn.functional.poisson_nll_loss, torch.randn(6, 6), torch.zeros(6, 6, dtype=torch.long)),
        (partial(nn.functional.huber_loss, delta=2.0), torch.randn(6, 4, 2), torch.zeros(6, 4).long()),
        (nn.MSELoss(), torch.randn(6, 4), CLASSES),
        (mse, torch.randn(6, 4).double(), torch.randn(6, 4).double()),
        (lambda o, t: o.double().sum(), torch.zeros(6, 4, dtype=torch.long), CLASSES),
        (lambda o, t: o.sum(), torch.randn(6), CLASSES),
        (lambda o, t: o.sum(), torch.randn(6, 4), torch.zeros(6, 4).long()),
    ],
    ids=[
        *("one logit", "counts", "-1", "poisson", "huber", "mse", "floats", "integers come out"),
        *("no classes", "as many targets as outputs"),
    ],
)
def test_what_is_no_classification_has_no_accuracy(loss, outputs, targets):
    """A single logit's argmax was taken; a regression on counts had an accuracy."""
    microbatch_metrics = Accuracy(loss)
    numbers = microbatch_metrics(outputs, targets)
    assert numbers[1] == 0 or numbers[2] > 0


def test_one_target_that_is_no_class_speaks_for_the_whole_data_set():
    targets = CLASSES.clone()
    targets[5] = 7
    assert accuracy(lambda o, t: o.sum(), one_hot(CLASSES), targets) is None


def test_the_loss_tells_where_the_classes_are():
    """As many classes as positions: the last dimension was taken, whatever the loss."""
    labels = torch.randint(0, 4, (6, 4))
    assert accuracy(cross_entropy, one_hot(labels).transpose(1, 2), labels) == 1.0
    assert accuracy(PerToken(), one_hot(labels), labels) == 1.0
    wide, two = torch.randint(0, 4, (6, 5)), CLASSES % 2
    assert accuracy(lambda o, t: o.sum(), one_hot(wide).transpose(1, 2), wide) == 1.0
    assert accuracy(lambda o, t: o.sum(), one_hot(two, 2), two) == 1.0


def test_metrics_of_the_users_are_sums_over_counts():
    def absolute(outputs, targets):
        return (outputs - targets).abs().sum(), targets.numel()

    outputs, targets = torch.randn(7, 2).double(), torch.randn(7, 2).double()
    microbatch_metrics = MicrobatchMetrics(
        mse, {"mae": absolute, "accuracy": lambda o, t: (1, 4), "none": lambda o, t: (0, 0)}
    )
    numbers = [microbatch_metrics(outputs[a:b], targets[a:b], b - a) for a, b in ((0, 5), (5, 7))]
    totals = np.sum(numbers, axis=0)
    found = microbatch_metrics.metrics(totals)
    assert found.keys() == {"loss", "mae", "accuracy"}
    assert found["loss"] == pytest.approx(mse(outputs, targets).item())
    assert found["mae"] == pytest.approx((outputs - targets).abs().mean().item())
    assert found["accuracy"] == 0.25


@pytest.mark.parametrize(
    "metrics, error, told",
    [
        ([len], TypeError, "metrics must be a dict of functions by name, got list"),
        ({"mae": 3}, TypeError, "metrics must be a dict of functions by name, got 'mae': 3"),
        ({"loss": len}, ValueError, "metrics must not be called 'loss'"),
    ],
)
def test_a_mistake_in_metrics_is_told(metrics, error, told):
    with pytest.raises(error, match=told):
        MicrobatchMetrics(mse, metrics)


@pytest.mark.parametrize("result", [0.5, (1, 2, 3), (torch.ones(2), 2), "ab"])
def test_a_metric_that_returns_anything_else_is_told(result):
    microbatch_metrics = MicrobatchMetrics(mse, {"odd": lambda outputs, targets: result})
    with pytest.raises(ValueError, match=r"metric odd must return \(sum, count\)"):
        microbatch_metrics(torch.ones(2, 2), torch.ones(2, 2), 2)


def test_a_target_is_reached_where_all_that_is_wanted_is():
    metrics = {"accuracy": 0.9, "loss": 0.4}
    assert reached(metrics, {"accuracy": 0.9}) and reached(metrics, {"accuracy": 0.8, "loss": 0.4})
    assert not reached(metrics, {"accuracy": 0.91}) and not reached(metrics, {"accuracy": 0.9, "loss": 0.3})
    with pytest.raises(ValueError, match=r"target_accuracy = 0\.9 needs targets that are classes"):
        reached({"loss": 0.1}, {"accuracy": 0.9})


def test_targets_need_a_validation_set_and_no_target_needs_none():
    assert targets_wanted(None, accuracy=None, loss=None) == {}
    assert targets_wanted(["a sample"], accuracy=None, loss=0.5) == {"loss": 0.5}
    with pytest.raises(ValueError, match=r"target_accuracy = 0\.9 needs validation, got None"):
        targets_wanted(None, loss=0.5, accuracy=0.9)


def test_without_samples_there_is_no_loss():
    metrics = MicrobatchMetrics(mse, {})
    assert math.isnan(metrics.metrics(np.zeros(metrics.width))["loss"])


class Pair(tuple):
    num_samples = 2


PAIRS = [Pair((1, 2)), Pair((3, 4)), Pair((5, 6))]


class Evaluating:
    """A worker of two microbatches a minibatch, each of one sample and a loss of 0.5 times its number."""

    def __init__(self, asked_at=()):
        self.said, self.asked_at = [], asked_at

    def average_statistics(self):
        self.said.append("average")

    def infer(self, minibatch, metrics, width, number):
        self.said.append(f"infer {number}")
        worker = self

        class Pending:
            def wait(self):
                worker.said.append(f"wait {number}")
                return np.array([[0.5 * m, 1.0, *[0.0] * (width - 2)] for m in minibatch])

            def ask_to_stop(self):
                return number in worker.asked_at

        return Pending()


def test_an_evaluation_waits_one_minibatch_late():
    worker = Evaluating(asked_at=[0])
    found = evaluate(worker, PAIRS, MicrobatchMetrics(mse, {}), step=9)
    assert found == {"loss": 0.5 * 21 / 6}
    order = "average, infer 0, infer 1, wait 0, infer 2, wait 1, wait 2"
    assert worker.said == order.split(", ")
    assert math.isnan(evaluate(Evaluating(), [], MicrobatchMetrics(mse, {}), step=9)["loss"])


def test_an_evaluation_is_left_when_a_rank_was_asked_to_stop():
    metrics, data = MicrobatchMetrics(mse, {}), PAIRS
    worker = Evaluating(asked_at=[1])
    assert evaluate(worker, data, metrics, step=9, may_stop=True) is None
    assert worker.said[-2:] == ["infer 2", "wait 1"]
    assert evaluate(Evaluating(), data, metrics, step=9, may_stop=True) is not None


@pytest.mark.parametrize("num_metrics, own, width", [(0, False, 5), (2, False, 9), (1, True, 4)])
def test_a_microbatch_has_as_many_numbers_as_are_said(num_metrics, own, width):
    named = {f"m{i}": lambda o, t: (1, 2) for i in range(num_metrics - own)}
    metrics = MicrobatchMetrics(cross_entropy, named | ({"accuracy": lambda o, t: (1, 2)} if own else {}))
    assert metrics.width == width == len(metrics(torch.randn(3, 4), torch.tensor([0, 1, 2]), 3))
