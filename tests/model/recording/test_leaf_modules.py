"""Leaf modules: the modules that are called whole."""

import pytest
from torch import nn

from hybridpipe.model.recording.leaf_modules import leaf_modules_of


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.act = nn.Linear(4, 12), nn.Linear(4, 4), nn.ReLU()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(9, 4), nn.Dropout(0.1)
        self.encoder, self.head = Encoder(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
        self.again = self.head[0]


def test_lists_and_containers_are_opened_and_blocks_are_whole():
    assert [*leaf_modules_of(Model())] == [
        "embed",
        "drop",
        *(f"encoder.blocks.{i}" for i in range(3)),
        "encoder.norm",
        "head.0",
        "head.2",
    ]


def test_a_named_module_is_opened_too():
    leaf_modules = leaf_modules_of(Model(), opened={"encoder.blocks.1", "embed"})
    assert "embed" not in leaf_modules and "encoder.blocks.1" not in leaf_modules
    assert {"encoder.blocks.1.attention", "encoder.blocks.1.mlp"} <= leaf_modules.keys()


@pytest.mark.parametrize("share, whole", [(0.3, True), (0.2, False)])
def test_a_heavy_module_is_opened(share, whole):
    model = Model()
    part = sum(p.numel() for p in model.encoder.blocks[0].parameters()) / sum(
        p.numel() for p in model.parameters()
    )
    assert 0.2 < part < 0.3
    assert ("encoder.blocks.0" in leaf_modules_of(model, share=share)) == whole


def test_every_parameter_below_the_root_is_in_one_leaf_module():
    model = Model()
    held = [id(p) for module in leaf_modules_of(model).values() for p in module.parameters()]
    assert len(held) == len(set(held)) and set(held) == {*map(id, model.parameters())}


def test_a_module_without_parameters_is_a_leaf_module_if_it_has_hooks():
    model = Model()
    assert "head.1" not in leaf_modules_of(model)
    model.head[1].register_forward_pre_hook(lambda *_: None)
    assert "head.1" in leaf_modules_of(model)
