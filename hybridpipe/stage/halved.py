"""Halved: a microbatch's backward in two halves, the inputs' gradients and the weights' gradients.

While a stage that splits its backward runs, its linear, convolution and embedding layers go through an
autograd function that computes the input's gradient in the backward and notes (input, gradient of the
output) for later. The note shares the memory that was saved anyhow. Gradients that come with the first half
all the same, those of the other layers, wait in stand-ins: every parameter is stood in for by a leaf that
shares its storage, so that it gets one gradient a microbatch, in the second half, and its hooks run once.
Source: zero-bubble pipelines (Qi et al., ICLR 2024).
"""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpipe.stage.weights import Weights


class _Operation(Protocol):
    """output = operation(inputs, weight, bias), linear in the weight."""

    def output(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor: ...

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor: ...

    def bias_gradient(self, gradient: Tensor) -> Tensor: ...


class _Linear:
    """Shapes: inputs (n, in), weight (out, in), gradient (n, out)."""

    def output(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(inputs, weight, bias)

    def input_gradient(self, gradient: Tensor, _: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight.conj()

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, _: Tensor) -> Tensor:
        return gradient.t() @ inputs.conj()

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum(0)


class _Convolution(NamedTuple):
    """Shapes: inputs (n, in, *space), weight (out, in / groups, *kernel), gradient (n, out, *space)."""

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
        """What autograd calls for a convolution, with its own choice of outputs."""
        not_transposed = (False, (0,) * len(self.stride))
        options = (self.stride, self.padding, self.dilation, *not_transposed, self.groups)
        result: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, *options, wanted
        )
        return result


class _Embedding(NamedTuple):
    """Shapes: inputs (*any) of integers, weight (entries, size), gradient (*any, size)."""

    padding_index: int  # -1: none
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


class _Use(NamedTuple):
    """One use of a weight, whose backward's second half is still to come."""

    operation: _Operation
    inputs: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None


class WeightHalf:
    """The second half of one microbatch's backward.

    Args:
        weights: on these leaves the gradients arrive in the end.
    """

    def __init__(self, weights: Weights) -> None:
        leaves = dict.fromkeys(leaf for layer in weights for leaf in layer.values() if leaf.requires_grad)
        stand_ins = {leaf: leaf.detach().requires_grad_() for leaf in leaves}
        self._leaf_of = {stand_in: leaf for leaf, stand_in in stand_ins.items()}
        self._uses: deque[_Use] = deque()
        self.collecting = False
        # What the layers are to be called with.
        self.weights: Weights = [
            {name: stand_ins.get(leaf, leaf) for name, leaf in layer.items()} for layer in weights
        ]

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Around the first half: a weight's gradient is left for `finish`."""
        self.collecting = True
        try:
            yield
        finally:
            self.collecting = False

    def note(self, use: _Use) -> None:
        """Leave a weight's gradient, and its bias's, for `finish`."""
        self._uses.append(use)

    def finish(self) -> None:
        """Compute what is left; each leaf gets its gradient as soon as its last part is there."""
        missing = Counter(stand_in for use in self._uses for stand_in in _trained(use))
        sums: dict[Tensor, Tensor] = {}
        while self._uses:
            use = self._uses.popleft()  # its memory goes at the end of the turn
            for stand_in in _trained(use):
                part = _part(use, stand_in)
                sums[stand_in] = sums[stand_in] + part if stand_in in sums else part
                missing[stand_in] -= 1
                if not missing[stand_in]:
                    self._arrive(stand_in, sums.pop(stand_in))
            del use
        for stand_in in reversed(list(self._leaf_of)):  # those that came with the first half
            if stand_in.grad is not None:
                self._arrive(stand_in, None)
        self._leaf_of.clear()

    def _arrive(self, stand_in: Tensor, gradient: Tensor | None) -> None:
        first_half, stand_in.grad = stand_in.grad, None
        if gradient is None:
            gradient = first_half
        elif first_half is not None:
            gradient = gradient + first_half
        assert gradient is not None
        torch.autograd.backward([self._leaf_of[stand_in]], [gradient])  # so that hooks run as always


def _trained(use: _Use) -> list[Tensor]:
    return [use.weight] if use.bias is None else [use.weight, use.bias]


def _part(use: _Use, stand_in: Tensor) -> Tensor:
    if stand_in is use.weight:
        weight = use.weight.detach().to(use.gradient.dtype)
        part = use.operation.weight_gradient(use.gradient, use.inputs, weight)
    else:
        part = use.operation.bias_gradient(use.gradient)
    return part.to(stand_in.dtype)  # autocast computes in another one


class Halves:
    """Which of a stage's modules can have their backward split, and how they are made to."""

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers
        # torch.compile would compile a module anew for each microbatch's forward
        compiled = {part for module in layers.modules() if _is_compiled(module) for part in module.modules()}
        self._candidates = [
            module for module in layers.modules() if type(module) in _CALLS and module not in compiled
        ]

    def whole(self) -> list[tuple[str, nn.Module]]:
        """The modules with trained parameters whose backward is not split, by their path in the stage."""
        split = {module for module in self._candidates if _splits(module)}
        return [
            (path, module)
            for path, module in self._layers.named_modules()
            if module not in split and any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    @contextmanager
    def noting(self, half: WeightHalf) -> Iterator[None]:
        """While a stage's layers run, or autograd runs them again, let them leave notes in `half`."""
        changed = [module for module in self._candidates if _splits(module)]
        try:
            for module in changed:
                vars(module)["forward"] = partial(_CALLS[type(module)], module, half)
            yield
        finally:
            for module in changed:
                del vars(module)["forward"]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _splits(module: nn.Module) -> bool:
    """Not where it is parametrised (the weight is then no parameter), or where someone else watches it."""
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
    """What the operations here are written for; anything else takes the module's own forward."""
    return (
        type(inputs) in (Tensor, nn.Parameter)
        and inputs.layout == torch.strided
        and not (inputs.is_nested or inputs.is_complex() or weight.is_complex())
        and not torch._C._are_functorch_transforms_active()
    )


class _Halved(torch.autograd.Function):
    """An operation whose weight's gradient can be left for later."""

    @staticmethod
    def forward(
        ctx: Any, half: WeightHalf, operation: _Operation, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.half, ctx.operation, ctx.weight, ctx.bias = half, operation, weight, bias
        ctx.save_for_backward(inputs, weight)
        return operation.output(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        half, operation = ctx.half, ctx.operation
        bias = ctx.bias if ctx.bias is not None and ctx.bias.requires_grad else None
        inputs, weight = ctx.saved_tensors
        weight = weight.to(gradient.dtype)  # another one under autocast
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[2]:
            of_inputs = operation.input_gradient(gradient, inputs, weight)
        # A layer may call autograd within its forward, and may even differentiate what it gets ...
        if not half.collecting or torch.is_grad_enabled():
            of_weight = operation.weight_gradient(gradient, inputs, weight).to(ctx.weight.dtype)
            of_bias = operation.bias_gradient(gradient).to(bias.dtype) if bias is not None else None
        # ... or within its backward, for the gradients of inputs alone.
        elif torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
            half.note(_Use(operation, inputs.detach(), gradient, ctx.weight, bias))
        return None, None, of_inputs, of_weight, of_bias


def _autocast(inputs: Tensor) -> Tensor:
    """As autocast would hand them to a linear or convolution; those cast their weights themselves."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind) and inputs.is_floating_point() and inputs.dtype != torch.float64:
        return inputs.to(torch.get_autocast_dtype(kind))
    return inputs


def _linear(module: nn.Linear, half: WeightHalf, inputs: Tensor) -> Tensor:
    if not _is_plain(inputs, module.weight):
        return nn.Linear.forward(module, inputs)
    # Two-dimensional inside: an output that is a view made in there could not be changed in place.
    rows = inputs[None] if inputs.dim() == 1 else inputs.flatten(end_dim=-2)
    outputs: Tensor = _Halved.apply(half, _Linear(), _autocast(rows), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return outputs if inputs.dim() == 2 else outputs.view(*inputs.shape[:-1], outputs.shape[-1])


_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def _convolution(module: _Conv, half: WeightHalf, inputs: Tensor) -> Tensor:
    num_spatial = len(module.kernel_size)
    if not _is_plain(inputs, module.weight) or inputs.dim() != num_spatial + 2:
        return type(module).forward(module, inputs)  # type: ignore[arg-type]
    pads = module._reversed_padding_repeated_twice  # also where the padding was given as a word
    padding = tuple(reversed(pads[::2]))
    if module.padding_mode != "zeros":
        inputs, padding = functional.pad(inputs, pads, mode=module.padding_mode), (0,) * num_spatial
    operation = _Convolution(module.stride, padding, module.dilation, module.groups)
    outputs: Tensor = _Halved.apply(half, operation, _autocast(inputs), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return outputs


def _embedding(module: nn.Embedding, half: WeightHalf, inputs: Tensor) -> Tensor:
    if not _is_plain(inputs, module.weight):
        return nn.Embedding.forward(module, inputs)
    padding_index = -1 if module.padding_idx is None else module.padding_idx
    operation = _Embedding(padding_index, module.scale_grad_by_freq)
    outputs: Tensor = _Halved.apply(half, operation, inputs, module.weight, None)  # type: ignore[no-untyped-call]
    return outputs


_CALLS: dict[type[nn.Module], Any] = {  # exact types: a subclass may do anything in its forward
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
}
