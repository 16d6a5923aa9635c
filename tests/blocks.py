"""Blocks: small models whose weights shards may have in parts, and the plans that name them.

Knows torch only, so that tests without MPI share them with programs under mpirun.
Invariant: every style of a plan is in them, but for those of an embedding.
"""

import torch
from torch import nn

from tests.mixtures import CLASSES, FEATURES

WIDTH = 6


class Block(nn.Module):
    """An MLP, one whose first weight packs two, and a norm between columns and rows."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.gates, self.gated = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH, bias=False)
        self.of_heads = nn.LayerNorm(4)

    def forward(self, x):
        x = x + self.down(self.of_heads(self.up(self.norm(x)).unflatten(-1, (-1, 4))).flatten(-2))
        gate, value = self.gates(x).chunk(2, -1)
        return x + self.gated(torch.sigmoid(gate) * value)


class Blocks(nn.Module):
    """Called in its own way, so its forward is recorded."""

    def __init__(self):
        super().__init__()
        self.start, self.blocks = nn.Linear(FEATURES, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.end = nn.Linear(WIDTH, CLASSES + 1)

    def forward(self, x):
        x = self.start(x)
        for i, block in enumerate(self.blocks):
            x = block(x) * (1 + i / 10)
        return self.end(x)


def blocks() -> nn.Sequential:
    """Return blocks as layers of their own."""
    last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES + 1)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), Block(), Block(), *last)


OF_BLOCK = {
    "up": "colwise",
    "of_heads": "replicated_with_grad_allreduce",
    "down": "rowwise",
    "gates": "packed_colwise",
    "gated": "rowwise",
}
PLAN = (
    *((f"*.{name}", style) for name, style in OF_BLOCK.items()),
    ("3", "rowwise_split_input"),
    ("4", "colwise_gather_output"),
)
PLAN_OF_RECORDED = (
    *((f"blocks.*.{name}", style) for name, style in OF_BLOCK.items()),
    ("end", "colwise_gather_output"),
)
