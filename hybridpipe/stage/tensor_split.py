"""Tensor split: modules that the shards of a replica compute in parts, and the sums of what they make.

Knows modules and an exchange among shards; no ranks and no plan. A module stays what it is, with a part of
its weights and hooks around its forward. Source: Megatron-LM (Shoeybi et al. 2019, section 3).
Invariant: all shards exchange at the same places, and outside of what is split they have the same numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybridpipe.errors import UserError
from hybridpipe.model.recording import is_recording
from hybridpipe.model.rng import random_state
from hybridpipe.model.tensor_plan import (
    COLUMNS,
    GATHERED,
    PACKED_COLUMNS,
    ROWS,
    ROWS_OF_WHOLE,
    SUMMED_GRADIENT,
    VOCABULARY,
    SplitModule,
)
from hybridpipe.model.tensors import TensorTree, dense, tensors_in

# The part of a tensor's norm by which shards may differ: GPUs add up in any order.
_CLOSE, _COARSE = {torch.float64: 1e-9, torch.float32: 1e-4}, 1e-2


class Sums(Protocol):
    """Exchanges tensors among the shards of a replica (`comm.sums`).

    Args:
        index, size: of this shard, and their number.
    """

    index: int
    size: int

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all shards' tensors."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all shards' tensors, one after the other along the last dimension."""


def _as_it_is(_: Sums, tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)  # autograd wants another tensor


def _sum(sums: Sums, tensor: Tensor) -> Tensor:
    return sums.sum(tensor)


def _joined(sums: Sums, tensor: Tensor) -> Tensor:
    return sums.gather(tensor)


def _own(sums: Sums, tensor: Tensor) -> Tensor:
    return tensor.chunk(sums.size, -1)[sums.index].contiguous()


class _Directions(NamedTuple):
    """The handling of a tensor in the forward, and of its gradient in the backward."""

    there: Callable[[Sums, Tensor], Tensor]
    back: Callable[[Sums, Tensor], Tensor]


