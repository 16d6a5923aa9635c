"""Products: the weight gradients of large linear layers, of several microbatches in one product.

A weight's gradient is the product of what came back and what went in, a row each sample (or token). With a
microbatch's few rows it reads and writes the whole gradient for little arithmetic, and autograd goes through
it once more to add it up. So the rows of several microbatches are kept (`deferred`) until there are enough
of them, and one product adds to `.grad` in place. Kept are at most ENOUGH_ROWS and one microbatch's, no more
than twice the weight. Not for schedules that keep versions: a version has leaves of its own.
Invariant: after a backward that it is told is final no row is left, and where its hooks run a weight's
gradient is complete; else rows wait for `multiply_all`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridpipe.stage.deferred import Deferring, Use

# A product over n rows takes 2 n operations an element of the weight, and 20 bytes of memory traffic. A core
# does the operations of 50 rows while it moves these bytes; so few rows more than these save nothing more.
ENOUGH_ROWS = 256
LEAST_ELEMENTS = 2**18  # a smaller weight stays in the cache, and calls cost more than it
LEAST_SIDE = 256  # with a shorter one the rows weigh more than the weight


class WeightGradients:
    """A stage's rows that are not multiplied yet.

    A weight that stands in two modules is left to autograd, and so is one whose gradient someone watches.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        uses = Counter(parameter for module in layers.modules() for parameter in module._parameters.values())
        watched = {parameter for parameter in layers.parameters() if parameter._post_accumulate_grad_hooks}

        def is_wanted(module: nn.Module) -> bool:
            weight = module._parameters.get("weight")  # missing where the module is parametrised
            return weight is not None and _is_large(module) and uses[weight] == 1 and weight not in watched

        self.deferring = Deferring(layers, is_wanted)
        self._layers = layers
        self.most_bytes = 0  # that were kept at once
        self.fewest_rows = 0  # of a microbatch, and one weight; 0: none were kept
        self._kept: dict[Tensor, list[Use]] = {}
        self._joined: dict[Tensor, bool] = {}
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """No layer is large enough."""
        return not self.deferring.candidates

    @property
    def has_rows(self) -> bool:
        """Rows are waiting to be multiplied."""
        return bool(self._kept)

    def joins(self, weight: Tensor, num_rows: int) -> bool:
        """A microbatch of enough rows is left to autograd, whose function has less to do (docs/log).

        A minibatch's first microbatch decides for all: else one that goes to autograd, at the end, would find
        rows of a shorter one before it left behind when the weight's hooks run.
        """
        return self._joined.setdefault(weight, num_rows < ENOUGH_ROWS)

    def add(self, use: Use, is_last: bool) -> None:
        """Keep a microbatch's rows. `is_last`: none follow before the gradient is used."""
        if sum(len(each.gradient) for each in self._kept.get(use.weight, ())) >= ENOUGH_ROWS:
            self._multiply(use.weight)  # only now: the last of a minibatch may wait for a better moment
        kept = self._kept.setdefault(use.weight, [])
        if self._may_change(use.inputs) or use.inputs.untyped_storage().nbytes() > 2 * use.inputs.nbytes:
            use = use._replace(inputs=use.inputs.clone())  # or a view would keep all of what it looks at
        kept.append(use)
        self._num_bytes += _num_bytes(use)
        self.most_bytes = max(self.most_bytes, self._num_bytes)
        if is_last:
            self._multiply(use.weight)

    def _may_change(self, inputs: Tensor) -> bool:
        """A layer may update its buffers in the next microbatch's forward."""
        start = inputs.untyped_storage().data_ptr()
        return any(buffer.untyped_storage().data_ptr() == start for buffer in self._layers.buffers())

    @property
    def max_batched(self) -> int:
        """Microbatches of the largest product, by the weight that had the fewest rows; 0: there was none."""
        return math.ceil(ENOUGH_ROWS / self.fewest_rows) if self.fewest_rows else 0

    def note_rows(self, counts: Iterable[int]) -> None:
        """What a microbatch has kept of each weight."""
        self.fewest_rows = min(filter(None, (self.fewest_rows, *counts)), default=0)

    def multiply_all(self) -> None:
        """Leave no row behind."""
        for weight in list(self._kept):
            self._multiply(weight)
        self._joined.clear()

    def _multiply(self, weight: Tensor) -> None:
        uses = self._kept.pop(weight)
        self._num_bytes -= sum(map(_num_bytes, uses))
        gradient, inputs = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in ([use.gradient for use in uses], [use.inputs for use in uses])
        )
        with torch.no_grad():
            if weight.grad is None:
                weight.grad = torch.mm(gradient.t(), inputs).to(weight.dtype)
            elif gradient.dtype == inputs.dtype == weight.dtype:
                weight.grad.addmm_(gradient.t(), inputs)
            else:  # under autocast
                weight.grad += torch.mm(gradient.t(), inputs)


class MicrobatchRows:
    """One microbatch's way into the products."""

    takes_biases = False
    weights = None  # the layers are called with their own

    def __init__(self, products: WeightGradients) -> None:
        self._products = products
        self._is_final = self.collecting = False
        self._rows: Counter[Tensor] = Counter()

    @contextmanager
    def collected(self, is_final: bool) -> Iterator[None]:
        """Around the backward. `is_final`: after it all gradients are to be complete."""
        self.collecting, self._is_final = True, is_final
        try:
            yield
        finally:
            self.collecting = False

    def takes(self, weight: Tensor, num_rows: int) -> bool:
        """Where joining saves anything."""
        return self._products.joins(weight, num_rows)

    def note(self, use: Use) -> None:
        """Keep the rows, or multiply.

        Autograd (of torch 2.13) runs the weight's hooks behind its last use, though it has no gradient of its
        own to add: they find a complete one, and the all-reduce begins in time.
        """
        self._rows[use.weight] += len(use.gradient)
        self._products.add(use, is_last=self._is_final)

    def finish(self) -> None:
        """After the backward: where it was the final one, what had no use in it."""
        self._products.note_rows(self._rows.values())
        if self._is_final:
            self._products.multiply_all()


def _is_large(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.numel() >= LEAST_ELEMENTS
        and min(module.weight.shape) >= LEAST_SIDE
        and not module.weight._backward_hooks
    )


def _num_bytes(use: Use) -> int:
    return use.gradient.nbytes + use.inputs.nbytes
