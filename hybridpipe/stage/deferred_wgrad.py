"""Deferred wgrad: linear, convolution and embedding layers that leave the gradient of the weight for later.

Their autograd function computes the input's gradient and notes (input, gradient of the output) in a sink.
Not known here: when a sink computes its notes (`split_backward`, `wgrad`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpipe.torch_private import are_transforms_active, will_run


class Operation(Protocol):
    """An operation that is linear in its weight; `gradient` is that of the output."""

    def output(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the inputs."""

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight."""

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias."""


class _Linear:
    """A linear layer. Shapes: inputs (n, in), weight (out, in), gradient (n, out)."""

    def output(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(inputs, weight, bias)

    def input_gradient(self, gradient: Tensor, _: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight.conj()

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, _: Tensor) -> Tensor:
        return gradient.t() @ inputs.conj()

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum(0)


class _Convolution(NamedTuple):
    """A convolution.

    Shapes: inputs (n, in, *space), weight (out, in / groups, *kernel), gradient (n, out, *space).
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def output(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self.stride) - 1]
        return convolve(inputs, weight, bias, *self)

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return self._gradients(gradient, inputs, weight, [True, False, False])[0]

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return self._gradients(gradient, inputs, weight, [False, True, False])[1]

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum((0, *range(2, gradient.dim())))

    def _gradients(
        self, gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor, ...]:
        """Call autograd's convolution backward for the `wanted` gradients of inputs, weight and bias."""
        stride, padding, dilation, groups = self
        extra = (0,) * len(stride)  # of a transposed one
        result: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, stride, padding, dilation, False, extra, groups, wanted
        )
        return result


class _Embedding(NamedTuple):
    """An embedding. Shapes: inputs (*any) of integers, weight (entries, size), gradient (*any, size)."""

    padding_index: int  # -1: no padding index
    scaled: bool

    def output(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, inputs, self.padding_index, self.scaled)

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("integers have no gradient")

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.embedding_dense_backward(
            gradient, inputs, weight.shape[0], self.padding_index, self.scaled
        )
        return result

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        raise AssertionError("an embedding has no bias")


class Use(NamedTuple):
    """One use of a weight in a forward, whose weight gradient is not computed yet."""

    operation: Operation
    inputs: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None


class Sink(Protocol):
    """Collects one microbatch's deferred weight gradients."""

    collecting: bool  # False computes gradients at once
    takes_biases: bool  # True defers biases' gradients, too

    def takes(self, weight: Tensor, num_rows: int) -> bool:
        """Return True to defer a linear layer's weight gradient; False leaves it to autograd."""

    def note(self, use: Use) -> None:
        """Keep a use of a weight in the backward, to compute its gradients later."""


