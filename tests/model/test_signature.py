"""Layers of equal signature: what is part of it, and what is not."""

import pytest
import torch
from torch import nn

from hybridpipe.model.layers import layers_of
from hybridpipe.model.signature import module_signature


class Block(nn.Module):
    def __init__(self, index=0, width=4, stride=1, causal=False, act=torch.relu):
        super().__init__()
        self.index, self.causal, self.act = index, causal, act
        self.mix = nn.Conv1d(width, width, 3, stride, padding=1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.act(self.mix(x)))


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * 2
        return x.mean(dim=(1, 2))


def frozen() -> nn.Module:
    return Block().requires_grad_(False)


def hooked() -> nn.Module:
    block = Block()
    block.mix.register_forward_hook(lambda *_: None)
    return block


def test_blocks_of_one_kind_are_alike():
    """Their weights differ, and so do the numbers that they hold as their place."""
    assert module_signature(Block(index=3)) == module_signature(Block(index=4))


@pytest.mark.parametrize(
    "other",
    [
        Block(width=6),
        Block(stride=2),
        Block(causal=True),
        Block(act=torch.sigmoid),
        Block().double(),
        Block().eval(),
        frozen(),
        hooked(),
        nn.Sequential(Block()),
    ],
    ids=["width", "stride", "setting", "function", "dtype", "mode", "frozen", "hook", "class"],
)
def test_what_decides_over_the_time_is_part_of_it(other):
    assert module_signature(other) != module_signature(Block())


def test_layers_of_a_record_are_alike_if_their_glue_is_too():
    """The first takes the model's input, which needs no gradient; behind the last stands other glue."""
    layers = layers_of(Net(*(Block(index) for index in range(5))), torch.randn(2, 4, 8))
    first, *middle, last = (layer.signature() for layer in layers.single())
    assert len(middle) == 3 and len({*middle}) == 1
    assert len({first, middle[0], last}) == 3
