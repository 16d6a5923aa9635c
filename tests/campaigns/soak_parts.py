"""Parts of the soak's training: a model with all that a checkpoint has to hold, as small as can be."""

import torch
from torch import nn


def model() -> nn.Sequential:
    """Six layers: random numbers in training, running statistics, ties of nothing."""
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.Sequential(nn.BatchNorm1d(12), nn.Tanh()),
        nn.Dropout(0.3),
        nn.Linear(12, 12),
        nn.Sequential(nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(12, 3),
    )


def data(samples: int, seed: int) -> torch.utils.data.TensorDataset:
    """Points, and the one of three directions that each lies in most."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    directions = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, (inputs @ directions).argmax(1))
