"""Split backward: a microbatch's backward in two halves, gradients of the inputs and then of the weights.

Knows one microbatch of one stage. Invariant: a parameter gets one gradient a microbatch, in the second half.
Source: zero-bubble pipelines (Qi et al., ICLR 2024).
"""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hybridpipe.stage.deferred_wgrad import Use
from hybridpipe.stage.weights import Weights, hand_over


class WeightHalf:
    """The second half of one microbatch's backward, which computes the deferred weight gradients.

    Layers that cannot defer produce weight gradients in the first half. Each parameter is therefore replaced
    by a stand-in, a leaf that shares its storage and holds such gradients until the second half. So the
    parameter's hooks run once.

    Args:
        weights: the leaves that receive the gradients in the second half.
    """

    takes_biases = True

    def __init__(self, weights: Weights) -> None:
        leaves = dict.fromkeys(leaf for layer in weights for leaf in layer.values() if leaf.requires_grad)
        stand_ins = {leaf: leaf.detach().requires_grad_() for leaf in leaves}
        self._leaf_of = {stand_in: leaf for leaf, stand_in in stand_ins.items()}
        self._uses: deque[Use] = deque()
        self.collecting = False
        # The layers are called with these.
        self.weights: Weights = [
            {name: stand_ins.get(leaf, leaf) for name, leaf in layer.items()} for layer in weights
        ]

    @contextmanager
    def collected(self, is_final: bool = False) -> Iterator[None]:
        """Run the first half inside this context: it defers weight gradients to `finish`."""
        self.collecting = True
        try:
            yield
        finally:
            self.collecting = False

    def takes(self, _: Tensor, num_rows: int) -> bool:
        """Return True: every weight gradient is deferred."""
        return True

    def note(self, use: Use) -> None:
        """Defer the gradients of a weight and its bias to `finish`."""
        self._uses.append(use)

    @property
    def num_bytes(self) -> int:
        """Bytes kept until `finish`: what the deferred gradients are computed from, and the others."""
        tensors = [tensor for use in self._uses for tensor in (use.inputs, use.gradient)]
        storages = (tensor.untyped_storage() for tensor in tensors)
        others = sum(stand_in.nbytes for stand_in in self._leaf_of if stand_in.grad is not None)
        return others + sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def finish(self) -> None:
        """Compute the deferred gradients; each leaf gets its gradient as soon as all uses are added."""
        missing = Counter(stand_in for use in self._uses for stand_in in _trained(use))
        while self._uses:
            use = self._uses.popleft()  # its memory is freed at the end of this iteration
            for stand_in in _trained(use):
                _add(stand_in, _part(use, stand_in))
                missing[stand_in] -= 1
                if not missing[stand_in]:
                    self._arrive(stand_in)
            del use
        for stand_in in reversed(list(self._leaf_of)):  # gradients of the first half
            if stand_in.grad is not None:
                self._arrive(stand_in)
        self._leaf_of.clear()

    def _arrive(self, stand_in: Tensor) -> None:
        assert stand_in.grad is not None
        gradients, stand_in.grad = [stand_in.grad], None
        hand_over(gradients, [self._leaf_of[stand_in]])


def _add(stand_in: Tensor, part: Tensor) -> None:
    stand_in.grad = part if stand_in.grad is None else part + stand_in.grad  # grad may be sparse


def _trained(use: Use) -> list[Tensor]:
    return [use.weight] if use.bias is None else [use.weight, use.bias]


def _part(use: Use, stand_in: Tensor) -> Tensor:
    if stand_in is use.weight:
        weight = use.weight.detach().to(use.gradient.dtype)
        part = use.operation.weight_gradient(use.gradient, use.inputs, weight)
    else:
        part = use.operation.bias_gradient(use.gradient)
    return part.to(stand_in.dtype)  # autocast computes in another dtype
