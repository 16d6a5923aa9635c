"""Stage: runs consecutive layers forward and backward, one microbatch at a time.

Knows its layers, their place in the model and the loss behind the last one; no ranks and no messages.
Invariant: the stash holds a microbatch's graph, or its inputs, from its forward to its backward, not longer.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hybridpipe.model.rng import may_draw_from_python, seed_place
from hybridpipe.model.stage_module import Seed, StageModule
from hybridpipe.model.tensors import TensorTree, Tree, described, map_tensors, tensors_in, tensors_of
from hybridpipe.stage.deferred_wgrad import Deferring
from hybridpipe.stage.experts import called_in_order, split_experts_in
from hybridpipe.stage.losses import MicrobatchLoss, computed
from hybridpipe.stage.recompute import ChangingBuffers, copied, without_graph
from hybridpipe.stage.split_backward import WeightHalf
from hybridpipe.stage.sync_batchnorm import ReplicaSums, SyncBatchNorms
from hybridpipe.stage.weights import (
    Substitution,
    Weights,
    WeightVersions,
    check_no_foreign_weights,
    check_no_other_weights,
    trained_parameters,
)
from hybridpipe.stage.wgrad import MicrobatchRows, WeightGradients
from hybridpipe.types import Loss

_Result = TypeVar("_Result")


class _Call(NamedTuple):
    """The arguments of a microbatch's forward."""

    slot: int  # its key in the stash
    microbatch: int
    step: int
    received: TensorTree | None  # None in the model's first stage
    inputs: Tree  # the model's; None where the stage needs none
    weights: Weights | None
    targets: Tree = None
    share: float | None = None  # None if no loss follows
    num_samples: int = 1  # of the minibatch
    form: int = 0
    scale: float = 1.0  # of the loss
    collects: bool = False  # the weights are the stage's own copies, whose gradients the parameters get
    joins: bool = False  # there is no microbatch: the stage's experts compute other replicas' tokens


_Later = WeightHalf | MicrobatchRows  # the sinks of deferred weight gradients


class _Graph(NamedTuple):
    outputs: TensorTree  # behind the loss, the number whose backward runs
    later: _Later | None
    loss: MicrobatchLoss | None


class _Stashed(NamedTuple):
    call: _Call
    graph: _Graph | None  # None: the forward runs again
    buffers: Mapping[str, Tensor] | None = None  # their values before the forward


