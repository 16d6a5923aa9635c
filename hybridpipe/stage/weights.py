"""Weights: the tensors that a stage's layers are called with, and the versions of them that are alive.

Asynchronous training runs a microbatch's backward with the weights that its forward saw, while updates go
on. A version is a set of leaf tensors; the graph or the stash of a microbatch keeps it alive, its gradients
arrive on it, and its memory goes with the last who holds it.
Sources: weight stashing and vertical sync, PipeDream (SOSP 2019); two versions, PipeDream-2BW (ICML 2021).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hybridpipe.model.tensors import TensorTree, tensors_of

# For each layer, in order: the parameter's name within the layer → the leaf tensor in its place. A tied
# parameter stands under each of its names. Frozen parameters may be missing.
Weights = Sequence[Mapping[str, Tensor]]
_Result = TypeVar("_Result")


def trained_parameters(layers: Iterable[nn.Module]) -> list[dict[str, Tensor]]:
    """The parameters that require grad, as `Weights`."""
    return [
        {name: p for name, p in layer.named_parameters(remove_duplicate=False) if p.requires_grad}
        for layer in layers
    ]


def sparse_parameters(layers: nn.Module) -> set[Tensor]:
    """The parameters whose gradients are sparse: the rows that a microbatch has looked up."""
    embeddings = (module for module in layers.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {module.weight for module in embeddings if module.sparse}


def hand_over(gradients: list[Tensor], leaves: Sequence[Tensor]) -> None:
    """Let each gradient arrive on its leaf, as a backward does: it adds up there, and hooks run.

    A leaf that has none yet keeps the one that comes instead of a copy, since nobody else holds it: the list
    is empty afterwards. `torch.autograd.backward(leaves, gradients)` holds them, and so copies every one.
    """
    if leaves:
        with torch.enable_grad():  # which is off in a backward's hooks
            torch.autograd.backward(_HandOver.apply(gradients, *leaves))  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    """A number whose gradients are given."""

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

    `torch.func.functional_call` around a whole forward or backward instead of around each layer: a layer
    that checkpoints is run again by autograd, in the middle of the backward, and must find the same
    weights then.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self._around = _Around(layers)
        # Each place once, though its module may stand in two: else the second would be put back wrongly.
        self._places = [
            (path, *_split_off_layer(path)) for path, _ in places(layers, lambda module: module._parameters)
        ]

    def run(
        self,
        function: Callable[[], _Result],
        weights: Weights | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> _Result:
        """`function()`, while the layers hold `weights` and, by their path in the stage, `buffers`."""
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
    """A module whose call is any function."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, function: Callable[[], _Result]) -> _Result:
        return function()


