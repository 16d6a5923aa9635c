"""Metrics of one's own, and the accuracy that is counted, through a Trainer in a world of one rank."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec

pytestmark = pytest.mark.usefixtures("quick")


def as_classes(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets.long())


class IgnoresNone(nn.Module):
    """As losses of other libraries have it: `ignore_index` may be None."""

    ignore_index = None

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return as_classes(outputs, targets)


@pytest.fixture
def make(make_trainer):
    """Of a model that is right everywhere."""

    def trainer(num_classes: int = 4, loss=as_classes, **options):
        model = nn.Sequential(nn.Embedding(num_classes, num_classes), nn.Identity())
        model[0].weight.data = 99 * torch.eye(num_classes)
        given = {"optimizer": torch.optim.SGD, "minibatch_size": 8}
        return make_trainer(
            model, loss=loss, plan=Plan((StageSpec(0, 2),), num_microbatches=3), **given, **options
        )

    return trainer


def echo(num_samples: int = 20, dtype: torch.dtype = torch.int64, num_classes: int = 4) -> TensorDataset:
    """What comes in is what is to come out."""
    classes = torch.arange(num_samples) % num_classes
    return TensorDataset(classes, classes.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.uint16, torch.int32])
def test_all_types_of_targets_that_are_classes_are_judged(make, dtype):
    """256 classes, and -100, wrapped around where targets are bytes; uint16 could not be compared."""
    found = make(256).evaluate(echo(256, dtype, num_classes=256))
    assert found["accuracy"] == 1.0


def test_a_byte_that_minus_100_wraps_to_is_judged(make):
    def right(outputs, targets):
        return (outputs.argmax(1) == targets).sum(), len(targets)

    trainer = make(256, metrics={"right": right})
    wrong = TensorDataset(
        torch.zeros(4, dtype=torch.long), torch.tensor([0, 156, 156, 156], dtype=torch.uint8)
    )
    assert trainer.evaluate(wrong)["accuracy"] == trainer.evaluate(wrong)["right"] == 0.25


def test_a_loss_whose_ignore_index_is_none_ignores_as_cross_entropy_does(make):
    targets = torch.tensor([0, -100, 2, -100])
    found = make(loss=IgnoresNone()).evaluate(TensorDataset(torch.tensor([0, 1, 2, 3]), targets))
    assert found["accuracy"] == 1.0


def test_fit_tells_metrics_of_the_validation_and_leaves_out_what_judged_nothing(make):
    def doubled(outputs, targets):
        return 2 * targets.sum(), torch.tensor(len(targets))

    trainer = make(metrics={"doubled": doubled, "nothing": lambda outputs, targets: (0.0, 0)})
    (entry,) = trainer.fit(echo(), validation=echo(19))
    assert entry["validation"].keys() == {"loss", "accuracy", "doubled"}
    assert entry["validation"]["doubled"] == pytest.approx(2 * (echo(19).tensors[1].sum().item() / 19))


def test_a_target_goes_by_the_accuracy_of_the_user(make):
    """The one that is counted is 1.0 from the first epoch on."""

    def later(outputs, targets):
        return len(targets) * trainer.epoch, len(targets)

    trainer = make(metrics={"accuracy": later})
    trainer.fit(echo(), 5, validation=echo(), target_accuracy=1.0)
    assert [entry["validation"]["accuracy"] for entry in trainer.history] == [0.0, 1.0]


def test_what_else_a_metric_returns_is_told_in_one_line(make):
    trainer = make(metrics={"mean": lambda outputs, targets: outputs.mean()})
    with pytest.raises(ValueError, match=r"metric mean must return \(sum, count\), two numbers") as told:
        trainer.evaluate(echo())
    assert "\n" not in str(told.value)
