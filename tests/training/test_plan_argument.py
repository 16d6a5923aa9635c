"""The argument `plan` of the trainer, and plans that do not fit, in a world of one rank."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.errors import UserError
from hybridpipe.files import write_json
from tests.training.helpers import data, mlp, plain_loop, whole

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize(
    "options, told",
    [
        ({"schedule": "gpipe"}, "schedule = 'gpipe' disagrees with the plan, which says '1f1b'"),
        ({"recompute": True}, "recompute = True disagrees with the plan, which says False"),
        ({"max_in_flight": 2}, "max_in_flight = 2 disagrees with the plan, which says None"),
    ],
)
def test_a_plan_says_itself_what_it_does(make, options, told):
    with pytest.raises(ValueError, match=told):
        make(plan=whole(4), **options)


@pytest.mark.parametrize("name", ["auto", "dp", "straight"])
def test_a_plan_that_goes_by_its_name(make, name):
    model = mlp()
    reference, batches = copy.deepcopy(model), [data(8)[:] for _ in range(3)]
    trainer = make(model, plan=name, microbatch_size=2)
    with pytest.raises(RuntimeError, match="measured with the first minibatch"):
        _ = trainer.plan
    losses = [trainer.train_step(*batch) for batch in batches]
    assert (trainer.plan.name, trainer.plan.num_microbatches) == ("1", 4)
    assert trainer.plan.predicted.minibatch_seconds > 0
    assert losses == pytest.approx(plain_loop(reference, batches), rel=0, abs=1e-12)
    assert trainer.choice.profile.samples == 2


class Centred(torch.optim.SGD):
    """Subtracts the mean of a whole gradient, which a part of it does not have."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad - parameter.grad.mean()
        return super().step(closure)


def test_nothing_is_sharded_by_choice_where_an_optimizer_needs_whole_parameters(make, capsys):
    trainer = make(plan="auto", zero="auto", optimizer=partial(Centred, lr=0.1))
    trainer.prepare(data(8))
    assert trainer._planner._request.zero == 0
    told = "replicas shard no update: Centred updates a part of a parameter otherwise than the whole"
    assert told in capsys.readouterr().err
    make(plan="auto", zero="auto").prepare(data(8))
    assert "shard" not in capsys.readouterr().err


def test_measuring_the_model_leaves_the_first_minibatch_alone(make):
    def first_loss(plan):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 6), nn.Linear(6, 3)).double()
        return make(model, plan=plan, microbatch_size=2).train_step(*data(8)[:])

    assert first_loss("dp") == first_loss(whole())


def test_prepare_makes_the_plan_from_the_data_set(make):
    trainer = make(plan="auto")
    trainer.prepare(data(8))
    assert trainer.plan.num_layers == 3


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_from_a_file(make, tmp_path, kind):
    write_json(tmp_path / "plan.json", whole())
    trainer = make(plan=kind(tmp_path / "plan.json"))
    assert trainer.plan == whole() and trainer.microbatch_size == 2


def test_a_plan_that_is_no_file(make, tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json: cannot be read"):
        make(plan=tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "options, told",
    [
        ({"plan": Plan((StageSpec(0, 1, 2), StageSpec(1, 3)))}, r"plan needs 2 \+ 1 = 3 ranks, got 1"),
        ({"plan": Plan((StageSpec(0, 3, 1, (4,)),))}, "plan names rank 4, the world has ranks 0 to 0"),
        ({"plan": Plan((StageSpec(0, 2),))}, "cuts num_layers = 2, the model has 3 layers"),
        (
            {"plan": whole(7), "minibatch_size": 10},
            "minibatch_size = 10 .* num_microbatches = 7 .* slices of 2 are 5",
        ),
        (
            {"plan": whole(4), "microbatch_size": 3},
            "microbatch_size = 3 disagrees .* num_microbatches = 4 makes 2",
        ),
        ({"minibatch_size": 0}, "minibatch_size must be an integer >= 1, got 0"),
        ({"plan": "dp", "minibatch_size": -8}, "minibatch_size must be an integer >= 1, got -8"),
        ({"plan": "dp", "microbatch_size": 0}, "microbatch_size must be an integer >= 1, got 0"),
    ],
)
def test_what_does_not_fit_is_told_with_its_arithmetic(make, options, told):
    with pytest.raises(ValueError, match=told):
        make(**options)


def test_giving_the_microbatch_size_of_the_plan_is_no_error(make):
    assert make(microbatch_size=2).microbatch_size == 2
    assert make(plan=whole(3), minibatch_size=8).microbatch_size == 3


def test_an_error_of_the_model_is_no_mistake_about_the_plan():
    """`train` reports a ValueError about plan or sizes in one line; a model's error keeps its traceback."""

    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("in the model")

    trainer = Trainer(
        nn.Sequential(Broken(2, 2)),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        minibatch_size=4,
    )
    where = r"in the forward with inputs = float32 \(4, 2\)"
    line = rf"^the model fails on the first microbatch: ValueError: in the model; {where}$"
    with pytest.raises(RuntimeError, match=line) as caught:
        trainer.train_step(torch.ones(4, 2), torch.ones(4, 2))
    assert str(caught.value.__cause__) == "in the model"
