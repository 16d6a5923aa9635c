"""Measure: from a model and one microbatch to its profile, on stock PyTorch.

The model runs as single-layer stages, all layers forward and then all backward, as training would; each
layer's figure is what it typically takes over many repetitions. What it costs to run a layer by itself
(Python included) is thereby in the figure. Copies are measured, so model and data stay as they were. Ranks
that measure at once, each its own copy, do equally many repetitions; how they agree is not known here.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hybridpipe.measure.stopwatch import Stopwatch, Took
from hybridpipe.model.rng import preserved_state
from hybridpipe.model.sequential import copied, num_layers, stage_module
from hybridpipe.model.tensors import TensorTree, map_tensors, norms, tensors_of
from hybridpipe.optim.fused import fused
from hybridpipe.planning.profile import JoinedProducts, LayerProfile, Measurement, ModelProfile
from hybridpipe.stage.stage import Stage, received
from hybridpipe.types import Agree, Loss, OptimizerFactory

_Key = TypeVar("_Key", bound=Hashable)

# Warm-up lets allocators and oneDNN settle. A repetition is of as many passes as it takes to see many time
# slices of the kernel, which are some milliseconds. The budget keeps big models from taking minutes.
WARM_UP = 2
REPETITION_SECONDS = 0.04
MIN_REPEATS, MAX_REPEATS = 3, 16
BUDGET_SECONDS = 4.0
NUM_JOINED = 4  # microbatches in the largest product that is measured


def measure(
    model: nn.Module,
    inputs: TensorTree,
    targets: TensorTree,
    loss: Loss,
    optimizer: OptimizerFactory | None = None,
    device: torch.device | None = None,
    agree: Agree = float,
    sizes: Sequence[int] = (),
) -> ModelProfile:
    """Measure every layer on one microbatch; see `Rehearsal`."""
    return Rehearsal(copied(model), inputs, targets, loss, device).measure(optimizer, agree, sizes)


class Rehearsal:
    """A model's layers and a copy of one microbatch to run through them.

    Args:
        model: a copy (`copied`), as running it changes its buffers.
        inputs, targets: one microbatch, samples in the first dimension.
        loss: counted with the last layer.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: TensorTree,
        targets: TensorTree,
        loss: Loss,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        count = num_layers(model)
        self.stages, self.halving = (
            [
                Stage(
                    stage_module(model, i, i + 1),
                    self.device,
                    loss=loss if i + 1 == count else None,
                    split_backward=halves,
                    check_loss=False,
                )
                for i in range(count)
            ]
            for halves in (False, True)
        )
        self.names = [stage.layers.names[0] for stage in self.stages]
        self.inputs, self.targets = (  # copies, as the first layer may work in place
            map_tensors(lambda tensor: tensor.to(self.device, copy=True), value)
            for value in (inputs, targets)
        )

    def run(self) -> None:
        """One forward and one backward of the microbatch."""
        with self._at_work() as watch:
            _pass(self.stages, _Microbatch(self.inputs, self.targets), watch, {})

    @contextmanager
    def _at_work(self) -> Iterator[Stopwatch]:
        """Around what runs the layers, which seed the process's generators."""
        with preserved_state(self.device, python_too=True), closing(Stopwatch(self.device)) as watch:
            yield watch

    def _first(self, size: int | None) -> "_Microbatch":
        """So many samples; None: all."""
        inputs, targets = (
            map_tensors(lambda tensor: tensor[:size], value) for value in (self.inputs, self.targets)
        )
        return _Microbatch(inputs, targets)

    def measure(
        self,
        optimizer: OptimizerFactory | None = None,
        agree: Agree = float,
        sizes: Sequence[int] = (),
    ) -> ModelProfile:
        """What each layer takes, keeps and passes on.

        Args:
            optimizer: its step over each layer's parameters is measured too, and the weight of its state.
            agree: with the other ranks that measure at once.
            sizes: of the microbatch, in samples, no more than there are; the figures of the first one are the
                profile's own, the rest are its `others`. By default there is one, all samples.
        """
        stages = self.stages
        microbatches = [self._first(size) for size in sizes] or [self._first(None)]
        with self._at_work() as watch:
            num_bytes = [_measure_bytes(stages, each) for each in microbatches]
            seconds = _typical(
                [partial(_passes, stages, self.halving, each, watch) for each in microbatches], agree
            )
            crossing: dict[int, list[bool]] = {}
            _pass(stages, microbatches[0], watch, crossing)  # which finds out what gets a gradient
            in_between = partial(_pass, stages, microbatches[0], watch, crossing)
            updates, state_bytes = _measure_updates(stages, optimizer, in_between, watch, agree)
        parameter_bytes = [
            _bytes(p for p in stage.module.parameters() if p.requires_grad) for stage in stages
        ]
        first, *others = (
            Measurement(
                len(tensors_of(microbatch.inputs)[0]),
                tuple(
                    _layer_profile(name, i, took, microbatch.joining[i], parameter_bytes[i], layer_bytes)
                    for i, (name, layer_bytes) in enumerate(zip(self.names, of_layers, strict=True))
                ),
            )
            for microbatch, took, of_layers in zip(
                microbatches, ({**each, **updates} for each in seconds), num_bytes, strict=True
            )
        )
        return ModelProfile(
            layers=first.layers,
            samples=first.samples,
            others=tuple(others),
            device=str(self.device),
            dtype=_dtype(stages, self.inputs),
            state_factor=state_bytes / sum(parameter_bytes) if sum(parameter_bytes) else 0.0,
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )


