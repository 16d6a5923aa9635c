"""Weights: the tensors that a stage's layers are called with, and their versions in asynchronous training.

A version is a set of leaf tensors that lives as long as a microbatch's graph or stash refers to it.
Sources: weight stashing and vertical sync, PipeDream (SOSP 2019); two versions, PipeDream-2BW (ICML 2021);
prediction before the forward, PipeOptim (Guan et al. 2023).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.stage_module import StageModule
from hybridpipe.model.tensors import TensorTree, Tree, tensors_in, tensors_of

# One mapping a layer, in order: the parameter's name within the layer → the leaf tensor in its place. A tied
# parameter is listed under each of its names. Frozen parameters may be missing.
Weights = Sequence[Mapping[str, Tensor]]
Predict = Callable[[Sequence[Tensor], int], Sequence[Tensor]]  # parameters, and the updates to come → weights
_Result = TypeVar("_Result")


def trained_parameters(layers: Iterable[nn.Module]) -> list[dict[str, Tensor]]:
    """Return the parameters that require grad, as `Weights`."""
    return [
        {name: p for name, p in layer.named_parameters(remove_duplicate=False) if p.requires_grad}
        for layer in layers
    ]


def sparse_parameters(layers: nn.Module) -> set[Tensor]:
    """Return the parameters whose gradients are sparse: weights of embeddings with `sparse=True`."""
    embeddings = (module for module in layers.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {module.weight for module in embeddings if module.sparse}


def hand_over(gradients: list[Tensor], leaves: Sequence[Tensor]) -> None:
    """Accumulate each gradient on its leaf as a backward does, hooks included.

    The list `gradients` is emptied, so that autograd holds the only reference and stores a gradient on a leaf
    without a copy. `torch.autograd.backward(leaves, gradients)` would copy every gradient.
    """
    if leaves:
        with torch.enable_grad():  # gradients are disabled in a backward's hooks
            torch.autograd.backward(_HandOver.apply(gradients, *leaves))  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    """A number whose backward returns given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return (None, *given)


class Substitution:
    """Runs functions while a stage's layers hold other tensors than their own.

    It wraps `torch.func.functional_call` around a whole forward or backward instead of around each layer.
    Autograd runs a layer with activation checkpoints again within the backward, and the layer must find the
    same weights then.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self._around = _Around(layers)
        # A module that stands in two places is listed once: otherwise the second would be restored wrongly.
        parameters = named_tensors(layers, lambda module: module._parameters)
        self._places = [(path, *_split_off_layer(path)) for path, _ in parameters]

    def run(
        self,
        function: Callable[[], _Result],
        weights: Weights | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> _Result:
        """Return `function()`, called while the layers hold `weights` and `buffers`.

        Args:
            buffers: by path in the stage.
        """
        tensors = dict(buffers or {})
        if weights is not None:
            for path, layer, name in self._places:
                if name in weights[layer]:
                    tensors[path] = weights[layer][name]
        if not tensors:
            return function()
        named = {f"layers.{path}": tensor for path, tensor in tensors.items()}
        result: _Result = torch.func.functional_call(self._around, named, (function,), tie_weights=False)
        return result


class _Around(nn.Module):
    """A module around the layers whose call runs any function."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, function: Callable[[], _Result]) -> _Result:
        return function()


