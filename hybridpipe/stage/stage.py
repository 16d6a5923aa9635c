"""Stage: runs consecutive layers forward and backward, one microbatch at a time.

Knows its layers, their place in the model and the loss behind the last one; knows no ranks and no
messages. Invariant: between Forward(m) and Backward(m) the stash holds the microbatch's graph, or what it
takes to make it again; after its backward nothing of it is left.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hybridpipe.model.rng import may_draw_from_python, random_key, seed_generators
from hybridpipe.model.sequential import StageModule
from hybridpipe.model.tensors import TensorTree, map_tensors, rebuild, tensors_of
from hybridpipe.stage.deferred import Deferring
from hybridpipe.stage.recompute import ChangingBuffers, copied, without_graph
from hybridpipe.stage.split_backward import WeightHalf
from hybridpipe.stage.weights import (
    Substitution,
    Weights,
    check_no_foreign_weights,
    check_no_other_weights,
    trained_parameters,
)
from hybridpipe.stage.wgrad import MicrobatchRows, WeightGradients
from hybridpipe.types import Loss

_Result = TypeVar("_Result")


class _Call(NamedTuple):
    """The arguments of a microbatch's forward."""

    slot: int  # of the stash
    microbatch: int
    step: int
    inputs: TensorTree
    weights: Weights | None
    targets: Any = None
    share: float | None = None  # None where no loss follows


_Later = WeightHalf | MicrobatchRows  # where weights' gradients are left


class _Graph(NamedTuple):
    outputs: TensorTree
    later: _Later | None


class _Stashed(NamedTuple):
    call: _Call
    graph: _Graph | None  # None: to be made again
    buffers: Mapping[str, Tensor] | None = None  # as they were before the forward


