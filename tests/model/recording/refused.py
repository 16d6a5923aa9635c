"""Small forwards that are refused, each for one reason; the line that is to be named ends with "HERE"."""

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .models import WIDTH, Base, Box, Custom, Wrong


class ReadsActivation(Base):
    def between(self, x, i):
        return x * 2 if x.mean().item() > 0 else x  # HERE


class RaisesOnNan(Base):
    def between(self, x, i):
        if x.isnan().any():  # HERE
            raise FloatingPointError
        return x


class CountsRows(Base):
    def between(self, x, i):
        return x * x[x > 0].numel()  # HERE


class LayerDrop(Base):
    def between(self, x, i):
        return x * 2 if torch.rand(()).item() < 0.5 else x  # HERE


class DrawsPython(Base):
    def between(self, x, i):
        y = x * 1 if random.random() < 2 else x  # HERE
        return y + 1


class DrawsNumpy(Base):
    def between(self, x, i):
        return x * torch.tensor(np.random.rand(WIDTH))  # HERE


class CarriesState(Base):
    cache: Tensor | None = None

    def forward(self, x):
        x = self.enter(x)
        if self.cache is not None:
            x = x + self.cache  # HERE
        self.cache = x.detach()
        return self.head(x)


class CountsIn(Base):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.enter(x) * (1 / self.calls))  # HERE


class Maps(Base):
    def between(self, x, i):
        return torch.vmap(lambda row: row * 2 - row.mean())(x)  # HERE


bound_before = Wrong.apply


class BoundBefore(Custom):
    def between(self, x, i):
        x = bound_before(x, self.scale)
        return x + 1  # HERE


@torch.jit.script
def scripted(x):
    return x * 2 - x.tanh()


class Scripted(Base):
    def between(self, x, i):
        x = scripted(x)
        return x + 1  # HERE


class BoxOut(Base):
    def forward(self, x):
        return Box(self.head(self.enter(x)))


class DynamicCache(Box):
    """Named as that of transformers."""


class CacheOut(Base):
    def forward(self, x):
        x = self.enter(x)
        return {"logits": self.head(x), "past": DynamicCache(x)}


class SetsData(Base):
    def forward(self, x):
        self.head.weight.data = self.head.weight.data * 0.9  # HERE
        return super().forward(x)


class Backwards(Base):
    def forward(self, x):
        x = x.requires_grad_()
        self.enter(x).sum().backward(create_graph=True)  # HERE
        return self.head(self.enter(x.grad))


class BackwardsInside(Base):
    """Its second block adds to its own gradients, twice for two microbatches."""

    class Block(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if torch.is_grad_enabled():
                out.square().mean().backward(retain_graph=True)  # HERE
            return out

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Block(WIDTH, WIDTH)


class BackwardsByFunction(Base):
    def forward(self, x):
        x = x.requires_grad_()
        torch.autograd.backward(self.enter(x).sum(), inputs=[x], create_graph=True)  # HERE
        return self.head(self.enter(x.grad))


class HidesWeightInCheckpoint(Base):
    def between(self, x, i):
        return checkpoint(lambda y: y @ self.blocks[i][0].weight, x, use_reentrant=True)  # HERE


class ReturnsNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        return x, x.mean().item()


class NumberFromUnit(Base):
    def __init__(self) -> None:
        super().__init__()
        self.block = ReturnsNumber()

    def forward(self, x):
        x, mean = self.block(self.enter(x))  # HERE
        return self.head(x * mean)


class KeepsAuxiliary(Base):
    """Its loss reads `auxiliary`."""

    def forward(self, x):
        x = self.enter(x)
        self.auxiliary = x.square().mean()
        return self.head(x)
