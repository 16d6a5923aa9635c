"""Small forwards that are split, each written for one mechanism of recording."""

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 12


class Base(nn.Module):
    """An entry, three blocks, a head; forwards differ in what they do between them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(20, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.enter(x)
        for i, block in enumerate(self.blocks):
            x = self.between(block(x), i)
        return self.head(x)

    def between(self, x, i):
        return x


# --- right at every cut ---


class NoGrad(Base):
    def forward(self, x):
        x = self.enter(x)
        with torch.no_grad():
            gate = self.blocks[0](x).sigmoid() * 2
        for block in self.blocks[1:]:
            x = block(x) * gate
        return self.head(x)


class Checkpointed(Base):
    use_reentrant = False

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    use_reentrant = True


class Wrong(torch.autograd.Function):
    """A product with gradients that no one would derive."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 3, (g * x).sum(0) * 5


class Custom(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def between(self, x, i):
        return Wrong.apply(x, self.scale)


class Methods(Base):
    """Methods, properties, indices, factories, a parameter and a buffer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        x = self.enter(x)
        first = x.T.contiguous().mT
        rows, columns = x.shape
        mask = torch.zeros(rows, columns, dtype=x.dtype)
        mask[:, ::2] = 1
        mask[0, 1] += x.detach().mean()
        mask = mask.to(x).masked_fill(torch.arange(columns) > columns - 2, 0.5)
        for block in self.blocks:
            x = F.linear(block(x), self.square) + self.shift * mask
            x = -x.data * 0.1 + x[..., :]
            x += first
            x[:, 0] = x[:, 1] * 2
            left, right = x.chunk(2, -1)
            x = torch.cat([right, left], -1).clone() @ self.square.t()
        *_, last = x.unbind(1)
        return self.head(x + last[:, None]) + len(x)


class Random(Base):
    def between(self, x, i):
        return F.dropout(x, 0.3, self.training) + torch.rand(WIDTH) * torch.randn_like(x)


class PythonRandomUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * (random.random() + np.random.rand())


class PythonRandomInside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PythonRandomUnit() for _ in range(3))


class Assigned(Base):
    """A buffer that glue replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.head(x + self.mean)


class Counts(nn.Module):
    """A leaf module that replaces a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) / self.calls


class CountsInside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(3))


class Lazy(Base):
    """An attribute made at the first call."""

    ramp: Tensor | None = None

    def between(self, x, i):
        if self.ramp is None:
            self.ramp = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        return x * self.ramp


class ReadyMade(Base):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.ramp = torch.linspace(0, 1, WIDTH, dtype=torch.float64)

    def between(self, x, i):
        return x * self.ramp


class NeverSkips(Base):
    """The pattern of transformers' layerdrop with probability 0."""

    def between(self, x, i):
        return x * 2 if self.training and torch.rand([]) < 0.0 else x


class GuardedByMask(Base):
    def forward(self, x):
        full = (x[:, 0] > 0).all()
        x = self.enter(x)
        for block in self.blocks:
            x = block(x) if full else block(x) * 0.5
        return self.head(x)


class PicksRows(Base):
    """A shape that follows from the inputs."""

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        y = self.enter(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y).index_add(0, rows, self.head(y[rows]))


class Hooks(Base):
    """Hooks gather what is made inside leaf modules, which are opened for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.second.seen = self.seen
            block.second.register_forward_pre_hook(lambda module, args: module.seen.append(args[0]))

    def forward(self, x):
        self.seen.clear()
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + sum(self.seen))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x).tanh()).tanh()


class WritesInput(Base):
    def forward(self, x):
        x.mul_(0.5)
        y = self.enter(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y) + x[:, :5]


class ForwardCalled(Base):
    """Modules whose `forward` is called by hand are glue."""

    def forward(self, x):
        x = self.enter.forward(x)
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


class Accumulates(Base):
    """An accumulator that begins without a gradient, with a view of it."""

    def forward(self, x):
        x = self.enter(x)
        total, mask = torch.zeros_like(x, requires_grad=False), torch.ones(WIDTH)
        half = total[:, :5]
        for block in self.blocks:
            x = block(x) + mask
            total.add_(x)
            mask[1] += 0.5
        return self.head(total) + half


class Aliases(Base):
    """Views of a value that is written to behind them."""

    def forward(self, x):
        x = self.enter(x)
        skip = x * 2
        half, top = skip[:, ::2], skip.view(-1, 2, WIDTH // 2)[:, 0]
        for block in self.blocks:
            x = block(x)
            skip.add_(x)
            top.mul_(0.9)
        return self.head(x + skip) * half.mean(1, keepdim=True) + half[:, :5] + top[:, :5]


class Box:
    def __init__(self, x) -> None:
        self.x = x


class TakesBox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, box):
        return self.linear(x).tanh() * box.x


class BoxIn(Base):
    """Tensors in an object that is no pytree open the leaf modules that take it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesBox() for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        box = Box(x.sigmoid())
        for block in self.blocks:
            x = block(x, box)
        return self.head(x)


class FillsBox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, box):
        box.x = x * 2
        return self.linear(x).tanh()


