"""Mixtures: small models with experts, as models of transformers hold them, and data for them.

Knows torch only, so that tests without MPI share them with programs under mpirun.
Invariant: every number comes of a seed, the caller's for weights and one of this file for data.
"""

import torch
from torch import Tensor, nn

WIDTH, EXPERTS, FEATURES, CLASSES = 6, 4, 5, 3
PLAN = (("*.experts", "ep_dispatch_experts"),)
PLAN_OF_RECORDED = (("layers.*.experts", "ep_dispatch_experts"),)


class Experts(nn.Module):
    """Experts in 3-D weights, called with tokens, indices and weights, and computed one after the other."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(0.4 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.bias = nn.Parameter(0.1 * torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(0.4 * torch.randn(EXPERTS, WIDTH, 2 * WIDTH))

    def forward(self, tokens, index, weights):
        found = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            if len(token):
                inner = torch.tanh(tokens[token] @ self.up[expert].T + self.bias[expert])
                found = found.index_add(0, token, inner @ self.down[expert].T * weights[token, choice, None])
        return found


class Mixture(nn.Module):
    """Each token chooses k experts, whose weights sum up to 1."""

    def __init__(self, k: int):
        super().__init__()
        self.gate, self.experts, self.k = nn.Linear(WIDTH, EXPERTS), Experts(), k

    def forward(self, x):
        weights, index = torch.softmax(self.gate(x), -1).topk(self.k, -1)
        return x + self.experts(x, index, weights / weights.sum(-1, keepdim=True))


class Recorded(nn.Module):
    """Layers called in a way of their own, so the forward is recorded."""

    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) * (1 + i / 10)
        return x


def mixtures() -> nn.Sequential:
    """Two mixtures between linear layers, the first with two experts a token."""
    first, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(first, Mixture(2), Mixture(1), nn.Tanh(), last)


def points_of(samples: int) -> tuple[Tensor, Tensor]:
    """Points and their classes, in float64."""
    numbers = torch.Generator().manual_seed(2)
    inputs = torch.randn(samples, FEATURES, generator=numbers, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (samples,), generator=numbers)


def of_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a mixture of points."""
    return nn.functional.cross_entropy(outputs, targets)
