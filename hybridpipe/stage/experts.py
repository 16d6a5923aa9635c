"""Experts: a module whose experts the replicas of a stage share; each computes its own for everyone's tokens.

Knows one module and an exchange of rows; no ranks and no plan. Source: GShard (Lepikhin et al., ICLR 2021,
section 3.1), without its capacities: no token is dropped.
Invariant: all replicas exchange at the same places, in the backward as well, whoever has tokens or gradients.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybridpipe.errors import UserError
from hybridpipe.model.recording import is_recording
from hybridpipe.model.rng import preserved_state, random_state
from hybridpipe.report.words import counted

_KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # of tokens and of weights
_UNKNOWN = -1
_NUM_FACTS = 5  # that lead the counts: module; kind and width of tokens, kind of weights, if there is a graph
_TRIED_TOKENS = 8


class Exchange(Protocol):
    """Exchanges numbers and rows among the replicas of a stage (`comm.exchange`)."""

    size: int
    bytes_sent: int

    def numbers(self, sent: Tensor) -> Tensor:
        """Return the numbers that each replica has for this one."""

    def rows(self, sent: Tensor, sent_counts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the rows that each replica has for this one."""


class _Route(NamedTuple):
    """The rows to and from each replica."""

    exchange: Exchange
    sent: list[int]
    received: list[int]

    def move(self, rows: Tensor) -> Tensor:
        return self.exchange.rows(rows, self.sent, self.received)

    @property
    def back(self) -> "_Route":
        return _Route(self.exchange, self.received, self.sent)