class Deferring:
    """The modules of a stage that can defer their weight gradients.

    Args:
        wanted: chooses among the modules that can.
    """

    def __init__(self, layers: nn.Sequential, wanted: Callable[[nn.Module], bool] = lambda _: True) -> None:
        self._layers, self._wanted = layers, wanted
        # compiled modules are left out: torch.compile would compile them anew in each microbatch's forward
        compiled = {part for module in layers.modules() if _is_compiled(module) for part in module.modules()}
        self.candidates = [
            module
            for module in layers.modules()
            if type(module) in _CALLS and module not in compiled and wanted(module)
        ]

    def undeferred(self) -> list[tuple[str, nn.Module]]:
        """Return the modules with trained parameters that do not defer, with their paths in the stage."""
        split = {module for module in self.candidates if _defers(module)}
        return [
            (path, module)
            for path, module in self._layers.named_modules()
            if module not in split and any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    @contextmanager
    def deferring_to(self, sink: Sink) -> Iterator[None]:
        """Let the stage's layers defer to `sink` while they, or their backward, run inside this context."""
        changed = [module for module in self.candidates if _defers(module) and self._wanted(module)]
        try:
            for module in changed:
                vars(module)["forward"] = partial(_CALLS[type(module)], module, sink)
            yield
        finally:
            for module in changed:
                del vars(module)["forward"]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _defers(module: nn.Module) -> bool:
    """Return True if the module can defer.

    Its weight is a trained parameter of its own, no backward hook or replaced forward watches it, and its
    options are supported.
    """
    weight = module._parameters.get("weight")
    watched = module._backward_hooks or module._backward_pre_hooks or "forward" in vars(module)
    if weight is None or not weight.requires_grad or watched:
        return False
    match module:
        case nn.Embedding():
            return not module.sparse and module.max_norm is None
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return module.padding != "same" or _is_symmetric(module)
    return True


def _is_symmetric(module: "_Conv") -> bool:
    pads = module._reversed_padding_repeated_twice
    return pads[::2] == pads[1::2]


def _is_plain(inputs: Tensor, weight: Tensor) -> bool:
    """Return True for tensors that the operations here support; others take the module's own forward."""
    return (
        type(inputs) in (Tensor, nn.Parameter)
        and inputs.layout == torch.strided
        and not (inputs.is_nested or inputs.is_complex() or weight.is_complex())
        and not are_transforms_active()
    )


class _Deferred(torch.autograd.Function):
    """An operation that can defer its weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, sink: Sink, operation: Operation, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.sink, ctx.operation, ctx.weight, ctx.bias = sink, operation, weight, bias
        ctx.save_for_backward(inputs, weight)
        return operation.output(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sink, operation = ctx.sink, ctx.operation
        bias = ctx.bias if ctx.bias is not None and ctx.bias.requires_grad else None
        inputs, weight = ctx.saved_tensors
        weight = weight.to(gradient.dtype)  # they differ under autocast
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[2]:
            of_inputs = operation.input_gradient(gradient, inputs, weight)
        # A layer may call autograd within its forward, and may even differentiate that gradient ...
        now = not sink.collecting or torch.is_grad_enabled()
        if now:
            of_weight = operation.weight_gradient(gradient, inputs, weight).to(ctx.weight.dtype)
        # ... or within its backward, for the gradients of inputs alone.
        elif will_run(ctx.next_functions[1][0]):
            sink.note(Use(operation, inputs.detach(), gradient, ctx.weight, bias))
        if bias is not None and (now or not sink.takes_biases):
            of_bias = operation.bias_gradient(gradient).to(bias.dtype)
        return None, None, of_inputs, of_weight, of_bias


def _autocast(inputs: Tensor) -> Tensor:
    """Cast inputs as autocast does for a linear layer or a convolution, which cast their own weights."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind) and inputs.is_floating_point() and inputs.dtype != torch.float64:
        return inputs.to(torch.get_autocast_dtype(kind))
    return inputs


def _linear(module: nn.Linear, sink: Sink, inputs: Tensor) -> Tensor:
    num_rows = math.prod(inputs.shape[:-1])
    if not (_is_plain(inputs, module.weight) and sink.takes(module.weight, num_rows)):
        return nn.Linear.forward(module, inputs)
    # Rows are two-dimensional here, since a view made inside the function could not be changed in place.
    rows = inputs[None] if inputs.dim() == 1 else inputs.flatten(end_dim=-2)
    outputs: Tensor = _Deferred.apply(sink, _Linear(), _autocast(rows), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return outputs if inputs.dim() == 2 else outputs.view(*inputs.shape[:-1], outputs.shape[-1])


_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def _convolution(module: _Conv, sink: Sink, inputs: Tensor) -> Tensor:
    num_spatial = len(module.kernel_size)
    if not _is_plain(inputs, module.weight) or inputs.dim() != num_spatial + 2:
        return type(module).forward(module, inputs)  # type: ignore[arg-type]
    pads = module._reversed_padding_repeated_twice  # also set for padding="same" and "valid"
    padding = tuple(reversed(pads[::2]))
    if module.padding_mode != "zeros":
        inputs, padding = functional.pad(inputs, pads, mode=module.padding_mode), (0,) * num_spatial
    operation = _Convolution(module.stride, padding, module.dilation, module.groups)
    outputs: Tensor = _Deferred.apply(sink, operation, _autocast(inputs), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return outputs


def _embedding(module: nn.Embedding, sink: Sink, inputs: Tensor) -> Tensor:
    if not _is_plain(inputs, module.weight):
        return nn.Embedding.forward(module, inputs)
    padding_index = -1 if module.padding_idx is None else module.padding_idx
    operation = _Embedding(padding_index, module.scale_grad_by_freq)
    outputs: Tensor = _Deferred.apply(sink, operation, inputs, module.weight, None)  # type: ignore[no-untyped-call]
    return outputs


_CALLS: dict[type[nn.Module], Any] = {  # exact types: a subclass may do anything in its forward
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
}