class _LayerBytes(NamedTuple):
    """What a layer keeps for its backward, passes on, and gets back for that."""

    activation: int
    output: int
    gradient: int


class _Joining(NamedTuple):
    """What a layer's products of several microbatches were seen to join and to keep back."""

    microbatches: int  # in a product at most; 0: none are joined
    kept_bytes: int

    @property
    def num_measured(self) -> int:
        """Microbatches of the product that is measured."""
        return min(self.microbatches, NUM_JOINED)


@dataclass
class _Microbatch:
    """What the layers are measured on, and, once they ran, what of it they join."""

    inputs: TensorTree
    targets: TensorTree
    joining: list[_Joining] = field(default_factory=list)


def _layer_profile(
    name: str,
    i: int,
    seconds: Mapping[tuple[str, int], float],
    joining: _Joining,
    parameter_bytes: int,
    num_bytes: _LayerBytes,
) -> LayerProfile:
    forward = seconds["forward", i]
    of_inputs = None
    if parameter_bytes:  # halves take a little more in the forward, too
        of_inputs = max(0.0, seconds["inputs' half", i] + seconds["forward to halves", i] - forward)
    return LayerProfile(
        name=name,
        forward_seconds=forward,
        backward_seconds=seconds["backward", i],
        parameter_bytes=parameter_bytes,
        output_bytes=num_bytes.output,
        activation_bytes=num_bytes.activation,
        update_seconds=seconds.get(("update", i), 0.0),
        gradient_bytes=num_bytes.gradient,
        weight_seconds=seconds["weights' half", i] if parameter_bytes else 0.0,
        input_seconds=of_inputs,
        accumulate_seconds=_accumulating(seconds, i) if parameter_bytes else 0.0,
        joined=_joined_products(joining, seconds, i),
    )


def _typical(samplers: Sequence[Callable[[], Mapping[_Key, Took]]], agree: Agree) -> list[dict[_Key, float]]:
    """What each figure of each sampler typically is, in seconds.

    In turns, repetition by repetition: a machine whose speed changes meanwhile (by 1.6 times within seconds
    was seen) would make one microbatch size look cheaper than another.
    """
    lengths, counts = [], []
    for sample in samplers:
        for _ in range(WARM_UP):
            began = time.perf_counter()
            sample()
        slowest = agree(time.perf_counter() - began)
        lengths.append(math.ceil(REPETITION_SECONDS / slowest))
        affordable = int(BUDGET_SECONDS / (lengths[-1] * slowest))
        counts.append(min(MAX_REPEATS, max(MIN_REPEATS, affordable)))
    samples: list[list[Mapping[_Key, Took]]] = [[] for _ in samplers]
    turns = sorted(((n + 0.5) / count, i) for i, count in enumerate(counts) for n in range(count))
    for _, i in turns:  # each sampler's are spread evenly over the whole time
        samples[i] += [samplers[i]() for _ in range(lengths[i])]
    return [_middle(own, length) for own, length in zip(samples, lengths, strict=True)]