class BoxFilled(Base):
    """The object is empty when the first leaf module takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FillsBox() for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        box = Box(None)
        for block in self.blocks:
            x = block(x, box)
        return self.head(x + box.x)


class SharedTwice(Base):
    """One block in several places, and a head with the weight of the entry."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(WIDTH, 20)
        self.back.weight = nn.Parameter(self.enter.weight.detach().T.clone())
        self.again = nn.Linear(WIDTH, 20)
        self.again.weight = self.back.weight

    def forward(self, x):
        y = self.enter(x)
        for _ in range(3):
            y = self.blocks[0](y)
        return self.head(self.enter(self.back(y) + self.again(y)))


class BorrowsWeight(nn.Module):
    """A leaf module that uses a weight of another module."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.linear, self._owner = nn.Linear(WIDTH, WIDTH), [owner]

    def forward(self, x):
        return self.linear(x) @ self._owner[0].weight


class Borrows(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = BorrowsWeight(self.blocks[0][0])


class InPlaceUnits(Base):
    def __init__(self) -> None:
        super().__init__()
        self.relus = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(3)
        )

    def between(self, x, i):
        x = self.relus[i](x) * 1
        halves = x.view(-1, 2, WIDTH // 2)
        halves[:, 0] *= 2
        return x + halves.flatten(1)


class Normalised(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))

    def between(self, x, i):
        return self.norms[i](x) + x


class RoutesByData(nn.Module):
    """A leaf module that fake tensors cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, self.linear(x[rows]))


class Routed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutesByData() for _ in range(3))


class ReturnsWeight(Base):
    def forward(self, x):
        return super().forward(x) + 0, self.head.weight


class CountsOnly(Base):
    """A Python counter that nothing reads."""

    calls = 0

    def between(self, x, i):
        self.calls += 1
        return x


# --- allowed at some cuts only ---


class NormTwice(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Alias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x) * 1
        return x, x[:, ::2]


class AliasFromUnit(Base):
    """A leaf module makes the alias, so that no view can be made again."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = Alias()

    def forward(self, x):
        x, y = self.alias(self.enter(x))
        for block in self.blocks:
            x.add_(block(x + 0))
        return self.head(x) * y.sum(1, keepdim=True)


class ClampsParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(-0.5, 0.5)
        x = self.enter(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Forces(Base):
    """Returns the derivative of an energy by what the first block returns, which later blocks use."""

    def forward(self, x):
        with torch.enable_grad():
            x = self.blocks[0](self.enter(x))
            moved = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.blocks[1](moved).square().sum()
            (force,) = torch.autograd.grad(energy, moved, create_graph=True)
        return self.head(self.blocks[2](x - 0.1 * force))


class ForcesOfInputs(Base):
    """Returns the derivative of an energy by what follows from the inputs alone."""

    def forward(self, x):
        with torch.enable_grad():
            places = (x * 2).requires_grad_()
            energy = self.blocks[0](self.enter(places)).sum()
            (force,) = torch.autograd.grad(energy, places, create_graph=True)
        return self.head(self.blocks[1](self.enter(x + force)))


class GradientPenalty(Base):
    """Uses the derivative of a sum by a weight."""

    def forward(self, x):
        with torch.enable_grad():
            x = self.enter(x)
            total = self.blocks[0](x).sum()
            (slope,) = torch.autograd.grad(total, self.blocks[0][0].weight, create_graph=True)
        return self.head(self.blocks[1](x * slope.mean(0)))
