"""SyncBatchNorm: a stage's BatchNorm layers normalise the microbatches of neighbouring replicas together.

Knows modules and an exchange among replicas; no plan. A module stays what it is: while a stage runs, its own
forward meets another `batch_norm` than torch's. Source: Zhang et al., CVPR 2018 (MegDet, section 3.2).
Invariant: replicas add up the same sums in the same order, which the first pass of each kind checks; one
without a microbatch follows the first replica's announcements.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpipe.errors import UserError
from hybridpipe.torch_private import AnyBatchNorm, verify_batch_size

_END, _FORWARD, _AGAIN, _BACKWARD = range(4)  # kinds of places
_Forward = Callable[..., Tensor]


class ReplicaSums(Protocol):
    """Exchanges tensors among the replicas that normalise together (`comm.sums`).

    Args:
        size: their number.
        bytes_sent: of this replica's tensors so far.
    """

    size: int
    bytes_sent: int

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all replicas' tensors."""

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return the first replica's tensor."""


class _Place(NamedTuple):
    """A sum's place in a pass, or a pass's end.

    Args:
        number: of the layer; of an end the kind of its pass, which is that of its first places.
        num_dimensions: of the layer's input; of an end 0.
    """

    kind: int
    number: int
    num_dimensions: int = 0


class _Norm(NamedTuple):
    """A BatchNorm layer, and what its module does in place of this."""

    path: str
    module: AnyBatchNorm

    @property
    def own_forward(self) -> _Forward:
        """The module's forward; a SyncBatchNorm's own would ask torch.distributed."""
        is_torchs = type(self.module).forward is nn.SyncBatchNorm.forward
        if is_torchs and "forward" not in vars(self.module):
            return partial(AnyBatchNorm.forward, self.module)
        forward: _Forward = self.module.forward
        return forward