class _Move(torch.autograd.Function):
    """Moves rows along a route, and their gradients back.

    The tensors behind the first `count` are not moved. They tie the graph together: a replica without tokens
    runs the backward of an exchange only if a path leads there from what it returns.
    """

    @staticmethod
    def forward(ctx: Any, route: _Route, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.num_ties = route, len(tensors) - count
        return tuple(map(route.move, tensors[:count]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        moved = [ctx.route.back.move(gradient) for gradient in gradients]
        return None, None, *moved, *[None] * ctx.num_ties


class SplitExperts:
    """Takes the place of a module's `forward` on a replica that holds some of its experts.

    Args:
        path: of the module, for messages.
        module: it holds this replica's experts only.
        count: of all experts.

    Attributes:
        number: of the module among those of its stage, in the order in which a forward calls them.
        calls: what the present forward of the stage has called so far; None outside of one.
        is_closed: the exchange has ended with its trainer.
    """

    number = 0
    calls: list[int] | None = None
    is_closed = False

    def __init__(self, path: str, module: nn.Module, count: int, exchange: Exchange) -> None:
        self.path, self._module, self._count, self.exchange = path, module, count, exchange
        self._forward: Callable[..., Tensor] = module.forward
        self._signature = inspect.signature(module.forward)
        names = list(self._signature.parameters)
        if len(names) < 3:
            raise UserError(
                f"the experts {path}: forward must take tokens, indices of experts and weights, got {names}"
            )
        self._try_out()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the weighted sums over the tokens' experts, wherever these are."""
        hidden, index, weights = self._arguments(args, kwargs)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        if index.shape != weights.shape or index.shape[:1] != tokens.shape[:1] or index.dim() != 2:
            raise UserError(
                f"the experts {self.path}: indices and weights must have shape ({len(tokens)}, k), for "
                f"{counted(len(tokens), 'token')}, got {list(index.shape)} and {list(weights.shape)}"
            )
        if is_recording():  # no other rank is here
            return (tokens * weights.sum(1, keepdim=True).to(tokens.dtype)).reshape(hidden.shape)
        self._note_call()
        by_expert = index.reshape(-1).argsort(stable=True)
        token = by_expert // index.shape[1]
        least, most = (int(each) for each in index.aminmax()) if index.numel() else (0, 0)
        if least < 0 or most >= self._count:
            raise UserError(
                f"the experts {self.path}: indices must be in 0 to {self._count - 1}, got {least} to {most}"
            )
        counts = torch.bincount(index.reshape(-1), minlength=self._count).cpu()
        made = self._by_all(tokens[token], weights.reshape(-1)[by_expert], counts)
        return torch.zeros_like(tokens).index_add(0, token, made.to(tokens.dtype)).reshape(hidden.shape)

    def _note_call(self) -> None:
        if self.is_closed:
            raise UserError(
                f"the experts {self.path}: this rank holds a part of them, and its trainer is closed: take "
                "full_state_dict() before, and make the model anew"
            )
        if self.calls is None:
            raise UserError(
                f"the experts {self.path} are called outside of their stage's forward, as an activation "
                "checkpoint does: let the stage recompute (recompute = true) in its place"
            )
        self.calls.append(self.number)

    def join(self) -> Tensor:
        """Compute other replicas' tokens without any of its own; return the graph, a tensor without rows."""
        return self._by_all(None, None, torch.zeros(self._count, dtype=torch.int64))

    def add_missing_gradients(self) -> None:
        """Give parameters a gradient of zeros where no token has come in an update.

        In one process other experts' tokens give them one, so that an optimizer does not skip them.
        """
        for parameter in self._module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _by_all(self, rows: Tensor | None, weights: Tensor | None, counts: Tensor) -> Tensor:
        """Return what each row's expert makes of it, times the row's weight.

        Args:
            rows, weights: one for each token and expert, by expert; None: there are none.
            counts: rows of each expert.
        """
        size = self.exchange.size
        facts = self._facts(rows, weights)
        sent = torch.cat([facts.expand(size, -1), counts.view(size, -1)], 1).contiguous()
        theirs = self.exchange.numbers(sent)
        known = self._agreed(theirs[:, :_NUM_FACTS])
        mine = theirs[:, _NUM_FACTS:]
        _, kind, width, kind_of_weights, with_graph = known.tolist()
        if rows is None or weights is None:
            device = next(self._module.parameters()).device
            rows = torch.empty(0, width, dtype=_KINDS[kind], device=device)
            weights = torch.empty(0, dtype=_KINDS[kind_of_weights], device=device)
        with torch.set_grad_enabled(bool(with_graph)):
            return self._moved(rows, weights, counts, mine)

    def _moved(self, rows: Tensor, weights: Tensor, counts: Tensor, mine: Tensor) -> Tensor:
        """Return what each row's expert makes of it.

        Args:
            counts: rows that this replica sends to each expert.
            mine: rows that each replica sends to the experts here, shape (replicas, experts).
        """
        size = self.exchange.size
        tie = torch.empty(0, requires_grad=torch.is_grad_enabled())
        route = _Route(self.exchange, counts.view(size, -1).sum(1).tolist(), mine.sum(1).tolist())
        rows, weights = _Move.apply(route, 2, rows, weights, tie)  # type: ignore[no-untyped-call]
        experts = torch.arange(mine.shape[1]).repeat(size).repeat_interleave(mine.reshape(-1))
        made = self._forward(rows, experts.to(rows.device)[:, None], weights[:, None])
        (returned,) = _Move.apply(route.back, 1, made, rows, weights, tie)  # type: ignore[no-untyped-call]
        found: Tensor = returned
        return found

    def _facts(self, rows: Tensor | None, weights: Tensor | None) -> Tensor:
        """Return the facts that lead the counts."""
        if rows is None or weights is None:
            return torch.tensor([self.number, *[_UNKNOWN] * (_NUM_FACTS - 1)])
        for each in (rows, weights):
            if each.dtype not in _KINDS:
                raise UserError(f"the experts {self.path}: tokens and weights must be real, got {each.dtype}")
        kind, kind_of_weights = _KINDS.index(rows.dtype), _KINDS.index(weights.dtype)
        return torch.tensor([self.number, kind, rows.shape[1], kind_of_weights, int(torch.is_grad_enabled())])

    def _agreed(self, facts: Tensor) -> Tensor:
        """Return the facts about the tokens, which all replicas that have some must say alike."""
        known = facts.max(0).values
        if not ((facts == known) | (facts == _UNKNOWN)).all():
            raise UserError(
                f"the experts {self.path}: replicas are in another module's exchange, or have other kinds of "
                f"tokens: {facts.tolist()}"
            )
        return known

    def _arguments(self, args: Any, kwargs: Any) -> Sequence[Tensor]:
        given = list(self._signature.bind(*args, **kwargs).arguments.values())
        if len(given) != 3 or not all(isinstance(each, Tensor) for each in given):
            raise UserError(
                f"the experts {self.path}: must be called with tokens, indices of experts and weights, got "
                f"{counted(len(given), 'argument')}"
            )
        return given

    @torch.no_grad()
    def _try_out(self) -> None:
        """Check on a few tokens that the experts of a token are computed one by one, without random numbers.

        Raises:
            UserError: a token's experts depend on each other, or the module draws random numbers.
        """
        device = next(self._module.parameters()).device
        with preserved_state(device, python_too=True), _in_training(self._module):
            before = random_state(device)
            together, one_by_one = self._tried()
            drew = not torch.equal(random_state(device), before)
        if drew:
            raise UserError(
                f"the experts {self.path} draw random numbers, which would depend on the plan: move the "
                "dropout behind them"
            )
        if not torch.allclose(together, one_by_one, rtol=0.05, atol=0.05 * float(together.abs().max())):
            raise UserError(
                f"the experts {self.path} compute a token's experts together, so they cannot be split: "
                "normalise the weights before they are called"
            )

    def _tried(self) -> tuple[Tensor, Tensor]:
        """Return what a few tokens become with two experts at once, and with one after the other."""
        parameter, numbers = next(self._module.parameters()), torch.Generator().manual_seed(1)
        weights = torch.rand(_TRIED_TOKENS, 2, generator=numbers).to(parameter)
        index = torch.arange(2 * _TRIED_TOKENS, device=parameter.device).view(-1, 2) % len(parameter)
        error: Exception | None = None
        widths = (size for each in self._module.parameters() for size in each.shape[:0:-1])
        for width in dict.fromkeys(widths):
            tokens = torch.randn(_TRIED_TOKENS, width, generator=numbers).to(parameter)
            try:
                together = self._checked(tokens, index, weights)
                first, second = (
                    self._checked(tokens, index[:, i : i + 1], weights[:, i : i + 1]) for i in (0, 1)
                )
                self._checked(tokens[:0], index[:0, :1], weights[:0, :1])
                return together, first + second
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as mistake:
                error = mistake  # perhaps the tokens have another width
        raise UserError(f"the experts {self.path} fail on a few tokens: {error}")

    def _checked(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        made = self._forward(tokens, index, weights)
        if not isinstance(made, Tensor) or (made.shape, made.dtype) != (tokens.shape, tokens.dtype):
            raise TypeError(f"of {len(tokens)} tokens it must return a tensor of their shape and type")
        return made


@contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    """Set a module to training mode inside this context."""
    modes = [(each, each.training) for each in module.modules()]
    module.train()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


@contextmanager
def called_in_order(experts: Sequence[SplitExperts]) -> Iterator[None]:
    """Check that the forward inside this context calls each of a stage's experts once, in their order.

    A replica that joins does so.

    Raises:
        UserError: it calls others, or not all.
    """
    calls: list[int] = []
    for each in experts:
        each.calls = calls
    try:
        yield
    finally:
        for each in experts:
            each.calls = None
    if calls != list(range(len(experts))):
        paths = ", ".join(each.path for each in experts)
        made = ", ".join(experts[i].path for i in calls) or "none"
        raise UserError(
            f"a forward must call each of the modules whose experts are split once, in their order: {paths}; "
            f"it called {made}"
        )


def split_experts_in(module: nn.Module) -> list[SplitExperts]:
    """Return what stands for the experts of a stage's modules, numbered in their order."""
    found = [vars(each).get("forward") for each in module.modules()]
    split = [each for each in found if isinstance(each, SplitExperts)]
    for number, each in enumerate(split):
        each.number = number
    return split
