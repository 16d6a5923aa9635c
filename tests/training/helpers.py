"""A small model, its data and a plain training loop, for tests of the trainer in a world of one rank."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec

cross_entropy = nn.functional.cross_entropy
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 4).double(), torch.randint(0, 3, (num_samples,)))


def seeded(num_samples: int, seed: int = 2) -> TensorDataset:
    """Make `data` that is the same each time."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (num_samples,), generator=generator))


def seeded_mlp() -> nn.Sequential:
    """Make an `mlp` that is the same each time."""
    torch.manual_seed(1)
    return mlp()


def whole(num_microbatches: int = 4, **options) -> Plan:
    """Make a plan with all layers on one rank."""
    return Plan((StageSpec(0, 3),), num_microbatches=num_microbatches, **options)


def plain_loop(model: nn.Module, batches, optimizer=momentum, loss=cross_entropy) -> list[float]:
    """Train in plain PyTorch and return the losses."""
    update, losses = optimizer(model.parameters()), []
    for inputs, targets in batches:
        update.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        update.step()
        losses.append(value.item())
    return losses


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    for tensor, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(tensor, reference, rtol=0, atol=1e-12)