def _middle(samples: Sequence[Mapping[_Key, Took]], length: int) -> dict[_Key, float]:
    """Typical figures, from repetitions of so many samples.

    Where ranks share cores, a layer waits for a processor now and then, for a time slice that may be longer
    than the layer, and a longer layer waits more often. So the medians of what layers take while they run
    give the proportions, and repetitions of many slices, waiting included, the sum.
    """
    medians = {key: statistics.median(each[key].running_seconds for each in samples) for key in samples[0]}
    totals = [sum(took.seconds for took in each.values()) for each in samples]
    repetitions = sorted(sum(totals[i : i + length]) / length for i in range(0, len(totals), length))
    quarter = len(repetitions) // 4
    middle = repetitions[quarter : len(repetitions) - quarter]
    factor = statistics.mean(middle) / (sum(medians.values()) or 1.0)
    return {key: value * factor for key, value in medians.items()}


def _passes(
    stages: list[Stage], halving: list[Stage], microbatch: _Microbatch, watch: Stopwatch
) -> dict[tuple[str, int], Took]:
    """What every layer takes in one forward and one backward; in the first backward of an update, whose
    gradients are added to none; and in a backward in halves (by `halving`). Where a layer joins the products
    of several microbatches, also in each of NUM_JOINED backwards, and a product of as many, or as many as
    join.

    In turn, so that what else the machine does counts for all; the differences are what the weights'
    gradients take. Notes in the microbatch what was joined.
    """
    crossing: dict[int, list[bool]] = {}

    def backwards() -> list[Took]:
        of_pass = _pass(stages, microbatch, watch, crossing)
        return [of_pass["backward", i] for i in range(len(stages))]

    for stage in stages:
        stage.reset_wgrad_peaks()
    _clear_gradients(stages)
    first = backwards()
    took = _pass(stages, microbatch, watch, crossing)
    halved = _pass(halving, microbatch, watch, crossing)
    for i in range(len(stages)):
        took["first backward", i] = first[i]
        took["forward to halves", i], took["inputs' half", i] = halved["forward", i], halved["backward", i]
        took["weights' half", i] = halved["weights' half", i]
    joining = [(i, stage) for i, stage in enumerate(stages) if stage.can_batch_wgrad]
    if joining:
        _clear_gradients(stages)
        with _joined(stages):
            for n in range(1, NUM_JOINED + 1):
                of_pass = backwards()
                for i, stage in joining:
                    took[f"joined backward {n}", i] = of_pass[i]
                    if n == min(stage.max_batched, NUM_JOINED):
                        began = watch.now()
                        stage.complete_gradients()
                        took["product", i] = watch.since(began)
        for _, stage in joining:
            stage.complete_gradients()
    microbatch.joining = [_Joining(stage.max_batched, stage.max_deferred_bytes) for stage in stages]
    return took


def _accumulating(seconds: Mapping[tuple[str, int], float], layer: int) -> float:
    """What an update's first backward is spared."""
    return max(0.0, seconds["backward", layer] - seconds["first backward", layer])


def _joined_products(
    joining: _Joining, seconds: Mapping[tuple[str, int], float], layer: int
) -> JoinedProducts | None:
    """On the line through a product of one microbatch and one of as many as were measured."""
    count = joining.num_measured
    if not count:
        return None
    leaving = [seconds[f"joined backward {n}", layer] for n in range(1, count + 1)]
    of_several = seconds["product", layer]
    of_one = max(0.0, seconds["weights' half", layer] - _accumulating(seconds, layer))
    a_microbatch = max(0.0, of_several - of_one) / (count - 1) if count > 1 else 0.0
    return JoinedProducts(
        backward_seconds=statistics.mean(leaving),
        product_seconds=max(0.0, of_several - count * a_microbatch),
        microbatch_seconds=a_microbatch,
        microbatches=joining.microbatches,
        kept_bytes=math.ceil(joining.kept_bytes / count),
    )


def _clear_gradients(stages: list[Stage]) -> None:
    for stage in stages:
        stage.module.zero_grad(set_to_none=True)


@contextmanager
def _joined(stages: list[Stage]) -> Iterator[None]:
    """Weight gradients of several passes are made at once."""
    for stage in stages:
        stage.batches_wgrad = True
    try:
        yield
    finally:
        for stage in stages:
            stage.batches_wgrad = False


