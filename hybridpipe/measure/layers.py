"""Profile of a model's layers, measured on one microbatch. Each runs as a stage of its own.

Not known here: ranks and MPI. Ranks that measure at once agree on equal repetitions through `agree`.
Invariant: the model, its gradients and the data are as they were before.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hybridpipe.measure.layer_bytes import LayerBytes, leaves, measure_bytes, require_grad, total_bytes
from hybridpipe.measure.stopwatch import Stopwatch, Took
from hybridpipe.model import tensors
from hybridpipe.model.layers import Layers, layers_of, shared_parameters
from hybridpipe.model.rng import preserved_state
from hybridpipe.model.tensors import TensorTree, Tree, map_tensors, norms, tensors_in
from hybridpipe.optim.fused import fused
from hybridpipe.planning.profile import JoinedProducts, LayerProfile, Measurement, ModelProfile
from hybridpipe.stage.stage import Stage
from hybridpipe.types import Agree, Loss, OptimizerFactory

_Key = TypeVar("_Key", bound=Hashable)

# Warm-up lets allocators and oneDNN settle. A repetition has enough passes to span many time slices of the
# kernel, which last some milliseconds. The budget keeps big models from taking minutes.
WARM_UP = 2
REPETITION_SECONDS = 0.04
MIN_REPEATS, MAX_REPEATS = 3, 16
BUDGET_SECONDS = 4.0
NUM_BATCHED = 4  # microbatches in the largest product that is measured


def measure(
    model: nn.Module,
    inputs: Tree,
    targets: Tree,
    loss: Loss,
    optimizer: OptimizerFactory | None = None,
    device: torch.device | None = None,
    agree: Agree = float,
    sizes: Sequence[int] = (),
) -> ModelProfile:
    """Measure every layer of a copy of the model on one microbatch.

    Args:
        model: any module; the children of an `nn.Sequential` are its layers, others are recorded.
        inputs, targets, loss: as for `Rehearsal`.
        optimizer, agree, sizes: as for `Rehearsal.measure`.
        device: where the layers run; by default the CPU.
    """
    layers = layers_of(model, inputs, loss, targets).copied()
    return Rehearsal(layers, inputs, targets, loss, device).measure(optimizer, agree, sizes)


class Rehearsal:
    """A model's layers as single-layer stages, and a copy of one microbatch to run through them.

    The overhead of running a layer by itself, Python included, is part of each figure, as it is in training.

    Args:
        layers: of a copy of the model (`copied`), because running it changes its buffers.
        inputs, targets: one microbatch; tensors have the samples in the first dimension.
        loss: counted with the last layer.
        device: where the layers run; by default the CPU.
    """

    def __init__(
        self,
        layers: Layers,
        inputs: Tree,
        targets: Tree,
        loss: Loss,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        alone, self.shared = layers.single(), shared_parameters(layers)
        self.why_whole = layers.why_whole
        self.stages, self.split_stages = (
            [
                Stage(
                    layer,
                    self.device,
                    loss=loss if layer is alone[-1] else None,
                    split_backward=split_backward,
                    check_loss=False,
                )
                for layer in alone
            ]
            for split_backward in (False, True)
        )
        self.names = [stage.layers.names[0] or type(stage.module[0]).__name__ for stage in self.stages]
        self.inputs, self.targets = (  # copies, as the first layer may work in place
            map_tensors(lambda tensor: tensor.to(self.device, copy=True), value)
            for value in (inputs, targets)
        )

    def run(self) -> None:
        """Run one forward and one backward of the microbatch."""
        with self._running() as watch:
            _pass(self.stages, self._first(None), watch, {})

    @contextmanager
    def _running(self) -> Iterator[Stopwatch]:
        """Yield a stopwatch; restore the random state afterwards, as layers seed the process's generators."""
        with preserved_state(self.device, python_too=True), closing(Stopwatch(self.device)) as watch:
            yield watch

    def _first(self, size: int | None) -> "_Microbatch":
        """Return the first `size` samples; None: all of them."""
        inputs, targets = (
            map_tensors(lambda tensor: tensor[:size], value) for value in (self.inputs, self.targets)
        )
        for stage in (*self.stages, *self.split_stages):
            stage.layers.form(len(tensors_in(inputs)[0]), lambda: inputs, training=True)
        return _Microbatch(inputs, targets)

    def measure(
        self,
        optimizer: OptimizerFactory | None = None,
        agree: Agree = float,
        sizes: Sequence[int] = (),
    ) -> ModelProfile:
        """Measure the seconds of each layer, the bytes it keeps, and the bytes it passes on.

        Args:
            optimizer: makes an optimizer; its state and its step over each layer's parameters are measured.
            agree: returns the largest of the seconds that the ranks which measure at once give it.
            sizes: microbatch sizes in samples, at most as many as there are. The first size gives the
                profile's own figures, the rest its `others`. By default there is one size, all samples.

        Returns:
            The profile, in seconds and bytes; a second is one of the clock, waiting for a processor included.
        """
        stages = self.stages
        microbatches = [self._first(size) for size in sizes] or [self._first(None)]
        with self._running() as watch:
            num_bytes = [measure_bytes(stages, each.inputs, each.targets) for each in microbatches]
            seconds = _typical(
                [partial(_passes, stages, self.split_stages, each, watch) for each in microbatches], agree
            )
            crossing: dict[int, list[bool]] = {}
            _pass(stages, microbatches[0], watch, crossing)  # determines which outputs get a gradient
            in_between = partial(_pass, stages, microbatches[0], watch, crossing)
            updates, state_bytes = _measure_updates(stages, optimizer, in_between, watch, agree)
        parameter_bytes = [
            total_bytes(p for p in stage.module.parameters() if p.requires_grad) for stage in stages
        ]
        first, *others = (
            Measurement(
                tensors.num_samples(inputs=microbatch.inputs, targets=microbatch.targets),
                tuple(
                    _layer_profile(name, i, took, microbatch.batching[i], parameter_bytes[i], layer_bytes)
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
            shared=self.shared,
            why_whole=self.why_whole,
            state_factor=state_bytes / sum(parameter_bytes) if sum(parameter_bytes) else 0.0,
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )


class _Batching(NamedTuple):
    """Batched weight gradients of one layer, as observed."""

    microbatches: int  # in one product at most; 0: the layer's are not batched
    kept_bytes: int

    @property
    def num_measured(self) -> int:
        """Number of microbatches in the product that is measured."""
        return min(self.microbatches, NUM_BATCHED)


@dataclass
class _Microbatch:
    """A microbatch that the layers are measured on, and each layer's batched products once they have run."""

    inputs: Tree
    targets: Tree
    batching: list[_Batching] = field(default_factory=list)


def _layer_profile(
    name: str,
    i: int,
    seconds: Mapping[tuple[str, int], float],
    batching: _Batching,
    parameter_bytes: int,
    num_bytes: LayerBytes,
) -> LayerProfile:
    forward = seconds["forward", i]
    input_seconds = None
    if parameter_bytes:  # a split backward makes the forward a little longer, too
        input_seconds = max(0.0, seconds["input backward", i] + seconds["forward before split", i] - forward)
    return LayerProfile(
        name=name,
        forward_seconds=forward,
        backward_seconds=seconds["backward", i],
        parameter_bytes=parameter_bytes,
        output_bytes=num_bytes.output,
        activation_bytes=num_bytes.activation,
        update_seconds=seconds.get(("update", i), 0.0),
        gradient_bytes=num_bytes.gradient,
        weight_seconds=seconds["weight backward", i] if parameter_bytes else 0.0,
        input_seconds=input_seconds,
        accumulate_seconds=_accumulate_seconds(seconds, i) if parameter_bytes else 0.0,
        joined=_batched_products(batching, seconds, i),
    )


def _typical(samplers: Sequence[Callable[[], Mapping[_Key, Took]]], agree: Agree) -> list[dict[_Key, float]]:
    """Return the typical seconds of each figure, for each sampler.

    The samplers take turns, repetition by repetition. The speed of a machine may change within seconds, by a
    factor of 1.6 on one: otherwise one microbatch size would look cheaper than another.
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
    for _, i in turns:  # each sampler's repetitions are spread evenly over the whole time
        samples[i] += [samplers[i]() for _ in range(lengths[i])]
    return [_middle(own, length) for own, length in zip(samples, lengths, strict=True)]


def _middle(samples: Sequence[Mapping[_Key, Took]], length: int) -> dict[_Key, float]:
    """Return typical seconds from repetitions of `length` samples each.

    Where ranks share cores, a layer sometimes waits for a processor. That wait may be longer than the layer,
    and a longer layer waits more often. So the proportions come from the medians of the layers' running
    times, and the sum comes from whole repetitions, waiting included.
    """
    medians = {key: statistics.median(each[key].running_seconds for each in samples) for key in samples[0]}
    totals = [sum(took.seconds for took in each.values()) for each in samples]
    repetitions = sorted(sum(totals[i : i + length]) / length for i in range(0, len(totals), length))
    quarter = len(repetitions) // 4
    middle = repetitions[quarter : len(repetitions) - quarter]
    factor = statistics.mean(middle) / (sum(medians.values()) or 1.0)
    return {key: value * factor for key, value in medians.items()}


def _passes(
    stages: list[Stage], split_stages: list[Stage], microbatch: _Microbatch, watch: Stopwatch
) -> dict[tuple[str, int], Took]:
    """Run every kind of pass once, and return the seconds of each layer in it.

    - One forward and one backward.
    - The first backward of an update, whose gradients are added to none.
    - A split backward, by `split_stages`.
    - For layers with batched wgrad: up to NUM_BATCHED backwards, and one product of their microbatches.

    The kinds take turns, so that other load on the machine counts for all of them; the weight gradients' time
    is a difference between them. The batched products are noted in the microbatch.
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
    split = _pass(split_stages, microbatch, watch, crossing)
    for i in range(len(stages)):
        took["first backward", i] = first[i]
        took["forward before split", i], took["input backward", i] = split["forward", i], split["backward", i]
        took["weight backward", i] = split["weight backward", i]
    batching = [(i, stage) for i, stage in enumerate(stages) if stage.can_batch_wgrad]
    if batching:
        _clear_gradients(stages)
        with _batched_wgrad(stages):
            for n in range(1, NUM_BATCHED + 1):
                of_pass = backwards()
                for i, stage in batching:
                    took[f"batched backward {n}", i] = of_pass[i]
                    if n == min(stage.max_batched, NUM_BATCHED):
                        began = watch.now()
                        stage.complete_gradients()
                        took["product", i] = watch.since(began)
        for _, stage in batching:
            stage.complete_gradients()
    microbatch.batching = [_Batching(stage.max_batched, stage.max_deferred_bytes) for stage in stages]
    return took


def _accumulate_seconds(seconds: Mapping[tuple[str, int], float], layer: int) -> float:
    """Return the seconds of adding gradients up, which the first backward of an update does not need."""
    return max(0.0, seconds["backward", layer] - seconds["first backward", layer])


def _batched_products(
    batching: _Batching, seconds: Mapping[tuple[str, int], float], layer: int
) -> JoinedProducts | None:
    """Fit a line through the products of one microbatch and of the most measured; None: there are none."""
    count = batching.num_measured
    if not count:
        return None
    backwards = [seconds[f"batched backward {n}", layer] for n in range(1, count + 1)]
    of_several = seconds["product", layer]
    of_one = max(0.0, seconds["weight backward", layer] - _accumulate_seconds(seconds, layer))
    per_microbatch = max(0.0, of_several - of_one) / (count - 1) if count > 1 else 0.0
    return JoinedProducts(
        backward_seconds=statistics.mean(backwards),
        product_seconds=max(0.0, of_several - count * per_microbatch),
        microbatch_seconds=per_microbatch,
        microbatches=batching.microbatches,
        kept_bytes=math.ceil(batching.kept_bytes / count),
    )


def _clear_gradients(stages: list[Stage]) -> None:
    for stage in stages:
        stage.module.zero_grad(set_to_none=True)


@contextmanager
def _batched_wgrad(stages: list[Stage]) -> Iterator[None]:
    """Make the weight gradients of several passes in one product."""
    for stage in stages:
        stage.batches_wgrad = True
    try:
        yield
    finally:
        for stage in stages:
            stage.batches_wgrad = False


@contextmanager
def _frozen(stages: list[Stage]) -> Iterator[None]:
    """Freeze all parameters: none requires a gradient."""
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
    """Run one forward and one backward, whole or split, and return the seconds of each layer.

    Args:
        crossing: for each layer, the outputs that get a gradient; missing layers are filled in.
    """
    took = {}
    value: TensorTree | None = None
    for i, stage in enumerate(stages):
        inputs = microbatch.inputs if stage.layers.needs_inputs(training=True) else None
        began = watch.now()
        if stage.loss is None:
            outputs = stage.forward(0, value, step=0, inputs=inputs)
            value = leaves(outputs, crossing.setdefault(i, require_grad(outputs)))
        else:
            stage.forward_loss(0, value, microbatch.targets, share=1.0, step=0, inputs=inputs)
        took["forward", i] = watch.since(began)
    gradients: tuple[Tensor | None, ...] = ()
    for i, stage in reversed(list(enumerate(stages))):
        began = watch.now()
        gradients = (stage.backward_input if stage.split_backward else stage.backward)(0, gradients)
        took["backward", i] = watch.since(began)
        if stage.split_backward:  # at once: less memory is kept than after all layers' input gradients
            began = watch.now()
            stage.backward_weight(0)
            took["weight backward", i] = watch.since(began)
    return took


def _measure_updates(
    stages: list[Stage],
    optimizer: OptimizerFactory | None,
    in_between: Callable[[], object],
    watch: Stopwatch,
    agree: Agree,
) -> tuple[dict[tuple[str, int], float], int]:
    """Return the seconds of ("update", layer) for each trained layer, and the bytes of the optimizer's state.

    Args:
        in_between: runs a forward and a backward between two steps, which fills the caches as training does.
    """
    optimizers, gradients = {}, {}
    for i, stage in enumerate(stages):
        parameters = [p for p in stage.module.parameters() if p.grad is not None]
        if optimizer is not None and parameters:
            gradients[i] = [p.grad for p in parameters if p.grad is not None]
            for gradient in gradients[i]:
                gradient.zero_()  # a step with zero gradients takes as long and leaves the copy usable
            optimizers[i] = optimizer(parameters)

    def steps() -> dict[tuple[str, int], Took]:
        took = {}
        with _frozen(stages):
            in_between()
        for i, over_layer in optimizers.items():
            began = watch.now()
            norms(gradients[i])  # training checks them for numbers that are not finite
            with fused(over_layer):
                over_layer.step()
            took["update", i] = watch.since(began)
        return took

    updates = _typical([steps], agree)[0] if optimizers else {}
    state_bytes = total_bytes(
        value
        for over_layer in optimizers.values()
        for state in over_layer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
    return updates, state_bytes


def _dtype(stages: list[Stage], inputs: Tree) -> str:
    parameters = (parameter for stage in stages for parameter in stage.module.parameters())
    return str(next(chain(parameters, tensors.tensors_in(inputs))).dtype).removeprefix("torch.")