_COPY = _Directions(_as_it_is, _sum)  # a whole tensor, of whose gradient each shard has a part
_SUM = _Directions(_sum, _as_it_is)  # what shards make adds up, and each has the sum's gradient
_GATHER = _Directions(_joined, _own)  # columns are joined, and each shard takes its own of the gradient
_TAKE = _Directions(_own, _joined)  # each shard takes its columns, and their gradients are joined


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Sums, way: _Directions, tensor: Tensor) -> Tensor:
        ctx.sums, ctx.way = sums, way
        return way.there(sums, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.way.back(ctx.sums, gradient)


class TensorSplit:
    """The split modules of a rank.

    Args:
        model: it holds parts of weights (`holding.hold`).
        modules: those of the rank's stages.
        sums: exchange among the shards.

    Attributes:
        is_closed: the exchange has ended with its trainer.
    """

    is_closed = False

    def __init__(self, model: nn.Module, modules: Sequence[SplitModule], sums: Sums) -> None:
        self.sums = sums
        self._made: list[_Digest] = []
        self._has_compared_outputs = self._has_compared_gradients = False
        self._regions = {each.around: _Region(each.around, self) for each in modules}
        for each in modules:
            _INSTALL[each.style](self._regions[each.around], model.get_submodule(each.path), each)

    def apply(self, way: _Directions, tensor: Tensor) -> Tensor:
        """Apply an exchange. Where a forward is recorded nobody else is here, and numbers do not matter."""
        if self.is_closed:
            raise UserError(
                "this rank holds parts of the model's weights, and its trainer is closed: take "
                "full_state_dict() before, and make the model anew"
            )
        sums = _Alone(self.sums) if is_recording() else self.sums
        applied: Tensor = _Exchange.apply(sums, way, tensor)  # type: ignore[no-untyped-call]
        return applied

    def note(self, made: TensorTree) -> None:
        """Note what a forward of the stage has made, until shards have compared it once."""
        if not self._has_compared_outputs:
            self._made += [_digest(tensor) for tensor in tensors_in(made)]

    def check_outputs(self) -> None:
        """Check once that shards have made the same outputs, as they have not behind rows that lack a style.

        Collective over them.

        Raises:
            UserError: some differ; raised on all shards alike.
        """
        if self._made:
            made, self._made, self._has_compared_outputs = self._made, [], True
            self._compare([("what a stage makes", digest) for digest in made])

    def check_once(self, gradients: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Check at the first update that shards have the same gradients of what is whole. Collective.

        They have not where parameters see parts of values, and the tensor plan does not say so.

        Args:
            gradients: returns those of whole parameters by their keys, in the same order on all shards.

        Raises:
            UserError: some differ; raised on all shards alike.
        """
        self.check_outputs()
        if not self._has_compared_gradients:
            self._has_compared_gradients = True
            told = "the gradient of {}, which the tensor plan leaves whole,"
            self._compare([(told.format(key), _digest(gradient)) for key, gradient in gradients().items()])

    def _compare(self, digests: "Sequence[tuple[str, _Digest]]") -> None:
        own = torch.tensor([digest[:2] for _, digest in digests], dtype=torch.float64)
        everyone = self.sums.gather(own.reshape(-1, 2)).view(-1, self.sums.size, 2)
        norms = everyone[..., 0].abs().amax(1)
        # A gradient that is zero but for rounding is compared with the largest.
        scales = norms.clamp(min=float(norms.amax()) * _CLOSE[torch.float32]) if len(norms) else norms
        apart = (everyone.amax(1) - everyone.amin(1)).amax(1)
        for (what, digest), gap, scale in zip(digests, apart.tolist(), scales.tolist(), strict=True):
            if gap > _CLOSE.get(digest.dtype, _COARSE) * scale:
                raise UserError(
                    f"{what} differs between shards: the tensor plan must name what makes values whole again "
                    f"as {ROWS} or {GATHERED}, and parameters between split ones as {SUMMED_GRADIENT}"
                )

    @property
    def is_within(self) -> bool:
        """True between the first columns of a region and its rows, where shards have parts of values."""
        return any(region.is_open for region in self._regions.values())


class _Digest(NamedTuple):
    """The norm and the sum of a tensor; -1 and 0 of none, zeros where they are not finite."""

    norm: float
    total: float
    dtype: torch.dtype


def _digest(tensor: Tensor | None) -> _Digest:
    if tensor is None:
        return _Digest(-1.0, 0.0, torch.float64)
    numbers = dense(tensor.detach())
    numbers = (numbers.abs() if numbers.is_complex() else numbers).double()
    found = float(numbers.norm()), float(numbers.sum())
    return _Digest(*(found if all(map(math.isfinite, found)) else (0.0, 0.0)), tensor.dtype)


class _Alone:
    """Sums in a forward that one rank records, of the right shape and without messages."""

    def __init__(self, sums: Sums) -> None:
        self.index, self.size = sums.index, sums.size

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.size, -1)


class _Region:
    """The part of a forward in which shards have parts of each value: from its first columns to its rows.

    Args:
        path: of the module around it, for messages.
    """

    is_open = False

    def __init__(self, path: str, split: TensorSplit) -> None:
        self._path, self._split = path, split
        self._copied: tuple[Tensor, int, Tensor] | None = None  # the input, its version, and its copy
        self._began: Tensor | None = None  # the state of the random generator
        self._is_checked = False

    def columns(self, module: nn.Module, described: SplitModule) -> None:
        """Let a linear layer make a part of its columns of a whole input."""

        def before(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (self._enter(_input_of(described, given)),)

        def after(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
            self._leave(module, made)
            return self._split.apply(_GATHER, made)

        module.register_forward_pre_hook(before)
        if described.style == GATHERED:
            module.register_forward_hook(after, prepend=True)

    def rows(self, module: nn.Module, described: SplitModule) -> None:
        """Let a linear layer sum over a part of its input's columns; all shards' sums make the output."""

        def before(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            inputs = _input_of(described, given)
            self._leave(module, inputs)
            return (self._split.apply(_TAKE, inputs) if described.style == ROWS_OF_WHOLE else inputs,)

        def finished(made: Tensor, bias: Tensor | None) -> Tensor:
            total = self._split.apply(_SUM, made)
            return total if bias is None else total + bias.to(total.dtype)

        module.register_forward_pre_hook(before)
        _Aside(module, "bias", lambda _: None, finished)  # it is added once, to the sum

    def vocabulary(self, module: nn.Module, described: SplitModule) -> None:
        """Let an embedding look up the entries that are here; the others are in another shard's sum."""
        assert isinstance(module, nn.Embedding)
        sums = self._split.sums
        count = module.num_embeddings // sums.size
        first = sums.index * count
        if module.padding_idx is not None:
            here = 0 <= module.padding_idx - first < count
            module.padding_idx = module.padding_idx - first if here else None
        elsewhere: list[Tensor] = []
        is_last = sums.index == sums.size - 1

        def before(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            entries = _input_of(described, given) - first
            # An index that no shard has is left to the first or the last one, whose lookup fails.
            elsewhere[:] = [(entries < 0) & (first > 0) | (entries >= count) & (not is_last)]
            return (entries.masked_fill(elsewhere[0], 0),)

        def after(_: nn.Module, __: Any, made: Tensor) -> Tensor:
            return self._split.apply(_SUM, made.masked_fill(elsewhere.pop()[..., None], 0))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, prepend=True)

    def summed_gradient(self, module: nn.Module, described: SplitModule) -> None:
        """Sum the gradients of a module's own parameters, as each shard sees a part of the values."""

        def summed(whole: Tensor) -> Tensor:
            if not self._split.is_within:
                raise UserError(
                    f"{described.path} sees whole values, so its gradients must not be summed over shards: "
                    f"leave it out of the tensor plan, which has it as {SUMMED_GRADIENT}"
                )
            return self._split.apply(_COPY, whole)

        for name in list(module._parameters):
            _Aside(module, name, summed)

    def _enter(self, tensor: Tensor) -> Tensor:
        """Hand a tensor to the shards; where several modules get one, its gradients are summed once."""
        self.is_open = True
        if self._began is None and not self._is_checked:
            self._began = random_state(tensor.device)
        if not torch.is_grad_enabled() or not tensor.requires_grad:
            return tensor
        if self._copied is not None:
            given, version, made = self._copied
            if given is tensor and version == tensor._version:
                return made
        made = self._split.apply(_COPY, tensor)
        self._copied = tensor, tensor._version, made
        return made

    def _leave(self, module: nn.Module, tensor: Tensor) -> None:
        """End the region; check in the first training that it draws no random numbers.

        Raises:
            UserError: it does, and each shard would draw others than one process does.
        """
        self._copied, self.is_open = None, False
        began, self._began = self._began, None
        if began is None or not (module.training and torch.is_grad_enabled()) or is_recording():
            return
        self._is_checked = True
        if not torch.equal(began, random_state(tensor.device)):
            where = self._path or "the model"
            raise UserError(
                f"{where} draws random numbers between its split weights, which would depend on the plan: "
                "set its dropout to 0, or tensor = 1"
            )


_INSTALL: Mapping[str, Callable[[_Region, nn.Module, SplitModule], None]] = {
    COLUMNS: _Region.columns,
    PACKED_COLUMNS: _Region.columns,
    GATHERED: _Region.columns,
    ROWS: _Region.rows,
    ROWS_OF_WHOLE: _Region.rows,
    VOCABULARY: _Region.vocabulary,
    SUMMED_GRADIENT: _Region.summed_gradient,
}


def _input_of(described: SplitModule, given: tuple[Tensor, ...]) -> Tensor:
    if len(given) != 1:
        raise UserError(f"{described.path} is split, so it must be called with its input by position")
    return given[0]


class _Aside:
    """Lets something else take the place of a parameter while its module's forward runs.

    Args:
        instead: returns what, given the parameter.
        finish: returns the module's output, given what it has made and the parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        instead: Callable[[Tensor], Tensor | None],
        finish: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> None:
        self._name, self._instead, self._finish = name, instead, finish
        self._held: list[Tensor | None] = []
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, prepend=True, always_call=True)

    def _before(self, module: nn.Module, _: Any) -> None:
        parameter = module._parameters.get(self._name)
        self._held.append(parameter)
        if parameter is not None:
            module._parameters[self._name] = self._instead(parameter)  # type: ignore[assignment]

    def _after(self, module: nn.Module, _: Any, made: Any) -> Any:
        if not self._held:  # a hook before this one has failed
            return None
        parameter = self._held.pop()
        module._parameters[self._name] = parameter  # type: ignore[assignment]
        return None if self._finish is None or made is None else self._finish(made, parameter)
