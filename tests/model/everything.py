"""A small model with everything at once that a forward may do between its modules, and its data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 13, 8


class Everything(nn.Module):
    """Inputs by keyword, a mask made once, dropout inside and outside modules, statistics, a skip over all
    blocks, buffers that the forward replaces, changes in place, a checkpoint, and several outputs.

    Args:
        shares: embedding and head are tied, and a parameter of the root and a block are used in two places.
    """

    def __init__(self, shares: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.shares = shares
        if shares:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        ids = input_ids
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        weights = mask.unsqueeze(-1).to(self.scale.dtype)
        x = self.embed(ids) * self.scale
        skip = x * 2
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) * weights
        for block in self.blocks:
            x = block(x) + 0.1 * skip
            skip.add_(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.calls = self.calls + 1
        x = F.dropout(checkpoint(self.twice, x, use_reentrant=False), 0.1, self.training)
        x = x * weights + (skip - self.mean)
        if self.shares:
            x = self.twice(x) * self.scale
        return {"logits": self.head(x), "penalty": (x * x).mean((1, 2))}


def loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    entropy = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
    return entropy + 0.01 * outputs["penalty"].mean()


def batch(num_samples: int, length: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and targets of as many samples."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, WORDS, (2, num_samples, length), generator=generator)
    lengths = 2 + torch.arange(num_samples) * 3 % (length - 1)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}, labels