class Stage:
    """The layers of one stage at work.

    Args:
        layers: the layers; their indices in the whole model are a part of each one's random key.
        device: where they run.
        seed: of the run's randomness.
        loss: for the last stage: `loss(outputs, targets)` is the mean over the microbatch's samples.
        split_backward: the backward can be run in halves, `backward_input` and `backward_weight`.
        recompute: stash a microbatch's inputs only, and run its forward again for its backward.
        batches_wgrad: make the weight gradients of several microbatches at once where that pays; see
            `hybridpipe.stage.wgrad`. Not where microbatches see different weights.
        check_loss: refuse a loss that uses parameters of other stages. Not for a copy of layers, as the loss
            may use the model's own.
    """

    def __init__(
        self,
        layers: StageModule,
        device: torch.device,
        seed: int = 0,
        loss: Loss | None = None,
        split_backward: bool = False,
        recompute: bool = False,
        batches_wgrad: bool = False,
        check_loss: bool = True,
    ) -> None:
        self.layers, self.module = layers, layers.module.to(device)
        self.device, self.seed, self.loss = device, seed, loss
        self.split_backward, self.recompute, self.batches_wgrad = split_backward, recompute, batches_wgrad
        self._stash: dict[int, _Stashed] = {}
        self._weight_halves: dict[int, WeightHalf] = {}
        self._substitution = Substitution(self.module)
        self._products = WeightGradients(self.module)
        self.can_batch_wgrad = not self._products.is_empty  # a layer is large enough for batching to pay
        self._deferring = Deferring(self.module) if split_backward else self._products.deferring
        self._weights_checked, self._loss_checked = False, not check_loss
        self.renew()

    def renew(self) -> None:
        """Take up what users change in layers between two runs: modes, hooks, what is trained."""
        self._buffers = ChangingBuffers(self.module)
        of_loss = self.loss is not None and may_draw_from_python(self.loss)
        self._draws_from_python = [*map(may_draw_from_python, self.module), of_loss]

    @property
    def draws_from_python(self) -> bool:
        """Whether Python's or NumPy's generators are seeded for any layer, or for the loss."""
        return any(self._draws_from_python)

    @property
    def num_stashed(self) -> int:
        """Microbatches whose backward, or its second half, is still to come."""
        return len(self._stash) + len(self._weight_halves)

    @property
    def not_split(self) -> list[str]:
        """The trained modules whose weights' gradients are computed in `backward_input` already.

        Named by layer index in the whole model and path within: "3.norm (LayerNorm)".
        """
        whole = self._deferring.whole()
        return [f"{self.layers.numbered(path)} ({type(module).__name__})" for path, module in whole]

    def forward(
        self,
        microbatch: int,
        inputs: TensorTree,
        step: int,
        weights: Weights | None = None,
        slot: int | None = None,
    ) -> TensorTree:
        """Run the layers and stash the graph.

        Args:
            inputs: leaf tensors; those that require grad get one in `backward`.
            step: the number of minibatches before this one; a part of the random key, as is `microbatch`.
            weights: what to call the layers with, in place of the parameters that require grad; the
                gradients arrive there.
            slot: what `backward` will be given, where microbatches of several minibatches are in flight;
                `microbatch` by default.

        Raises:
            ValueError: a layer would use its own parameters instead of `weights`.
        """
        return self._forward(_Call(_slot(slot, microbatch), microbatch, step, inputs, weights))

    def forward_loss(
        self,
        microbatch: int,
        inputs: TensorTree,
        targets: TensorTree,
        share: float,
        step: int,
        weights: Weights | None = None,
        slot: int | None = None,
    ) -> Tensor:
        """Run the layers and the loss, and stash the loss times `share`.

        Args:
            share: this microbatch's part of the minibatch's samples.
            weights, slot: as in `forward`.

        Returns:
            the share of the loss; it requires grad where it depends on anything that does.
        """
        call = _Call(_slot(slot, microbatch), microbatch, step, inputs, weights, targets, share)
        loss = self._forward(call)
        assert isinstance(loss, Tensor)
        return loss.detach().requires_grad_(loss.requires_grad)

    def infer(self, microbatch: int, inputs: TensorTree, step: int) -> TensorTree:
        """Run the layers without a graph; nothing is stashed."""
        with torch.no_grad():
            return self._layers(inputs, step, microbatch)

    def backward(
        self, slot: int, gradients: Sequence[Tensor | None] = (), is_final: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Run the microbatch's backward; parameter gradients add up in `.grad`.

        Args:
            gradients: one for each output tensor, None where nothing behind used it; empty behind the loss.
            is_final: no backward follows before the gradients are used. Until then those of large linear
                layers may be kept back; see `products` and `complete_gradients`.

        Returns:
            the gradient of each input tensor, None where it requires none or was not used.
        """
        of_inputs, later = self._backward(slot, gradients, is_final)
        if later is not None:
            later.finish()
        return of_inputs

    @property
    def has_deferred_wgrad(self) -> bool:
        """Whether `complete_gradients` has anything to do."""
        return self.can_batch_wgrad and self._products.has_rows

    @property
    def max_deferred_bytes(self) -> int:
        """What backwards have kept back at most since `reset_wgrad_peaks`."""
        return self._products.most_bytes

    @property
    def max_batched(self) -> int:
        """Microbatches whose gradients one product makes at most, since `reset_wgrad_peaks`; 0: none is."""
        return self._products.max_batched

    def reset_wgrad_peaks(self) -> None:
        """`max_deferred_bytes` and `max_batched` start anew."""
        self._products.most_bytes = self._products.fewest_rows = 0

    def complete_gradients(self) -> None:
        """Bring into `.grad` what backwards have kept back, where no final one came."""
        if self.can_batch_wgrad:
            self._products.multiply_all()

    def backward_input(self, slot: int, gradients: Sequence[Tensor | None] = ()) -> tuple[Tensor | None, ...]:
        """The half of `backward` that the stage before waits for; no parameter gets a gradient yet."""
        of_inputs, half = self._backward(slot, gradients)
        assert isinstance(half, WeightHalf), "the stage was not made to split its backward"
        self._weight_halves[slot] = half
        return of_inputs

    def backward_weight(self, slot: int) -> None:
        """The other half: parameter gradients add up in `.grad`."""
        self._weight_halves.pop(slot).finish()

    def _forward(self, call: _Call) -> TensorTree:
        if not self.recompute:
            graph = self._graph(call)
            self._stash[call.slot] = _Stashed(call._replace(targets=None), graph)
            return graph.outputs
        before = self._buffers.before()
        targets = None if call.share is None else copied(call.targets)
        # with a graph, as kernels may differ without one; it goes at once
        outputs = self._graph(call._replace(inputs=copied(call.inputs), targets=targets)).outputs
        self._stash[call.slot] = _Stashed(call, None, self._buffers.after(before))
        return without_graph(outputs)

    def _backward(
        self, slot: int, gradients: Sequence[Tensor | None], is_final: bool = False
    ) -> tuple[tuple[Tensor | None, ...], _Later | None]:
        call, graph, buffers = self._stash.pop(slot)
        outputs, later = graph or self._graph(call, buffers)
        tensors = tensors_of(outputs)
        behind_loss = call.share is not None
        roots = [
            (output, gradient)
            for output, gradient in zip(tensors, gradients or [None] * len(tensors), strict=True)
            if output.requires_grad and (behind_loss or gradient is not None)
        ]
        with nullcontext() if later is None else later.collected(is_final):
            if roots:
                ends, of_ends = zip(*roots, strict=True)
                self._holding(call.weights, later, lambda: torch.autograd.backward(ends, of_ends))
        return tuple(tensor.grad for tensor in tensors_of(call.inputs)), later

    def _graph(self, call: _Call, buffers: Mapping[str, Tensor] | None = None) -> _Graph:
        later: _Later | None = None
        if self.split_backward:
            later = WeightHalf(trained_parameters(self.module) if call.weights is None else call.weights)
        elif self.batches_wgrad and self.can_batch_wgrad:
            later = MicrobatchRows(self._products)
        outputs = self._holding(call.weights, later, lambda: self._run(call), buffers)
        tensors_of(outputs)  # raises TypeError where the layers gave anything else
        if call.weights is not None and not self._weights_checked:
            check_no_other_weights(outputs, self.module)
            self._weights_checked = True
        return _Graph(outputs, later)

    def _holding(
        self,
        weights: Weights | None,
        later: _Later | None,
        function: Callable[[], _Result],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> _Result:
        """Run `function` while the layers hold what the microbatch needs them to."""
        if later is None and weights is None and not buffers:
            return function()
        if later is None:
            return self._substitution.run(function, weights, buffers)
        with self._deferring.noting(later):
            return self._substitution.run(function, later.weights, buffers)

    def _run(self, call: _Call) -> TensorTree:
        value = self._layers(map_tensors(_enter, call.inputs), call.step, call.microbatch)
        if call.share is None:
            return value
        assert self.loss is not None
        self._seed(call.step, call.microbatch, len(self.module))
        mean = self.loss(value, call.targets)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            got = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise ValueError(f"loss must return a tensor of one number, the mean over the samples, got {got}")
        if not self._loss_checked:
            check_no_foreign_weights(mean, value, self.module)
            self._loss_checked = True
        return mean * call.share

    def _layers(self, value: TensorTree, step: int, microbatch: int) -> TensorTree:
        for i, layer in enumerate(self.module):
            self._seed(step, microbatch, i)
            value = layer(value)
        return value

    def _seed(self, step: int, microbatch: int, layer: int) -> None:
        key = random_key(self.seed, step, microbatch, self.layers.first_layer + layer)
        seed_generators(key, self.device, self._draws_from_python[layer])


def _slot(slot: int | None, microbatch: int) -> int:
    return microbatch if slot is None else slot


def received(value: TensorTree, requires_grad: Sequence[bool]) -> TensorTree:
    """The value as leaves of a new graph, which starts at this stage."""
    tensors = tensors_of(value)
    for tensor, needs in zip(tensors, requires_grad, strict=True):
        tensor.requires_grad_(needs)
    return rebuild(tensors, value)


class _Enter(torch.autograd.Function):
    """The identity, sharing memory: lets the first layer work in place, as it may in one process.

    Autograd forbids that on a leaf that requires grad, such as a received activation.
    """

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(leaf.detach())  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def _enter(tensor: Tensor) -> Tensor:
    return _Enter.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
