"""Batched wgrad: weight gradients of large linear layers, of several microbatches in one matrix product.

Knows one stage; not for schedules that keep versions, since each version has leaves of its own.
Invariant: after a final backward no row is left, and a weight's hooks run when its gradient is complete.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridpipe.stage.deferred_wgrad import Deferring, Use

# A product over n rows takes 2 n operations an element of the weight and moves 20 bytes. A core does the
# operations of 50 rows while it moves these bytes, so beyond a few times 50 rows nothing more is saved.
ENOUGH_ROWS = 256
# A smaller weight stays in the cache, and Python's work for each use, some 150 µs between two products, costs
# more than is saved: a GPT of width 256 took 9 % longer, an MLP of width 512 5 %.
LEAST_ELEMENTS = 2**20
LEAST_SIDE = 256  # with a shorter side the rows take more memory than the weight


class WeightGradients:
    """The rows of a stage that are not multiplied yet.

    A weight's gradient is the product of the output's gradient and the input, with a row for each sample or
    token. With the few rows of a microbatch, the product reads and writes the whole gradient for little
    arithmetic, and autograd adds it up in a second pass. So the rows of several microbatches are kept, and
    one product adds to `.grad` in place. At most ENOUGH_ROWS and one microbatch's rows are kept, which is no
    more than twice the weight.

    A weight that two modules share, or whose gradient has hooks, is left to autograd.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        uses = Counter(parameter for module in layers.modules() for parameter in module._parameters.values())
        watched = {parameter for parameter in layers.parameters() if parameter._post_accumulate_grad_hooks}

        def is_wanted(module: nn.Module) -> bool:
            weight = module._parameters.get("weight")  # missing where the module is parametrised
            return weight is not None and _is_large(module) and uses[weight] == 1 and weight not in watched

        self.deferring = Deferring(layers, is_wanted)
        self._layers = layers
        self.most_bytes = 0  # peak of the bytes kept at once
        self.fewest_rows = 0  # of one microbatch for one weight; 0: no rows were kept
        self._kept: dict[Tensor, list[Use]] = {}
        self._is_batched: dict[Tensor, bool] = {}
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """True if no layer is large enough."""
        return not self.deferring.candidates

    @property
    def has_rows(self) -> bool:
        """True if rows are waiting to be multiplied."""
        return bool(self._kept)

    def batches(self, weight: Tensor, num_rows: int) -> bool:
        """Return True if the weight's gradients are batched; autograd is faster with enough rows (docs/log).

        A minibatch's first microbatch decides for all. Otherwise a last microbatch that goes to autograd
        would run the weight's hooks while rows of a shorter one are still waiting.
        """
        return self._is_batched.setdefault(weight, num_rows < ENOUGH_ROWS)

    def add(self, use: Use, is_last: bool) -> None:
        """Keep a microbatch's rows; `is_last` means that none follow before the gradient is used."""
        if sum(len(each.gradient) for each in self._kept.get(use.weight, ())) >= ENOUGH_ROWS:
            self._multiply(use.weight)  # not earlier, so that a minibatch's last rows wait for the all-reduce
        kept = self._kept.setdefault(use.weight, [])
        if self._may_change(use.inputs) or use.inputs.untyped_storage().nbytes() > 2 * use.inputs.nbytes:
            use = use._replace(inputs=use.inputs.clone())  # a view would keep its whole storage alive
        kept.append(use)
        self._num_bytes += _num_bytes(use)
        self.most_bytes = max(self.most_bytes, self._num_bytes)
        if is_last:
            self._multiply(use.weight)

    def _may_change(self, inputs: Tensor) -> bool:
        """Return True if the inputs are a buffer, which the next microbatch's forward may update."""
        start = inputs.untyped_storage().data_ptr()
        return any(buffer.untyped_storage().data_ptr() == start for buffer in self._layers.buffers())

    @property
    def max_batched(self) -> int:
        """Microbatches in the largest product, by the weight with the fewest rows; 0 without products."""
        return math.ceil(ENOUGH_ROWS / self.fewest_rows) if self.fewest_rows else 0

    def note_rows(self, counts: Iterable[int]) -> None:
        """Note the number of rows that a microbatch has kept for each weight."""
        self.fewest_rows = min(filter(None, (self.fewest_rows, *counts)), default=0)

    def multiply_all(self) -> None:
        """Multiply all rows that wait."""
        for weight in list(self._kept):
            self._multiply(weight)
        self._is_batched.clear()

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
    """The sink of one microbatch, which hands its rows to `WeightGradients`."""

    takes_biases = False
    weights = None  # the layers are called with their own weights

    def __init__(self, wgrad: WeightGradients) -> None:
        self._wgrad = wgrad
        self._is_final = self.collecting = False
        self._rows: Counter[Tensor] = Counter()

    @contextmanager
    def collected(self, is_final: bool) -> Iterator[None]:
        """Run the backward inside this context; after a final one `finish` completes all gradients."""
        self.collecting, self._is_final = True, is_final
        try:
            yield
        finally:
            self.collecting = False

    def takes(self, weight: Tensor, num_rows: int) -> bool:
        """Return True if batching the weight's gradients saves time."""
        return self._wgrad.batches(weight, num_rows)

    def note(self, use: Use) -> None:
        """Keep the rows, or multiply them in a final backward.

        Autograd (torch 2.13) runs the weight's hooks after its last use even without a gradient of its own.
        The hooks find a complete gradient, so the all-reduce starts in time.
        """
        self._rows[use.weight] += len(use.gradient)
        self._wgrad.add(use, is_last=self._is_final)

    def finish(self) -> None:
        """Multiply, after a final backward, the rows of weights without a use in it."""
        self._wgrad.note_rows(self._rows.values())
        if self._is_final:
            self._wgrad.multiply_all()


def _is_large(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.numel() >= LEAST_ELEMENTS
        and min(module.weight.shape) >= LEAST_SIDE
        and not module.weight._backward_hooks
    )


def _num_bytes(use: Use) -> int:
    return use.gradient.nbytes + use.inputs.nbytes
