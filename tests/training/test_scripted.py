"""TorchScript parts of a model: trained as modules that are called whole, under schedules of one stage."""

from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe import Plan, StageSpec
from hybridpipe.model.layers import layers_of
from tests.thinned import thinned

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning"),
]
INPUTS, TARGETS = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3


class Block(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class Parts(nn.Module):
    def __init__(self, norm, made) -> None:
        super().__init__()
        self.first, blocks, self.last = nn.Linear(4, 8), [Block(norm), Block(norm)], nn.Linear(8, 3)
        self.blocks = nn.ModuleList(map(made, blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def parts(norm, made=lambda block: block) -> Parts:
    torch.manual_seed(0)
    return Parts(norm, made).double()


def chained(norm, made=lambda block: block) -> nn.Sequential:
    whole = parts(norm, made)
    return nn.Sequential(whole.first, *whole.blocks, whole.last)


def traced(block):
    return torch.jit.trace(block, torch.zeros(4, 8))


def trained(make_trainer, model, options):
    whole = StageSpec(0, layers_of(model, INPUTS).num_layers)
    plan = Plan((whole,), **options) if options else "dp"
    given = {"optimizer": partial(torch.optim.SGD, lr=0.1), "plan": plan, "minibatch_size": 4}
    trainer = make_trainer(model, loss=nn.functional.cross_entropy, **given)
    dataset = torch.utils.data.TensorDataset(INPUTS, TARGETS)
    history = trainer.fit(dataset, epochs=2, shuffle=False, validation=dataset)
    return [(entry["loss"], entry["validation"]["loss"]) for entry in history], trainer.full_state_dict()


PLANS = {
    "dp": {},
    "recomputed": {"num_microbatches": 2, "recompute": True},
    "zero-bubble": {"schedule": "zero-bubble", "num_microbatches": 2},
    "pipedream": {"schedule": "pipedream", "num_microbatches": 1},
}
KINDS = [(nn.BatchNorm1d, torch.jit.script), (nn.LayerNorm, traced)]  # a trace has one mode


@pytest.mark.parametrize("plan, kind, build", thinned(list(PLANS), KINDS, [parts, chained], together=1))
def test_it_trains_as_the_module_that_it_was_made_of(make_trainer, plan, kind, build):
    """Its tables are no dicts, which the check for replaced modules took them for."""
    (norm, made), options = kind, PLANS[plan]
    losses, state = trained(make_trainer, build(norm), options)
    found, have = trained(make_trainer, build(norm, made), options)
    torch.testing.assert_close(found, losses, rtol=0, atol=1e-12)
    torch.testing.assert_close(dict(have), dict(state), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_model_that_is_one_trains_as_one_layer(make_trainer, options):
    """Its class says `forward` to nobody, and `get_submodule` is not supported."""
    losses, _ = trained(make_trainer, chained(nn.LayerNorm), options)
    found, _ = trained(make_trainer, torch.jit.script(chained(nn.LayerNorm)), options)
    torch.testing.assert_close(found, losses, rtol=0, atol=1e-12)


def test_it_is_not_opened_however_large_it_is():
    assert layers_of(parts(nn.LayerNorm, torch.jit.script), INPUTS).names == [
        "first",
        "blocks.0",
        "blocks.1",
        "last",
    ]
