"""Models that are not split: a plan of several stages is refused, a plan by name trains and says why.

Each kind is in a world of one rank; tests/mpi has two.
"""

import copy
import re

import pytest
import torch
from torch import nn

from hybridpipe import Plan, StageSpec
from hybridpipe.errors import UserError
from hybridpipe.model.layers import layers_of
from tests.model.recording import models, refused
from tests.thinned import thinned
from tests.training.helpers import cross_entropy, momentum

TWO = Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=2)
INPUTS, TARGETS = torch.randn(4, 20).double(), torch.randint(0, 5, (4,))


class Alias(nn.Linear):
    """Returns two tensors that share memory; it has no children, so it is called whole."""

    def forward(self, x):
        x = super().forward(x) * 1
        return x, x[:]


class Aliases(nn.Module):
    """Two tensors share memory to which the forward writes behind both modules."""

    def __init__(self) -> None:
        super().__init__()
        self.alias, self.head = Alias(20, models.WIDTH), nn.Linear(models.WIDTH, 5)

    def forward(self, x):
        x, y = self.alias(x)
        out = self.head(x * 1)
        x.add_(1)
        return out * x.sum(1, keepdim=True) * y.sum(1, keepdim=True)


class Cached(models.Base):
    """Called as models of transformers are: the loss gets the cache, too."""

    def forward(self, x):
        x = self.enter(x)
        return {"logits": self.head(x), "past": refused.DynamicCache(x)}


def hooked() -> nn.Module:
    model = models.Base()
    model.register_forward_hook(lambda *_: None)
    return model


def of_logits(model):
    return lambda outputs, targets: cross_entropy(outputs["logits"], targets)


def of_auxiliary(model):
    return lambda outputs, targets: cross_entropy(outputs, targets) + model.auxiliary


def summed(model):
    """The same as a pair."""
    return lambda outputs, targets: (cross_entropy(outputs, targets) + model.auxiliary, 1.0)


HERE = r"^refused.py:\d+: "
KINDS = {
    "item": (refused.ReadsActivation, None, HERE + "item reads data .* as torch.where does"),
    "random path": (
        refused.LayerDrop,
        None,
        HERE + r"item gave .* random numbers decide .* \(draw them",
    ),
    "python's random": (
        refused.DrawsPython,
        None,
        HERE + r"before it .* \(use torch's, such as torch.rand",
    ),
    "hidden": (Cached, of_logits, r"^the model's output holds .* no pytree \(pass use_cache=False\)"),
    "aliasing": (Aliases, None, r"^test_refusals.py:\d+: writes to memory .* \(write out of place\)"),
    "vmap": (refused.Maps, None, HERE + r"vmap or grad outside leaf modules \(call it inside a module\)"),
    "attribute": (
        refused.KeepsAuxiliary,
        of_auxiliary,
        r"^test_refusals.py:\d+: the loss reads .* \(return it\)",
    ),
    "pair": (refused.KeepsAuxiliary, summed, r"^test_refusals.py:\d+: the loss reads a tensor"),
    "hooks": (hooked, None, r"^the model \(Base\) has hooks, .* \(register them on its children\)"),
}


OF_THE_LOSS = ["attribute", "pair"]  # which reads the model itself, so that no copy can be measured