def named_tensors(
    layers: nn.Sequential, table: Callable[[nn.Module], Mapping[str, Tensor | None]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each module's tensors of one table (`_parameters`, `_buffers`) by path; tied ones repeat."""
    for prefix, module in layers.named_modules():
        for name, tensor in table(module).items():
            if tensor is not None:
                yield f"{prefix}.{name}", tensor


def _split_off_layer(path: str) -> tuple[int, str]:
    layer, _, name = path.partition(".")
    return int(layer), name


def check_no_other_weights(outputs: TensorTree, layers: StageModule) -> None:
    """Check that the outputs' graph ends at no parameter that should have been substituted.

    A layer that keeps its parameters in a list of its own, for example, would use the newest ones unnoticed.

    Raises:
        ValueError: a layer has used one of its own parameters.
    """
    named = layers.module.named_parameters()
    names: dict[Tensor, str] = {parameter: name for name, parameter in named if parameter.requires_grad}
    for leaf in _leaves(tensors_of(outputs)):
        if leaf in names:
            raise ValueError(
                f"{layers.described(names[leaf])}: the parameter is used from another place than the module "
                "that it is registered with, so the layer cannot be called with other weights, as "
                "asynchronous schedules and precision='bf16-params' require"
            )


def check_no_foreign_weights(loss: Tensor, outputs: Tree, layers: StageModule) -> None:
    """Check that a loss uses no parameter from outside its stage, which would get no gradient.

    Args:
        outputs: the layers' outputs; the graph behind them is not searched.

    Raises:
        ValueError: the loss uses a parameter that is not in `layers`.
    """
    own = set(layers.module.parameters())
    for leaf in _leaves([loss], behind=tensors_in(outputs)):
        if isinstance(leaf, nn.Parameter) and leaf not in own:
            raise ValueError(
                f"the loss uses {layers.foreign(leaf)}, which is not in the last stage and would get no "
                "gradient: move its use into the model's layers"
            )


def _leaves(tensors: Sequence[Tensor], behind: Sequence[Tensor] = ()) -> Iterator[Tensor]:
    """Yield the leaf tensors of a graph, except those that are reached only through `behind`."""
    todo, seen = [tensor.grad_fn for tensor in tensors], {tensor.grad_fn for tensor in behind}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # set on a leaf's node
        if isinstance(variable, Tensor):
            yield variable
        todo.extend(before for before, _ in node.next_functions)


class WeightVersions:
    """The versions of a stage's weights, numbered by the updates behind them.

    The layers' Parameters hold the newest version, which the optimizer changes in place. A version shares
    their storage until an update comes. If the version is then in use, or will still be asked for, it keeps
    that storage and the Parameters get a copy. So a stage whose backward directly follows its forward, such
    as the last, copies nothing. Frozen parameters belong to no version.

    Args:
        precision: may call the layers with copies in another type (`Precision.lowered`), whose gradients are
            added up in the Parameter's own.
        predict: predicts weights after further updates from the newest ones; its tensors are new, or share
            the Parameters' storage.
        ahead: a version may be asked for from `ahead` updates before its own on, and is then predicted. What
            is asked for later is still predicted there.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        precision: Precision = FP32,
        predict: Predict | None = None,
        ahead: int = 0,
    ) -> None:
        self._precision, self._predict, self._ahead = precision, predict, ahead
        self._newest = 0
        self._oldest: int | None = None  # the oldest version that may still be asked for; None: the newest
        self._held: dict[int, Weights] = {}  # the newest version and those that may still be asked for
        self._leaves: dict[int, list[weakref.ref[Tensor]]] = {}
        self._parameters: list[Tensor] = []
        self.renew(layers)

    def renew(self, layers: nn.Sequential) -> None:
        """Hold versions of the parameters that require grad now.

        Raises:
            ValueError: requires_grad has changed while older versions are in use.
        """
        self._own, self._lowered = trained_parameters(layers), self._precision.lowered(layers)
        parameters = list(dict.fromkeys(p for layer in self._own for p in layer.values()))
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            if any(number != self._newest or self._predict for number in self._held):
                raise ValueError(
                    "requires_grad must not change in the middle of an epoch that continues under an "
                    "asynchronous schedule: older versions of the weights are in use"
                )
            self._held, self._leaves = {}, {}
        self._parameters = parameters

    @property
    def newest(self) -> int:
        """Number of updates so far, which is the number of the newest version."""
        return self._newest

    def current(self) -> Weights:
        """Return the newest weights: the same tensors until the next update."""
        return self.version(self._newest)

    def version(self, number: int) -> Weights:
        """Return the weights after `number` updates, predicted from the newest where fewer have been made.

        Raises:
            LookupError: the version is neither the newest nor kept, nor predicted.
        """
        if 0 <= number - self._newest <= self._ahead and number not in self._held:
            self._make(number)
        if number not in self._held:
            kept = ", ".join(map(str, sorted({*self._held, self._newest})))
            raise LookupError(f"weights of version {number} are not kept; kept: {kept}")
        return self._held[number]

    def begin(self) -> None:
        """Adopt the Parameters' present values as the newest version; no microbatch uses any.

        After an update that failed a version may be held that was predicted from other values.
        """
        self._held.clear()

    def keep_from(self, number: int) -> None:
        """Keep version `number` and all later ones, and drop older ones.

        Before the first call only the newest version is kept.
        """
        self._oldest = number
        for older in [held for held in self._held if held < min(number, self._newest + self._ahead)]:
            del self._held[older]

    @contextmanager
    def update(self) -> Iterator[None]:
        """Count the optimizer's step inside this context as a new version of the weights."""
        number = self._newest
        if self._oldest is not None and self._oldest - self._ahead <= number:
            # Made now, if not held already, while the Parameters still have the weights that it is made from.
            self.version(max(number, self._oldest))
        else:
            self._held.pop(number, None)
        for leaves in self._leaves.values():
            for parameter, leaf in zip(self._parameters, leaves, strict=True):
                held = leaf()
                if held is not None and held.data_ptr() == parameter.data_ptr():
                    parameter.data = parameter.data.clone()
        yield
        self._newest += 1
        self._leaves = {n: leaves for n, leaves in self._leaves.items() if self._alive_leaves(n)}

    @contextmanager
    def handing_over(self, weights: Weights, factor: float = 1.0) -> Iterator[None]:
        """Move each gradient of the backward inside this context to its Parameter as soon as it arrives.

        Hooks on the Parameter, such as an all-reduce, then need not wait for the whole backward.

        Args:
            factor: each gradient is multiplied by this.
        """
        hooks = [
            leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda leaf, parameter=parameter: self._move([(parameter, leaf)], factor)
            )
            for parameter, leaf in self._pairs(weights)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def collect(self, weights: Weights, factor: float = 1.0) -> None:
        """Add a version's gradients times `factor` to those of the Parameters, and drop them on the version.

        Hooks on a Parameter run once. A Parameter whose leaf has no gradient stays unchanged.
        """
        self._move(self._pairs(weights), factor)

    def _pairs(self, weights: Weights) -> list[tuple[Tensor, Tensor]]:
        """Return each Parameter with the version's leaf; a tied one appears once."""
        pairs = {
            parameter: leaves[name]
            for own, leaves in zip(self._own, weights, strict=True)
            for name, parameter in own.items()
        }
        return list(pairs.items())

    def _move(self, pairs: Sequence[tuple[Tensor, Tensor]], factor: float) -> None:
        parameters, gradients = [], []
        for parameter, leaf in pairs:
            if leaf.grad is not None:
                parameters.append(parameter)
                gradients.append(leaf.grad.to(parameter.dtype))  # no other name may hold it (`hand_over`)
                if factor != 1.0:
                    gradients[-1] = gradients[-1] * factor
                leaf.grad = None
        hand_over(gradients, parameters)

    @property
    def alive(self) -> list[int]:
        """Numbers of the versions that are in use, and of the newest."""
        return sorted({self._newest, *(number for number in self._leaves if self._alive_leaves(number))})

    @property
    def extra_bytes(self) -> int:
        """Bytes that versions hold beyond the Parameters themselves."""
        own = {parameter.data_ptr() for parameter in self._parameters}
        sizes = {
            leaf.data_ptr(): leaf.nbytes
            for number in self._leaves
            for leaf in self._alive_leaves(number)
            if leaf.data_ptr() not in own
        }
        return sum(sizes.values())

    def restore(self, newest: int, older: Mapping[int, Mapping[Tensor, Tensor]]) -> None:
        """Continue an earlier run: the Parameters hold version `newest`.

        Args:
            older: each Parameter's values in older versions that will still be asked for, by version.
        """
        self._newest, self._oldest = newest, min([newest, *older])
        self._held, self._leaves = {}, {}
        for number, values in older.items():
            self._hold(number, {p: self._leaf(p, values[p]) for p in self._parameters})

    def _make(self, number: int) -> Weights:
        # .data instead of .detach(), which would share autograd's version counter: autograd would then refuse
        # a backward after the optimizer has changed the Parameters in their new storage.
        values: Sequence[Tensor] = [p.data for p in self._parameters]
        if self._predict is not None and number > self._newest:
            values = self._predict(self._parameters, number - self._newest)
        each = zip(self._parameters, values, strict=True)
        return self._hold(number, {p: self._leaf(p, value) for p, value in each})

    def _leaf(self, parameter: Tensor, numbers: Tensor) -> Tensor:
        wanted = self._precision.low if parameter in self._lowered else parameter.dtype
        return numbers.to(wanted).requires_grad_()

    def _hold(self, number: int, leaf_of: Mapping[Tensor, Tensor]) -> Weights:
        self._leaves[number] = [weakref.ref(leaf) for leaf in leaf_of.values()]
        self._held[number] = [{name: leaf_of[p] for name, p in layer.items()} for layer in self._own]
        return self._held[number]

    def _alive_leaves(self, number: int) -> list[Tensor]:
        return [leaf for leaf in (reference() for reference in self._leaves[number]) if leaf is not None]