@contextmanager
def _frozen(stages: list[Stage]) -> Iterator[None]:
    """No parameter requires a gradient."""
    trained = [p for stage in stages for p in stage.module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _pass(
    stages: list[Stage], microbatch: _Microbatch, watch: Stopwatch, crossing: dict[int, list[bool]]
) -> dict[tuple[str, int], Took]:
    """What every layer takes in one forward and one backward, or its first half and, apart, its second.

    Args:
        crossing: which of each layer's outputs get a gradient; filled in where it does not say.
    """
    took = {}
    value = microbatch.inputs
    for i, stage in enumerate(stages):
        began = watch.now()
        if stage.loss is None:
            outputs = stage.forward(0, value, step=0)
            value = _leaves(outputs, crossing.setdefault(i, _require_grad(outputs)))
        else:
            stage.forward_loss(0, value, microbatch.targets, share=1.0, step=0)
        took["forward", i] = watch.since(began)
    gradients: tuple[Tensor | None, ...] = ()
    for i, stage in reversed(list(enumerate(stages))):
        began = watch.now()
        gradients = (stage.backward_input if stage.split_backward else stage.backward)(0, gradients)
        took["backward", i] = watch.since(began)
        if stage.split_backward:  # at once: it keeps less than after all the others' first
            began = watch.now()
            stage.backward_weight(0)
            took["weights' half", i] = watch.since(began)
    return took


def _measure_bytes(stages: list[Stage], microbatch: _Microbatch) -> list[_LayerBytes]:
    """Of each layer. A storage counts where it is first kept."""
    kept: dict[int, Any] = {
        tensor.untyped_storage().data_ptr(): tensor
        for stage in stages
        for tensor in (*stage.module.parameters(), *stage.module.buffers())
    }
    counting = [0]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = tensor  # alive until the end, so that no address is used twice
            counting[-1] += storage.nbytes()
        return tensor

    found = []
    value = microbatch.inputs
    for stage in stages:
        counting.append(0)
        crossing: tuple[Tensor, ...] = ()  # nothing goes on behind the loss
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if stage.loss is None:
                outputs = stage.forward(0, value, step=0)
                value = _leaves(outputs, _require_grad(outputs))
                crossing = tensors_of(outputs)
            else:
                stage.forward_loss(0, value, microbatch.targets, share=1.0, step=0)
        returned = _bytes(tensor for tensor in crossing if tensor.requires_grad)
        found.append(_LayerBytes(counting[-1], _bytes(crossing), returned))
    gradients: tuple[Tensor | None, ...] = ()
    for stage in reversed(stages):
        gradients = stage.backward(0, gradients)
    return found


def _measure_updates(
    stages: list[Stage],
    optimizer: OptimizerFactory | None,
    in_between: Callable[[], object],
    watch: Stopwatch,
    agree: Agree,
) -> tuple[dict[tuple[str, int], float], int]:
    """Seconds of the ("update", layer) of each layer that is trained, and bytes of the optimizer's state.

    Args:
        in_between: goes through the caches between two steps, forward and backward, as training does.
    """
    optimizers, gradients = {}, {}
    for i, stage in enumerate(stages):
        parameters = [p for p in stage.module.parameters() if p.grad is not None]
        if optimizer is not None and parameters:
            gradients[i] = [p.grad for p in parameters if p.grad is not None]
            for gradient in gradients[i]:
                gradient.zero_()  # a step of nothing costs as much, and leaves the copy fit for use
            optimizers[i] = optimizer(parameters)

    def steps() -> dict[tuple[str, int], Took]:
        took = {}
        with _frozen(stages):
            in_between()
        for i, over_layer in optimizers.items():
            began = watch.now()
            norms(gradients[i])  # which tell whether they are numbers
            with fused(over_layer):
                over_layer.step()
            took["update", i] = watch.since(began)
        return took

    updates = _typical([steps], agree)[0] if optimizers else {}
    state_bytes = _bytes(
        value
        for over_layer in optimizers.values()
        for state in over_layer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
    return updates, state_bytes


def _leaves(outputs: TensorTree, require_grad: list[bool]) -> TensorTree:
    return received(map_tensors(lambda tensor: tensor.detach(), outputs), require_grad)


def _require_grad(outputs: TensorTree) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors_of(outputs)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _dtype(stages: list[Stage], inputs: TensorTree) -> str:
    parameters = (parameter for stage in stages for parameter in stage.module.parameters())
    tensor = next(parameters, tensors_of(inputs)[0])
    return str(tensor.dtype).removeprefix("torch.")