def made(kind: str):
    """Return the model, the loss and the reason."""
    make, loss_of, reason = KINDS[kind]
    torch.manual_seed(0)
    model = make().double()
    return model, cross_entropy if loss_of is None else loss_of(model), reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_several_stages_is_refused_in_one_line(kind):
    model, loss, reason = made(kind)
    layers = layers_of(model, INPUTS, loss, TARGETS)
    told = reason.replace("^", "^the plan cuts num_layers = 2, the model has 1 layer: ")
    with pytest.raises(ValueError, match=f"{told}.*; use plan='dp'$") as refusal:
        layers.check_plan(TWO)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "kind, name", thinned([kind for kind in KINDS if kind not in OF_THE_LOSS], ["auto", "dp"], together=1)
)
def test_a_plan_by_name_trains_it_as_one_stage_and_says_why_once(kind, name, make_trainer, quick, capsys):
    model, loss, reason = made(kind)
    trainer = make_trainer(
        model, loss=loss, optimizer=momentum, plan=name, minibatch_size=4, microbatch_size=4
    )
    capsys.readouterr()
    losses = [trainer.train_step(INPUTS, TARGETS) for _ in range(2)]
    told = [line for line in capsys.readouterr().err.splitlines() if "one stage" in line]
    begin = "^hybridpipe: the model runs as one stage: "
    assert len(told) == 1
    assert re.search(reason.replace("^", begin), told[0])
    assert all(map(torch.isfinite, map(torch.tensor, losses))) and trainer.plan.num_stages == 1
    assert told[0].partition("one stage: ")[2] in trainer.explain()


@pytest.mark.parametrize("kind", OF_THE_LOSS)
def test_a_plan_by_name_is_refused_where_the_loss_reads_the_model(kind, make_trainer, capsys):
    model, loss, reason = made(kind)
    trainer = make_trainer(model, loss=loss, optimizer=momentum, plan="auto", minibatch_size=4)
    with pytest.raises(UserError, match=f"{reason}.*; a plan by name measures a copy .*: give a Plan of one"):
        trainer.train_step(INPUTS, TARGETS)
    assert "one stage" not in capsys.readouterr().err


def test_a_plan_of_one_stage_trains_it_as_plain_pytorch_does(make_trainer):
    """With what the stages would have lost: the loss's attribute, and hooks of the model itself."""
    model, called = refused.KeepsAuxiliary().double(), []
    model.register_forward_hook(lambda *_: called.append(1))
    expected = copy.deepcopy(model)
    options = {"optimizer": momentum, "plan": Plan((StageSpec(0, 1),)), "minibatch_size": 4}
    trainer = make_trainer(model, loss=of_auxiliary(model), **options)
    trainer.train_step(INPUTS, TARGETS)
    called.clear()
    optimizer = momentum(expected.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        of_auxiliary(expected)(expected(INPUTS), TARGETS).backward()
        optimizer.step()
    called.clear()
    trainer.train_step(INPUTS, TARGETS)
    assert called == [1]
    for tensor, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(tensor, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_that_come_later_are_refused_too(register, make_trainer):
    model = models.Base().double()
    plan = Plan((StageSpec(0, layers_of(model, INPUTS).num_layers),))
    trainer = make_trainer(model, loss=cross_entropy, optimizer=momentum, plan=plan, minibatch_size=4)
    trainer.train_step(INPUTS, TARGETS)
    getattr(model, register)(lambda *_: None)
    with pytest.raises(
        UserError, match=r"the model \(Base\) has hooks, which would run at the recording only"
    ):
        trainer.train_step(INPUTS, TARGETS)


def test_models_that_can_be_split_say_nothing(make_trainer, quick, capsys):
    given = {"loss": cross_entropy, "optimizer": momentum, "plan": "dp", "minibatch_size": 4}
    make_trainer(models.Base().double(), **given).train_step(INPUTS, TARGETS)
    make_trainer(nn.Sequential(models.Base().double()), **given).train_step(INPUTS, TARGETS)
    assert "one stage" not in capsys.readouterr().err


def test_explain_needs_the_record(make_trainer):
    given = {"loss": cross_entropy, "optimizer": momentum, "plan": "dp", "minibatch_size": 4}
    trainer = make_trainer(models.Base().double(), **given)
    with pytest.raises(RuntimeError, match="is recorded with the first minibatch: prepare or train first"):
        trainer.explain()
    assert (
        make_trainer(nn.Sequential(nn.Linear(20, 5)), **given)
        .explain()
        .startswith("nn.Sequential: one layer")
    )
