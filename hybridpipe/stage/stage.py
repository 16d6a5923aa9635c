"""Stage: runs consecutive layers forward and backward, one microbatch at a time.

Knows its layers, their place in the model and the loss behind the last one; knows no ranks and no
messages. Invariant: between Forward(m) and Backward(m) the stash holds the microbatch's graph; after
its backward nothing of it is left.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe.stage.randomness import preserved_state, random_key, seed_generators
from hybridpipe.stage.values import Value, map_tensors, rebuild, tensors_of

Loss = Callable[[Any, Any], Tensor]


class _Stashed(NamedTuple):
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Stage:
    """Layers `[first_layer, first_layer + len(layers))` of a model.

    Args:
        layers: the modules, in order.
        first_layer: the index of the first in the whole model; a part of each layer's random key.
        device: where they run.
        seed: of the run's randomness.
        loss: for the last stage: `loss(outputs, targets)` is the mean over the microbatch's samples.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        device: torch.device,
        seed: int = 0,
        loss: Loss | None = None,
    ) -> None:
        self.module = nn.Sequential(*layers).to(device)
        self.first_layer, self.device, self.seed, self.loss = first_layer, device, seed, loss
        self._stash: dict[int, _Stashed] = {}

    @property
    def num_stashed(self) -> int:
        """Microbatches whose backward is still to come."""
        return len(self._stash)

    def forward(self, microbatch: int, inputs: Value, step: int) -> Value:
        """Run the layers and stash the graph.

        Args:
            inputs: leaf tensors; those that require grad get one in `backward`.
            step: the number of updates before this one; a part of the random key.
        """
        outputs = self._run(inputs, step, microbatch)
        self._stash[microbatch] = _Stashed(tensors_of(inputs), tensors_of(outputs))
        return outputs

    def forward_loss(self, microbatch: int, inputs: Value, targets: Value, share: float, step: int) -> Tensor:
        """Run the layers and the loss, and stash the loss times `share`.

        Args:
            share: this microbatch's part of the minibatch's samples.

        Returns:
            the share of the loss, detached.
        """
        assert self.loss is not None
        with preserved_state(self.device):
            outputs = self._run(inputs, step, microbatch)
            seed_generators(self._key(step, microbatch, len(self.module)), self.device)
            mean = self.loss(outputs, targets)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            got = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise ValueError(f"loss must return a tensor of one number, the mean over the samples, got {got}")
        loss = mean * share
        self._stash[microbatch] = _Stashed(tensors_of(inputs), (loss,))
        return loss.detach()

    def infer(self, inputs: Value) -> Value:
        """Run the layers in evaluation: no graph, nothing stashed."""
        with torch.no_grad():
            value: Value = self.module(inputs)
        return value

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None] = ()) -> tuple[Tensor | None, ...]:
        """Run the microbatch's backward; parameter gradients add up in `.grad`.

        Args:
            gradients: one for each output tensor, None where it has none; empty behind the loss.

        Returns:
            the gradient of each input tensor, None where it requires none.
        """
        inputs, outputs = self._stash.pop(microbatch)
        roots = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients or [None] * len(outputs), strict=True)
            if output.requires_grad
        ]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        return tuple(_gradient(tensor) if tensor.requires_grad else None for tensor in inputs)

    def _run(self, inputs: Value, step: int, microbatch: int) -> Value:
        value = map_tensors(_enter, inputs)
        with preserved_state(self.device):
            for i, layer in enumerate(self.module):
                seed_generators(self._key(step, microbatch, i), self.device)
                value = layer(value)
        return value

    def _key(self, step: int, microbatch: int, layer: int) -> int:
        return random_key(self.seed, step, microbatch, self.first_layer + layer)


def received(value: Value, requires_grad: Sequence[bool]) -> Value:
    """The value as leaves of a new graph, which starts at this stage."""
    tensors = tensors_of(value)
    for tensor, needs in zip(tensors, requires_grad, strict=True):
        tensor.requires_grad_(needs)
    return rebuild(tensors, value)


def _gradient(leaf: Tensor) -> Tensor:
    """Zeros where the stage did not use the input, as the stage before must still run its backward."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


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
