"""Layers and values that pipelines meet: skip connections, masks, outputs without gradient."""

import torch
from torch import nn


class Call(nn.Module):
    """A layer that is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


class OnFirst(nn.Module):
    """Runs `inner` on a tuple's first tensor and passes the others on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, value):
        first, *others = value
        return self.inner(first), *others


def fork():
    """x → (x, x)."""
    return Call(lambda x: (x, x))


def join():
    """(a, b) → a + b."""
    return Call(lambda pair: pair[0] + pair[1])


def double(*layers: nn.Module) -> nn.Sequential:
    """In float64, so that two orders of adding up differ by 1e-16 and a mistake by more."""
    return nn.Sequential(*layers).double()


def batch(num_samples: int, num_features: int) -> torch.Tensor:
    return torch.randn(num_samples, num_features, dtype=torch.float64)