class SyncBatchNorms:
    """The BatchNorm layers of a stage, whose statistics are those of several replicas' microbatches.

    Args:
        module: the stage's layers.
        sums: an exchange among these replicas, which nothing else uses.
    """

    def __init__(self, module: nn.Module, sums: ReplicaSums) -> None:
        named = module.named_modules()
        self._norms = [_Norm(path, each) for path, each in named if isinstance(each, AnyBatchNorm)]
        self._sums, self._num_microbatches = sums, 0
        self._pass, self._calls, self._is_announced = _END, list[_Place](), False
        self._told: _Place | None = None  # announced, and not yet summed
        self._is_inside = False  # a layer
        self.renew()

    def renew(self) -> None:
        """Forget which sums passes make, since modes of the layers may have changed."""
        self._orders: dict[int, list[_Place]] = {}  # of the first pass of each kind

    @property
    def bytes_sent(self) -> int:
        """Bytes of sums so far."""
        return self._sums.bytes_sent

    def begin(self, num_microbatches: int) -> None:
        """Begin a minibatch of that many microbatches."""
        self._num_microbatches = num_microbatches

    @contextmanager
    def forward(self, microbatch: int, again: bool) -> Iterator[None]:
        """Let the layers normalise together inside this context, which runs a microbatch's forward.

        Args:
            again: it has run before, and its backward follows.

        Raises:
            UserError: it calls other layers than the forwards before or those of other replicas, or
                normalises outside of them.
        """
        kind = _AGAIN if again else _FORWARD
        self._begin_pass(microbatch, kind)
        others = nullcontext() if kind in self._orders else _InPlaceOfTorchs(self._refuse_outside)
        own = [partial(self._call, i, norm.own_forward) for i, norm in enumerate(self._norms)]
        with self._calling(own), others:
            yield
        if not again:
            self._end_pass()

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Let gradients be those of a common normalisation inside this context, which runs a backward.

        Raises:
            UserError: it calls a layer, as an activation checkpoint does.
        """
        if self._pass != _AGAIN:
            self._begin_pass(microbatch, _BACKWARD)
        with self._calling([partial(_refuse_call, norm, norm.own_forward) for norm in self._norms]):
            yield
        self._end_pass()

    def join(self) -> None:
        """Take part in a pass of the other replicas, without a microbatch."""
        self._pass, self._calls, self._is_announced = _END, [], True
        while (told := self._announced(_Place(_END, _END))).kind != _END:
            self._told = told
            if told.kind == _FORWARD:
                self._join_forward(told)
            else:
                self._sum(told, torch.zeros(self._width(told), dtype=torch.float64))
        self._orders.setdefault(told.number, [*self._calls, told])

    @torch.no_grad()
    def _join_forward(self, place: _Place) -> None:
        """Run a layer's forward without samples, which updates its running statistics as the others do."""
        norm = self._norms[place.number]
        shape = 0, norm.module.num_features, *[1] * (place.num_dimensions - 2)
        tensors = [*norm.module.parameters(recurse=False), *norm.module.buffers(recurse=False)]
        empty = torch.empty(shape, device=tensors[0].device if tensors else None)
        self._call(place.number, norm.own_forward, empty)

    def _width(self, place: _Place) -> int:
        features = self._norms[place.number].module.num_features
        return 2 * features if place.kind == _BACKWARD else 1 + 2 * features

    def _begin_pass(self, microbatch: int, kind: int) -> None:
        first = microbatch - microbatch % self._sums.size
        others_join = first + self._sums.size > self._num_microbatches
        self._pass, self._calls, self._is_announced = kind, [], others_join or kind not in self._orders

    def _end_pass(self) -> None:
        self._go_to(_Place(_END, self._pass))
        self._orders[self._pass], self._pass = self._calls, _END

    @contextmanager
    def _calling(self, forwards: Sequence[_Forward]) -> Iterator[None]:
        """Put these in place of the modules' forwards inside this context."""
        before = [vars(norm.module).get("forward") for norm in self._norms]
        for norm, forward in zip(self._norms, forwards, strict=True):
            vars(norm.module)["forward"] = forward
        try:
            yield
        finally:
            for norm, own in zip(self._norms, before, strict=True):
                del vars(norm.module)["forward"]
                if own is not None:
                    vars(norm.module)["forward"] = own

    def _call(self, number: int, forward: _Forward, *args: Any, **kwargs: Any) -> Tensor:
        """Call a layer's own forward, in which the replicas' samples are normalised together."""
        norm, num_calls = self._norms[number], len(self._calls)
        together = partial(self._batch_norm, number)
        try:
            self._is_inside = True
            with _InPlaceOfTorchs(together) if norm.module.training else nullcontext():
                made = forward(*args, **kwargs)
        finally:
            self._is_inside = False
        if norm.module.training and len(self._calls) == num_calls:
            raise UserError(
                f"the BatchNorm {norm.path} ({type(norm.module).__name__}) does not call torch's batch_norm, "
                "so replicas cannot normalise together: set sync_batchnorm = 1"
            )
        return made

    def _batch_norm(
        self,
        number: int,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Normalise as torch's `batch_norm` does, by the statistics of all replicas' samples."""
        kind = _AGAIN if self._pass == _AGAIN else _FORWARD
        total = self._sum(_Place(kind, number, x.dim()), _moments(x))
        count = float(total[0])
        if count <= 1:
            verify_batch_size(torch.Size([1, *x.shape[1:]]))  # raises torch's own error
        mean, square = (total[1:] / count).chunk(2)
        var = (square - mean * mean).clamp(min=0)
        if running_mean is not None and running_var is not None:
            _update(running_mean, mean, momentum)
            _update(running_var, var * (count / (count - 1)), momentum)
        if not x.numel():
            return x
        add_up = partial(self._sum, _Place(_BACKWARD, number, x.dim()))
        common = _Common(mean, var, count, eps, add_up)
        normalised: Tensor = _Normalise.apply(common, x, weight, bias)  # type: ignore[no-untyped-call]
        return normalised

    def _refuse_outside(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._is_inside:  # a layer in evaluation, which normalises as it likes
            return F.batch_norm(*args, **kwargs)
        raise UserError(
            "the model calls batch_norm outside of a BatchNorm layer, where replicas cannot normalise "
            "together: make it a layer, such as nn.BatchNorm2d, or set sync_batchnorm = 1"
        )

    def _sum(self, place: _Place, numbers: Tensor) -> Tensor:
        """Return the sum of the replicas' numbers, in float64 on the CPU."""
        self._go_to(place)
        return self._sums.sum(numbers.to("cpu", torch.float64))

    def _go_to(self, place: _Place) -> None:
        """Go to the next place; UserError unless it is that of passes before and of the first replica."""
        order = self._orders.get(self._pass)
        expected = place if order is None else order[len(self._calls)]
        if expected == place and self._is_announced:
            expected, self._told = self._told or self._announced(place), None
        if expected != place:
            raise UserError(
                "with sync_batchnorm all microbatches must call the BatchNorm layers of a stage in one "
                f"order: one calls {self._name(place)} where another calls {self._name(expected)}"
            )
        self._calls.append(place)

    def _announced(self, place: _Place) -> _Place:
        """Return the place that the first replica announces; this one's own if it is the first."""
        return _Place(*self._sums.from_first(torch.tensor(place)).tolist())

    def _name(self, place: _Place) -> str:
        return "none" if place.kind == _END else self._norms[place.number].path


class _InPlaceOfTorchs(TorchFunctionMode):
    """Calls a function in place of torch's `batch_norm` inside this context."""

    def __init__(self, batch_norm: Callable[..., Tensor]) -> None:
        super().__init__()
        self._batch_norm = batch_norm

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_training = function is F.batch_norm and (kwargs or {}).get("training")
        return (self._batch_norm if is_training else function)(*args, **(kwargs or {}))


class _Common(NamedTuple):
    """The statistics of all replicas' samples.

    Args:
        mean, var: of each channel, in float64 on the CPU.
        num_values: of each channel.
        add_up: sums numbers of the backward over the replicas.
    """

    mean: Tensor
    var: Tensor
    num_values: float
    eps: float
    add_up: Callable[[Tensor], Tensor]

    def like(self, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance as torch's kernels want them."""
        dtype = _accurate(x.dtype) if weight is None else weight.dtype
        return self.mean.to(x.device, dtype), self.var.to(x.device, dtype)


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, whose own gradients go to all replicas' samples."""

    @staticmethod
    def forward(ctx: Any, common: _Common, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.common = common
        ctx.save_for_backward(x, weight)
        return F.batch_norm(x, *common.like(x, weight), weight, bias, False, 0.0, common.eps)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), common = ctx.saved_tensors, ctx.common
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, *common.like(x, weight), None, None, False, common.eps, [True] * 3
        )
        if ctx.needs_input_grad[1]:
            sums = common.add_up(torch.cat([of_bias, of_weight]))
            of_x = _through_statistics(of_x, x, weight, common, sums)
        made = None, of_x, of_weight, of_bias
        return tuple(
            each if wanted else None for each, wanted in zip(made, ctx.needs_input_grad, strict=True)
        )


def _through_statistics(
    of_x: Tensor, x: Tensor, weight: Tensor | None, common: _Common, sums: Tensor
) -> Tensor:
    """Return the gradient of x, which is given for fixed statistics: mean and variance depend on it as well.

    Args:
        sums: of the outputs' gradients, and of these times the normalised x, over all replicas.
    """
    scale = (common.var + common.eps).rsqrt()
    of_bias, of_weight = sums.chunk(2)
    factor = scale / common.num_values * (1.0 if weight is None else weight.to("cpu", torch.float64))
    numbers = torch.stack([common.mean, factor * of_bias, factor * scale * of_weight])
    mean, constant, slope = numbers.to(x.device, _accurate(x.dtype)).view(3, 1, -1, *[1] * (x.dim() - 2))
    made: Tensor = of_x - constant - (x - mean) * slope
    return made.to(of_x.dtype)


def _moments(x: Tensor) -> Tensor:
    """Return the count of each channel's values, their sums and those of their squares, in float64.

    Means and variances are torch's, which cancel nothing; float64 has room for what squares of means lose.
    """
    if not x.numel():
        return torch.zeros(1 + 2 * x.shape[1], dtype=torch.float64)
    others = [0, *range(2, x.dim())]
    moments = torch.var_mean(x.detach().to(_accurate(x.dtype)), others, correction=0)
    var, mean = torch.stack(moments).to("cpu", torch.float64)
    count = x.numel() // x.shape[1]
    return torch.cat([torch.ones(1, dtype=torch.float64), mean, var + mean * mean]) * count


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def _update(running: Tensor, new: Tensor, momentum: float) -> None:
    running.copy_((1 - momentum) * running + momentum * new.to(running))


def _refuse_call(norm: _Norm, forward: _Forward, *args: Any, **kwargs: Any) -> Tensor:
    if not norm.module.training:
        return forward(*args, **kwargs)
    raise UserError(
        f"the BatchNorm {norm.path} is called outside of its stage's forward, as an activation checkpoint "
        "does: let the stage recompute (recompute = true) in its place"
    )
