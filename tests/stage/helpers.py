"""Layers for tests of stages: skip connections, masks, outputs without gradient."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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
    """Return a model in float64, where two orders of addition differ by 1e-16 and a mistake by more."""
    return nn.Sequential(*layers).double()


def batch(num_samples: int, num_features: int) -> torch.Tensor:
    return torch.randn(num_samples, num_features, dtype=torch.float64)


class Shared(nn.Module):
    """Uses one linear layer twice, and its weight a third time."""

    def __init__(self, size):
        super().__init__()
        self.linear, self.scale = nn.Linear(size, size), nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.scale * self.linear(torch.tanh(self.linear(x))) @ self.linear.weight


class Tied(nn.Module):
    """An embedding that shares its weight with the linear layer after it."""

    def __init__(self, entries, size, sparse=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(entries, size, sparse=sparse), nn.Linear(size, entries)
        self.head.weight = self.embedding.weight

    def forward(self, indices):
        return self.head(torch.tanh(self.embedding(indices)))


class Checkpointed(nn.Module):
    """Runs `inner` under activation checkpointing, so again in the backward."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Penalised(nn.Module):
    """Adds its input's gradient to its output, so the backward differentiates a gradient."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.inner(x)
        return y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]


class Implicit(nn.Module):
    """Runs autograd twice for its input's gradient inside the backward."""

    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        fixed = torch.tanh(self.inner(x)).detach().requires_grad_()
        again = torch.tanh(self.inner(fixed))
        copy = again.clone()

        def refine(gradient):
            for _ in range(2):
                gradient = gradient + torch.autograd.grad(again, fixed, gradient, retain_graph=True)[0] / 4
            return gradient

        copy.register_hook(refine)
        return copy + x


class Stateful(nn.Module):
    """Computes outputs from buffers that its forwards change, in place and by replacement."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.ones(size))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return self.linear(x * self.constant + self.mean) * self.calls.clone()
