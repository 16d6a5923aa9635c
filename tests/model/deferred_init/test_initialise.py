"""Modules on the meta device are set by their own initialisers, in one order."""

from functools import partial

import torch
from torch import nn

from hybridpipe.model.deferred_init.initialise import initialisers, is_on_meta


class Block(nn.Module):
    """Sets what it holds after its parts have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)

    def init_weights(self) -> None:
        nn.init.zeros_(self.second.bias)


class Pretrained(nn.Module):
    """As a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(2, 2), Block()

    def _init_weights(self, module: nn.Module) -> None:
        """Set one module."""


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def told(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    found = []
    for call in initialisers(model):
        if isinstance(call, partial):
            found.append(f"{names[call.func.__self__]}: {names[call.args[0]]}")
        else:
            found.append(f"{names[call.__self__]}.{call.__name__}")
    return found


def test_parts_come_first_and_modules_without_tensors_never():
    model = on_meta(lambda: nn.Sequential(Block(), nn.MultiheadAttention(2, 1)))
    assert told(model) == [
        "0.first.reset_parameters",
        "0.second.reset_parameters",
        "0.init_weights",
        "1.out_proj.reset_parameters",
        "1._reset_parameters",
    ]


def test_a_model_that_sets_its_modules_sets_each():
    model = on_meta(lambda: nn.Sequential(Pretrained(), nn.Linear(2, 2)))
    inside = ["0: 0.layer", "0: 0.block.first", "0: 0.block.second", "0: 0.block", "0: 0"]
    assert told(model) == [*inside, "1.reset_parameters"]


def test_modules_that_have_numbers_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    assert told(model) == ["1.reset_parameters"]
    assert is_on_meta(model) and not is_on_meta(model[0])


def test_a_module_that_two_hold_is_set_once():
    layer = on_meta(lambda: nn.Linear(2, 2))
    assert len(initialisers(nn.ModuleList([layer, nn.Sequential(layer)]))) == 1