def places(
    layers: nn.Sequential, table: Callable[[nn.Module], Mapping[str, Tensor | None]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in one table (`_parameters`, `_buffers`) of each module, by path; tied ones repeat."""
    for prefix, module in layers.named_modules():
        for name, tensor in table(module).items():
            if tensor is not None:
                yield f"{prefix}.{name}", tensor


def _split_off_layer(path: str) -> tuple[int, str]:
    layer, _, name = path.partition(".")
    return int(layer), name


def check_no_other_weights(outputs: TensorTree, layers: nn.Sequential) -> None:
    """Raises ValueError if the outputs' graph ends at a parameter that should have been substituted.

    A layer that keeps its parameters in a list of its own, say, would use the newest ones unnoticed.
    """
    named = layers.named_parameters()
    names: dict[Tensor, str] = {parameter: name for name, parameter in named if parameter.requires_grad}
    for leaf in _leaves(tensors_of(outputs)):
        if leaf in names:
            layer, name = _split_off_layer(names[leaf])
            raise ValueError(
                f"{type(layers[layer]).__name__} uses its parameter {name} from another place than the "
                "module that it is registered with, so it cannot be called with older weights; asynchronous "
                "schedules need that"
            )


def check_no_foreign_weights(loss: Tensor, outputs: TensorTree, layers: nn.Sequential) -> None:
    """Raises ValueError if a loss uses a parameter that is not in its stage: no one would train it.

    Args:
        outputs: of the layers; what they were made from is not looked at.
    """
    own = set(layers.parameters())
    for leaf in _leaves([loss], behind=tensors_of(outputs)):
        if isinstance(leaf, nn.Parameter) and leaf not in own:
            raise ValueError(
                f"the loss uses a parameter of shape {tuple(leaf.shape)} that is not in the last stage and "
                "would get no gradient: put what uses it into the model's layers"
            )


def _leaves(tensors: Sequence[Tensor], behind: Sequence[Tensor] = ()) -> Iterator[Tensor]:
    """The tensors at which a graph ends, but for those that are reached through `behind`."""
    todo, seen = [tensor.grad_fn for tensor in tensors], {tensor.grad_fn for tensor in behind}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf's node
        if isinstance(variable, Tensor):
            yield variable
        todo.extend(before for before, _ in node.next_functions)


class WeightVersions:
    """The versions of a stage's weights, numbered by the updates that they have seen.

    The layers' Parameters hold the newest, which the optimizer changes in place. A version shares their
    storage until an update comes while somebody holds it, or may still ask for it; only then do the
    Parameters get storage of their own, and the old one stays with the version. So a stage whose backward
    directly follows its forward, such as the last, copies nothing. Frozen parameters belong to no version.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._newest = 0
        self._oldest: int | None = None  # that may still be asked for; None: the newest
        self._held: dict[int, Weights] = {}  # only the newest, and what may still be asked for
        self._leaves: dict[int, list[weakref.ref[Tensor]]] = {}
        self._parameters: list[Tensor] = []
        self.renew(layers)

    def renew(self, layers: Iterable[nn.Module]) -> None:
        """Hold versions of the parameters that require grad now.

        Raises:
            ValueError: they are others than before, and versions of those may still be asked for.
        """
        self._own = trained_parameters(layers)
        parameters = list(dict.fromkeys(p for layer in self._own for p in layer.values()))
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            if any(number != self._newest for number in self._held):
                raise ValueError(
                    "requires_grad must not change in the middle of an epoch that an asynchronous schedule "
                    "goes on with: older versions of the weights are in use"
                )
            self._held, self._leaves = {}, {}
        self._parameters = parameters

    @property
    def newest(self) -> int:
        """The number of updates so far."""
        return self._newest

    def current(self) -> Weights:
        """The newest weights: the same tensors until the next update."""
        return self.version(self._newest)

    def version(self, number: int) -> Weights:
        """The weights after `number` updates. Raises LookupError unless it is the newest or kept."""
        if number == self._newest and number not in self._held:
            self._share(number)
        if number not in self._held:
            kept = ", ".join(map(str, sorted({*self._held, self._newest})))
            raise LookupError(f"weights of version {number} are not kept; kept: {kept}")
        return self._held[number]

    def keep_from(self, number: int) -> None:
        """From now on no version before `number` will be asked for; the others are kept.

        Without it only the newest can be asked for.
        """
        self._oldest = number
        for older in [held for held in self._held if held < min(number, self._newest)]:
            del self._held[older]

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around the optimizer's step: what it changes is a new version."""
        number = self._newest
        if self._oldest is not None and self._oldest <= number:
            self.version(number)  # held already, or made while its weights are still there
        else:
            self._held.pop(number, None)
        for parameter, leaf in zip(self._parameters, self._leaves.get(number, []), strict=False):
            if leaf() is not None:
                parameter.data = parameter.data.clone()
        yield
        self._newest += 1
        self._leaves = {n: leaves for n, leaves in self._leaves.items() if self._alive_leaves(n)}

    @contextmanager
    def handing_over(self, weights: Weights, factor: float = 1.0) -> Iterator[None]:
        """Around a backward: a gradient moves to its Parameter, times `factor`, as soon as it is there.

        So what hooks on the Parameter begin, such as an all-reduce, need not wait for the whole backward.
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
        """Move the gradients of a version to the Parameters, times `factor`; they add up there.

        Hooks on the Parameters see them arrive, once each. A Parameter whose leaf has none stays as it is.
        """
        self._move(self._pairs(weights), factor)

    def _pairs(self, weights: Weights) -> list[tuple[Tensor, Tensor]]:
        """Each Parameter with the version's leaf, a tied one once."""
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
                gradients.append(leaf.grad if factor == 1.0 else leaf.grad * factor)
                leaf.grad = None
        hand_over(gradients, parameters)

    @property
    def alive(self) -> list[int]:
        """The versions that somebody holds, and the newest."""
        return sorted({self._newest, *(number for number in self._leaves if self._alive_leaves(number))})

    @property
    def extra_bytes(self) -> int:
        """What versions hold beyond the Parameters themselves."""
        own = {parameter.data_ptr() for parameter in self._parameters}
        sizes = {
            leaf.data_ptr(): leaf.nbytes
            for number in self._leaves
            for leaf in self._alive_leaves(number)
            if leaf.data_ptr() not in own
        }
        return sum(sizes.values())

    def restore(self, newest: int, older: Mapping[int, Mapping[Tensor, Tensor]]) -> None:
        """Count on from an earlier run: the Parameters hold version `newest`.

        Args:
            older: what each Parameter was in versions that will be asked for; nobody holds one now.
        """
        self._newest, self._oldest = newest, min([newest, *older])
        self._held, self._leaves = {}, {}
        for number, values in older.items():
            self._hold(number, {p: values[p].requires_grad_() for p in self._parameters})

    def _share(self, number: int) -> Weights:
        # .data, not .detach(): that one would share the version counter, too, and autograd would refuse a
        # backward after the Parameters moved on to a storage of their own and were changed there.
        return self._hold(number, {p: p.data.requires_grad_() for p in self._parameters})

    def _hold(self, number: int, leaf_of: Mapping[Tensor, Tensor]) -> Weights:
        self._leaves[number] = [weakref.ref(leaf) for leaf in leaf_of.values()]
        self._held[number] = [{name: leaf_of[p] for name, p in layer.items()} for layer in self._own]
        return self._held[number]

    def _alive_leaves(self, number: int) -> list[Tensor]:
        return [leaf for leaf in (reference() for reference in self._leaves[number]) if leaf is not None]