class Stage:
    """Runs the layers of one stage.

    Args:
        layers: the layers; their indices in the whole model are a part of each one's random key.
        device: the device that they run on.
        seed: seed of the run's random numbers.
        loss: the last stage's loss: `loss(outputs, targets)` returns the mean over the samples, or a pair
            (sum, weight).
        split_backward: run the backward in halves, `backward_input` and `backward_weight`.
        recompute: stash only a microbatch's inputs, and run its forward again for its backward.
        batches_wgrad: compute the weight gradients of several microbatches in one product where that pays
            (`hybridpipe.stage.wgrad`). Not allowed where microbatches use different weights.
        check_loss: refuse a loss that uses parameters from outside the stage. Set it to False for copied
            layers, since the loss may use the model's own.
        sums: among the replicas whose microbatches BatchNorm layers normalise together; None: each alone.
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
        sums: ReplicaSums | None = None,
    ) -> None:
        self.layers, self.module = layers, layers.move(device)
        self.device, self.seed = device, seed
        self.loss = loss.to(device) if isinstance(loss, nn.Module) else loss
        self.split_backward, self.recompute, self.batches_wgrad = split_backward, recompute, batches_wgrad
        self._stash: dict[int, _Stashed] = {}
        self._weight_halves: dict[int, WeightHalf] = {}
        self._substitution = Substitution(self.module)
        self._is_low = layers.precision.low is not None
        self._context = partial(layers.precision.context, device) if self._is_low else nullcontext
        lowers = layers.precision.lowers_weights
        self._copies = WeightVersions(self.module, layers.precision) if lowers else None
        self._wgrad = WeightGradients(nn.Sequential() if lowers else self.module)  # copies change
        self.can_batch_wgrad = not self._wgrad.is_empty  # a layer is large enough for batching to pay
        self._deferring = Deferring(self.module) if split_backward else self._wgrad.deferring
        self.experts = split_experts_in(self.module)
        self._norms = None if sums is None else SyncBatchNorms(self.module, sums)
        self._weights_checked, self._loss_checked = False, not check_loss
        self.renew()

    def begin(self, num_microbatches: int) -> None:
        """Adopt the parameters' present values; call it before each run.

        Args:
            num_microbatches: of the run, over all replicas.
        """
        if self._copies is not None:
            self._copies.begin()
        if self._norms is not None:
            self._norms.begin(num_microbatches)

    def copy_weights(self) -> list[Tensor]:
        """Copy the present weights, as an update's first forward does; return what layers are called with.

        The list is empty where they are called with their own parameters.
        """
        if self._copies is None:
            return []
        self._copies.begin()
        weights = self._copies.current()
        return [tensor for layer in weights for tensor in layer.values()]

    def renew(self) -> None:
        """Adopt the layers' present modes, hooks and requires_grad flags; call it between two runs."""
        if self._copies is not None:
            self._copies.renew(self.module)
        self._buffers = ChangingBuffers(self.module)
        self._loss_draws_from_python = self.loss is not None and may_draw_from_python(self.loss)
        self.layers.renew()
        if self._norms is not None:
            self._norms.renew()

    @property
    def draws_from_python(self) -> bool:
        """True if a layer or the loss may draw from Python's or NumPy's generators."""
        return self.layers.draws_from_python or self._loss_draws_from_python

    def loads(self, training: bool) -> bool:
        """Return True if the stage looks at the model's inputs or the loss's targets."""
        layers = self.layers
        return self.loss is not None or layers.shapes_vary or layers.needs_inputs(training)

    @property
    def num_stashed(self) -> int:
        """Number of microbatches whose backward, or its second half, is still to come."""
        return len(self._stash) + len(self._weight_halves)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of its weights with which the stage calls its layers."""
        return 0 if self._copies is None else self._copies.extra_bytes

    @property
    def bytes_exchanged(self) -> int:
        """Bytes sent in passes together with other replicas so far: tokens of experts, sums of BatchNorm."""
        of_norms = 0 if self._norms is None else self._norms.bytes_sent
        return self.experts[0].exchange.bytes_sent if self.experts else of_norms

    @property
    def not_split(self) -> list[str]:
        """Trained modules whose weight gradients `backward_input` computes, such as "3.norm (LayerNorm)".

        Each is named by its layer's index in the whole model and its path within the layer.
        """
        whole = self._deferring.undeferred()
        return [f"{self.layers.numbered(path)} ({type(module).__name__})" for path, module in whole]

    def forward(
        self,
        microbatch: int,
        received: TensorTree | None,
        step: int,
        weights: Weights | None = None,
        slot: int | None = None,
        inputs: Tree = None,
        form: int = 0,
    ) -> TensorTree:
        """Run the layers and stash the graph.

        Args:
            microbatch: index in its minibatch; a part of the random key.
            received: what the stage before has sent, as leaves; those that require grad get a gradient in
                `backward`. None in the first stage.
            step: number of minibatches before this one; a part of the random key.
            weights: leaves that replace the parameters that require grad, and that receive the gradients.
            slot: key of the microbatch for `backward`, needed if several minibatches are in flight;
                `microbatch` by default.
            inputs: the model's inputs, samples in the first dimension; needed if `layers.needs_inputs`.
            form: the microbatch's, as `layers.form` has given it; a recorded model's layers look at it.

        Raises:
            ValueError: a layer uses its own parameters instead of `weights`.
        """
        call = _Call(_slot(slot, microbatch), microbatch, step, received, inputs, weights, form=form)
        return self._forward(call).outputs

    def forward_loss(
        self,
        microbatch: int,
        received: TensorTree | None,
        targets: Tree,
        share: float,
        step: int,
        weights: Weights | None = None,
        slot: int | None = None,
        inputs: Tree = None,
        num_samples: int = 1,
        form: int = 0,
        scale: float = 1.0,
    ) -> MicrobatchLoss:
        """Run the layers and the loss, and stash the loss times its `MicrobatchLoss.factor` and `scale`.

        Args:
            share: this microbatch's fraction of the minibatch's samples.
            num_samples: samples of the minibatch; used for a loss that returns (sum, weight).
            scale: by which the gradients shall be larger than the loss's.
            microbatch, received, step, weights, slot, inputs, form: as in `forward`.

        Returns:
            the loss, detached; its value requires grad if the loss does.

        Raises:
            ValueError: the loss is neither a mean nor a pair, or uses parameters from outside the stage.
        """
        key = _slot(slot, microbatch)
        loss = self._forward(
            _Call(key, microbatch, step, received, inputs, weights, targets, share, num_samples, form, scale)
        ).loss
        assert loss is not None
        return loss

    def join_forward(self, slot: int) -> None:
        """Take part in the forward of other replicas, without a microbatch."""
        if self._norms is not None:
            self._norms.join()
            return
        self._forward(_Call(slot, slot, 0, None, None, None, joins=True))

    def join_backward(self, slot: int) -> None:
        """Run the backward of `join_forward`, both halves of it."""
        if self._norms is not None:
            self._norms.join()
            return
        _, later = self._backward(slot, ())
        if isinstance(later, WeightHalf):
            self._finish(later)
        elif later is not None:
            later.finish()

    def join_inference(self) -> None:
        """Run the stage's experts in the inference of other replicas, without a microbatch."""
        weights = None if self._copies is None else self._copies.current()
        with torch.no_grad(), self._context():
            self._substitution.run(self._join, weights)

    def infer(
        self, microbatch: int, received: TensorTree | None, step: int, inputs: Tree = None, form: int = 0
    ) -> Tree:
        """Run the layers without a graph; nothing is stashed."""
        seed = partial(self._seed, step, microbatch)
        weights = None if self._copies is None else self._copies.current()
        with torch.no_grad(), self._context():
            run = partial(self._run_layers, received, inputs, seed, training=False, form=form)
            value: Tree = self._substitution.run(run, weights)
        return value if self.loss is None else map_tensors(self.layers.precision.raised, value)

    def backward(
        self, slot: int, gradients: Sequence[Tensor | None] = (), is_final: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Run the microbatch's backward; parameter gradients add up in `.grad`.

        Args:
            gradients: one for each output tensor, None if no later stage used it; empty if the loss follows.
            is_final: True if no backward follows before the gradients are used. Other backwards may defer
                weight gradients of large linear layers; see `wgrad` and `complete_gradients`.

        Returns:
            the gradient of each input tensor; None if it requires none or was not used.
        """
        of_inputs, later = self._backward(slot, gradients, is_final)
        if later is not None:
            later.finish()
        return of_inputs

    @property
    def has_deferred_wgrad(self) -> bool:
        """True if `complete_gradients` has deferred weight gradients to compute."""
        return self.can_batch_wgrad and self._wgrad.has_rows

    @property
    def max_deferred_bytes(self) -> int:
        """Most bytes kept for deferred weight gradients since `reset_wgrad_peaks`."""
        return self._wgrad.most_bytes

    @property
    def max_batched(self) -> int:
        """Most microbatches in one product since `reset_wgrad_peaks`; 0 without products."""
        return self._wgrad.max_batched

    def reset_wgrad_peaks(self) -> None:
        """Set `max_deferred_bytes` and `max_batched` to 0."""
        self._wgrad.most_bytes = self._wgrad.fewest_rows = 0

    def complete_gradients(self) -> None:
        """Add deferred weight gradients to `.grad`; needed if the last backward was not final."""
        if self.can_batch_wgrad:
            self._wgrad.multiply_all()

    def backward_input(self, slot: int, gradients: Sequence[Tensor | None] = ()) -> tuple[Tensor | None, ...]:
        """Run the half of `backward` that the stage before waits for; no parameter gets a gradient yet."""
        of_inputs, half = self._backward(slot, gradients)
        assert isinstance(half, WeightHalf), "the stage was not made to split its backward"
        self._weight_halves[slot] = half
        return of_inputs

    def split_bytes(self, slot: int) -> int:
        """Return the bytes kept between `backward_input` and `backward_weight`."""
        return self._weight_halves[slot].num_bytes

    def backward_weight(self, slot: int) -> None:
        """Run the other half of `backward`: parameter gradients add up in `.grad`."""
        self._finish(self._weight_halves.pop(slot))

    def _finish(self, half: WeightHalf) -> None:
        half.finish()
        if self._copies is not None:
            self._copies.collect(self._copies.current())

    def _forward(self, call: _Call) -> _Graph:
        if call.weights is None and self._copies is not None:
            call = call._replace(weights=self._copies.current(), collects=True)
        if not self.recompute:
            graph = self._graph(call)
            self._stash[call.slot] = _Stashed(call._replace(targets=None), graph)
            return graph
        before = self._buffers.before()
        targets = None if call.share is None else copied(call.targets)
        # with a graph, since kernels may differ without one; the graph is freed at once
        given = {"received": copied(call.received), "inputs": copied(call.inputs), "targets": targets}
        graph = self._graph(call._replace(**given))
        self._stash[call.slot] = _Stashed(call, None, self._buffers.after(before))
        return _Graph(without_graph(graph.outputs), None, graph.loss)

    def _backward(
        self, slot: int, gradients: Sequence[Tensor | None], is_final: bool = False
    ) -> tuple[tuple[Tensor | None, ...], _Later | None]:
        call, graph, buffers = self._stash.pop(slot)
        outputs, later, _ = graph or self._graph(call, buffers)
        tensors = tensors_of(outputs)
        if call.joins:
            gradients = list(map(torch.zeros_like, tensors))
        behind_loss = call.share is not None
        roots = [
            (output, gradient)
            for output, gradient in zip(tensors, gradients or [None] * len(tensors), strict=True)
            if output.requires_grad and (behind_loss or gradient is not None)
        ]
        normalising = nullcontext() if self._norms is None else self._norms.backward(call.microbatch)
        with nullcontext() if later is None else later.collected(is_final), normalising:
            if roots:
                ends, of_ends = zip(*roots, strict=True)
                with self._collecting(call):
                    self._holding(call.weights, later, lambda: torch.autograd.backward(ends, of_ends))
        return tuple(tensor.grad for tensor in tensors_in(call.received)), later

    def _collecting(self, call: _Call) -> AbstractContextManager[None]:
        """Return a context in which gradients of the stage's own copies move to the parameters."""
        if not call.collects:
            return nullcontext()
        assert self._copies is not None and call.weights is not None
        return self._copies.handing_over(call.weights)

    def _graph(self, call: _Call, buffers: Mapping[str, Tensor] | None = None) -> _Graph:
        later: _Later | None = None
        if self.split_backward:
            later = WeightHalf(trained_parameters(self.module) if call.weights is None else call.weights)
        elif self.batches_wgrad and self.can_batch_wgrad:
            later = MicrobatchRows(self._wgrad)
        again = buffers is not None
        with nullcontext() if self._norms is None else self._norms.forward(call.microbatch, again):
            outputs, loss = self._holding(call.weights, later, lambda: self._run(call), buffers)
        if call.weights is not None and not self._weights_checked:
            check_no_other_weights(outputs, self.layers)
            self._weights_checked = True
        return _Graph(outputs, later, loss)

    def _holding(
        self,
        weights: Weights | None,
        later: _Later | None,
        function: Callable[[], _Result],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> _Result:
        """Run `function` while the layers hold the microbatch's weights and buffers and defer to `later`."""
        if later is None and weights is None and not buffers:
            return function()
        if later is None:
            return self._substitution.run(function, weights, buffers)
        with self._deferring.deferring_to(later):
            return self._substitution.run(function, later.weights, buffers)

    def _join(self) -> TensorTree:
        return tuple(experts.join() for experts in self.experts)

    def _run(self, call: _Call) -> tuple[TensorTree, MicrobatchLoss | None]:
        if call.joins:
            with self._context():
                return self._join(), None
        seed = partial(self._seed, call.step, call.microbatch)
        before = self._shared_buffers()
        entered: list[_Entered] = []
        received = None if call.received is None else map_tensors(partial(_enter, entered), call.received)
        with self._context():
            value = self._run_layers(received, call.inputs, seed, training=True, form=call.form)
        _note_writes(entered)
        self._check_unchanged(before)
        if call.share is None:
            return _passed_on(value), None
        assert self.loss is not None
        if self._is_low:
            value = map_tensors(self.layers.precision.raised, value)
        seed(self.layers.loss_key, self._loss_draws_from_python)
        loss = computed(self.loss, value, call.targets)
        if not self._loss_checked:
            check_no_foreign_weights(loss.value, value, self.layers)
            self._loss_checked = True
        factor = call.share if loss.weight is None else loss.factor(call.share, call.num_samples)
        return loss.value * (factor * call.scale), loss.detached()

    def _run_layers(self, received: Tree, inputs: Tree, seed: Seed, training: bool, form: int) -> Tree:
        try:
            with called_in_order(self.experts) if self.experts else nullcontext():
                return self.layers.run(received, inputs, seed, training=training, form=form)
        except Exception as error:
            error.add_note(f"in the forward with {_given(received, inputs)}")  # Python prints it below
            raise

    def _seed(self, step: int, microbatch: int, place: int, python_too: bool) -> None:
        seed_place(self.seed, step, microbatch, place, self.device, python_too)

    def _shared_buffers(self) -> dict[str, tuple[Tensor, int]]:
        """Return the buffers that other stages also hold, and autograd's version counter of each, by path."""
        buffers = {path: self.module.get_buffer(path) for path in self.layers.shared_buffers}
        return {path: (buffer, buffer._version) for path, buffer in buffers.items()}

    def _check_unchanged(self, before: Mapping[str, tuple[Tensor, int]]) -> None:
        """Raise ValueError if a forward has changed a buffer that other stages hold as well."""
        for path, (buffer, version) in before.items():
            if self.module.get_buffer(path) is not buffer or buffer._version != version:
                raise ValueError(
                    f"{self.layers.described(path)} is a buffer that layers of other stages share, and "
                    "training writes to it; keep these layers in one stage, as plan='dp' does"
                )


def _passed_on(value: Tree) -> TensorTree:
    tensors_of(value)  # raises TypeError for anything but tensors
    passed_on: TensorTree = value
    return passed_on


def _slot(slot: int | None, microbatch: int) -> int:
    return microbatch if slot is None else slot


class _Enter(torch.autograd.Function):
    """The identity on shared memory, which lets the first layer work in place, as it may in one process.

    Autograd forbids in-place operations on a leaf that requires grad, such as a received activation.
    """

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(leaf.detach())  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


_Entered = tuple[Tensor, Tensor]  # a leaf, and what the layers get of it
VERSION_ENTERED = 1  # the version of a tensor that `_Enter` returns


def _enter(entered: list[_Entered], leaf: Tensor) -> Tensor:
    if not leaf.requires_grad:
        return leaf
    entered.append((leaf, _Enter.apply(leaf)))  # type: ignore[no-untyped-call]
    return entered[-1][1]


def _note_writes(entered: Sequence[_Entered]) -> None:
    """Let autograd know which leaves the forward has written to.

    A leaf may share its memory with the output of a stage on the same rank (`handed_over`). If that stage's
    backward needs the output, it raises, as in one process.
    """
    for leaf, tensor in entered:
        if tensor._version > VERSION_ENTERED:
            torch.autograd.graph.increment_version(leaf)


def _given(received: Tree, inputs: Tree) -> str:
    """Return what a stage's layers were called with, for a note below an error."""
    given = {"inputs": inputs} if received is None else {"received": received, "inputs": inputs}
    return ", ".join(f"{name} = {described(tree)}" for name, tree in given.items() if tree is not None)
