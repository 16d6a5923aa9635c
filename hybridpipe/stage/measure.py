"""Measure: from a model and one microbatch to its profile, on stock PyTorch.

The model runs as single-layer stages, all layers forward and then all backward, as training would; each
layer's figure is what it typically takes over many repetitions. What it costs to run a layer by itself
(Python included) is thereby in the figure. Copies are measured, so model and data stay as they were. Ranks
that measure at once, each its own copy, do equally many repetitions; how they agree is not known here.
"""

import copy
import math
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hybridpipe.planning.profile import JoinedProducts, LayerProfile, ModelProfile
from hybridpipe.stage.split import layers_of
from hybridpipe.stage.stage import Loss, Stage, received
from hybridpipe.stage.stopwatch import Stopwatch, Took
from hybridpipe.stage.values import Value, map_tensors, norms, tensors_of

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Agree = Callable[[float], float]  # the largest of all measuring ranks' numbers; a barrier, too
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
    inputs: Value,
    targets: Value,
    loss: Loss,
    optimizer: OptimizerFactory | None = None,
    device: torch.device | None = None,
    agree: Agree = float,
) -> ModelProfile:
    """Measure every layer on one microbatch; see `Rehearsal`."""
    return Rehearsal(model, inputs, targets, loss, device).measure(optimizer, agree)


class Rehearsal:
    """A copy of the model, and of one microbatch to run through it.

    Args:
        inputs, targets: one microbatch, samples in the first dimension.
        loss: counted with the last layer.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Value,
        targets: Value,
        loss: Loss,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        layers = layers_of(copy.deepcopy(model))
        self.names = list(layers)
        self.stages = [Stage([layer], i, self.device) for i, layer in enumerate(layers.values())]
        self.stages[-1].loss = loss
        self.inputs, self.targets = (  # copies, as the first layer may work in place
            map_tensors(lambda tensor: tensor.to(self.device, copy=True), value)
            for value in (inputs, targets)
        )

    def run(self) -> None:
        """One forward and one backward of the microbatch."""
        with closing(Stopwatch(self.device)) as watch:
            _pass(self.stages, self.inputs, self.targets, watch, {})

    def measure(
        self, optimizer: OptimizerFactory | None = None, agree: Agree = float, size: int | None = None
    ) -> ModelProfile:
        """What each layer takes, keeps and passes on.

        Args:
            size: measure the first so many samples only.
            optimizer: its step over each layer's parameters is measured too, and the weight of its state.
            agree: with the other ranks that measure at once.
        """
        stages = self.stages
        inputs, targets = (
            map_tensors(lambda tensor: tensor[:size], value) for value in (self.inputs, self.targets)
        )
        for stage in stages:
            stage.forget_most_kept()
        activation_bytes, output_bytes, gradient_bytes = _measure_bytes(stages, inputs, targets)
        with closing(Stopwatch(self.device)) as watch:
            seconds = _typical(lambda: _passes(stages, inputs, targets, watch), agree)
            crossing: dict[int, list[bool]] = {}
            _pass(stages, inputs, targets, watch, crossing)  # which finds out what gets a gradient
            in_between = partial(_pass, stages, inputs, targets, watch, crossing)
            updates, state_bytes = _measure_updates(stages, optimizer, in_between, watch, agree)
        parameter_bytes = [
            _bytes(p for p in stage.module.parameters() if p.requires_grad) for stage in stages
        ]
        return ModelProfile(
            layers=tuple(
                LayerProfile(
                    name=name,
                    forward_seconds=seconds["forward", i],
                    backward_seconds=seconds["backward", i],
                    parameter_bytes=parameter_bytes[i],
                    output_bytes=output_bytes[i],
                    activation_bytes=activation_bytes[i],
                    update_seconds=updates.get(i, 0.0),
                    gradient_bytes=gradient_bytes[i],
                    weight_seconds=max(0.0, seconds["backward", i] - seconds["backward to inputs", i])
                    if parameter_bytes[i]
                    else 0.0,
                    accumulate_seconds=_accumulating(seconds, i) if parameter_bytes[i] else 0.0,
                    joined=_joined_products(stages[i], seconds, i),
                )
                for i, name in enumerate(self.names)
            ),
            samples=len(tensors_of(inputs)[0]),
            device=str(self.device),
            dtype=_dtype(stages, inputs),
            state_factor=state_bytes / sum(parameter_bytes) if sum(parameter_bytes) else 0.0,
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )


def _typical(sample: Callable[[], Mapping[_Key, Took]], agree: Agree) -> dict[_Key, float]:
    """What each figure of `sample` typically is, in seconds.

    Where ranks share cores, a layer waits for a processor now and then, for a time slice that may be longer
    than the layer, and a longer layer waits more often. So the medians of what layers take while they run
    give the proportions, and repetitions of many slices, waiting included, the sum.
    """
    for _ in range(WARM_UP):
        began = time.perf_counter()
        sample()
    slowest = agree(time.perf_counter() - began)
    length = math.ceil(REPETITION_SECONDS / slowest)
    num_repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(BUDGET_SECONDS / (length * slowest))))
    samples = [sample() for _ in range(num_repeats * length)]
    medians = {key: statistics.median(each[key].running_seconds for each in samples) for key in samples[0]}
    totals = [sum(took.seconds for took in each.values()) for each in samples]
    repetitions = sorted(sum(totals[i : i + length]) / length for i in range(0, len(totals), length))
    middle = repetitions[num_repeats // 4 : num_repeats - num_repeats // 4]
    factor = statistics.mean(middle) / (sum(medians.values()) or 1.0)
    return {key: value * factor for key, value in medians.items()}


def _passes(
    stages: list[Stage], inputs: Value, targets: Value, watch: Stopwatch
) -> dict[tuple[str, int], Took]:
    """What every layer takes in one forward and one backward; in the first backward of an update, whose
    gradients are added to none; and in a backward to the inputs alone. Where a layer joins the products of
    several microbatches, also in each of NUM_JOINED backwards, and a product of as many, or as many as join.

    In turn, so that what else the machine does counts for all; the differences are what the weights'
    gradients take.
    """
    crossing: dict[int, list[bool]] = {}

    def backwards() -> list[Took]:
        of_pass = _pass(stages, inputs, targets, watch, crossing)
        return [of_pass["backward", i] for i in range(len(stages))]

    _clear_gradients(stages)
    first = backwards()
    took = _pass(stages, inputs, targets, watch, crossing)
    with _frozen(stages):
        without = backwards()
    for i in range(len(stages)):
        took["first backward", i], took["backward to inputs", i] = first[i], without[i]
    joining = [(i, stage) for i, stage in enumerate(stages) if stage.can_join]
    if joining:
        _clear_gradients(stages)
        with _joined(stages):
            for n in range(1, NUM_JOINED + 1):
                of_pass = backwards()
                for i, stage in joining:
                    took[f"joined backward {n}", i] = of_pass[i]
                    if n == _num_joined(stage):
                        began = watch.now()
                        stage.complete_gradients()
                        took["product", i] = watch.since(began)
        for _, stage in joining:
            stage.complete_gradients()
    return took


def _num_joined(stage: Stage) -> int:
    """Microbatches of the product that is measured; 0 where none are joined."""
    return min(stage.most_joined, NUM_JOINED)


def _accumulating(seconds: Mapping[tuple[str, int], float], layer: int) -> float:
    """What an update's first backward is spared."""
    later, to_inputs = seconds["backward", layer], seconds["backward to inputs", layer]
    return min(max(0.0, later - seconds["first backward", layer]), max(0.0, later - to_inputs))


def _joined_products(
    stage: Stage, seconds: Mapping[tuple[str, int], float], layer: int
) -> JoinedProducts | None:
    """On the line through a product of one microbatch and one of as many as were measured."""
    count = _num_joined(stage)
    if not count:
        return None
    leaving = [seconds[f"joined backward {n}", layer] for n in range(1, count + 1)]
    of_several = seconds["product", layer]
    of_one = max(0.0, seconds["first backward", layer] - seconds["backward to inputs", layer])
    a_microbatch = max(0.0, of_several - of_one) / (count - 1) if count > 1 else 0.0
    return JoinedProducts(
        backward_seconds=statistics.mean(leaving),
        product_seconds=max(0.0, of_several - count * a_microbatch),
        microbatch_seconds=a_microbatch,
        microbatches=stage.most_joined,
        kept_bytes=math.ceil(stage.most_kept_bytes / count),
    )


def _clear_gradients(stages: list[Stage]) -> None:
    for stage in stages:
        stage.module.zero_grad(set_to_none=True)


@contextmanager
def _joined(stages: list[Stage]) -> Iterator[None]:
    """Weight gradients of several passes are made at once."""
    for stage in stages:
        stage.join_products = True
    try:
        yield
    finally:
        for stage in stages:
            stage.join_products = False


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
    stages: list[Stage],
    inputs: Value,
    targets: Value,
    watch: Stopwatch,
    crossing: dict[int, list[bool]],
) -> dict[tuple[str, int], Took]:
    """What every layer takes in one forward and one backward.

    Args:
        crossing: which of each layer's outputs get a gradient; filled in where it does not say.
    """
    took = {}
    value = inputs
    for i, stage in enumerate(stages):
        began = watch.now()
        if stage.loss is None:
            outputs = stage.forward(0, value, step=0)
            value = _leaves(outputs, crossing.setdefault(i, _require_grad(outputs)))
        else:
            stage.forward_loss(0, value, targets, share=1.0, step=0)
        took["forward", i] = watch.since(began)
    gradients: tuple[Tensor | None, ...] = ()
    for i, stage in reversed(list(enumerate(stages))):
        began = watch.now()
        gradients = stage.backward(0, gradients)
        took["backward", i] = watch.since(began)
    return took


def _measure_bytes(
    stages: list[Stage], inputs: Value, targets: Value
) -> tuple[list[int], list[int], list[int]]:
    """What each layer keeps for its backward, passes on, and gets back for that.

    A storage counts where it is first kept.
    """
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

    activation_bytes, output_bytes, gradient_bytes = [], [], []
    value = inputs
    for stage in stages:
        counting.append(0)
        crossing: tuple[Tensor, ...] = ()  # nothing goes on behind the loss
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if stage.loss is None:
                outputs = stage.forward(0, value, step=0)
                value = _leaves(outputs, _require_grad(outputs))
                crossing = tensors_of(outputs)
            else:
                stage.forward_loss(0, value, targets, share=1.0, step=0)
        activation_bytes.append(counting[-1])
        output_bytes.append(_bytes(crossing))
        gradient_bytes.append(_bytes(tensor for tensor in crossing if tensor.requires_grad))
    gradients: tuple[Tensor | None, ...] = ()
    for stage in reversed(stages):
        gradients = stage.backward(0, gradients)
    return activation_bytes, output_bytes, gradient_bytes


def _measure_updates(
    stages: list[Stage],
    optimizer: OptimizerFactory | None,
    in_between: Callable[[], object],
    watch: Stopwatch,
    agree: Agree,
) -> tuple[dict[int, float], int]:
    """Seconds of an update of each layer that is trained, and the bytes of the optimizer's state over all.

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

    def steps() -> dict[int, Took]:
        took = {}
        with _frozen(stages):
            in_between()
        for i, over_layer in optimizers.items():
            began = watch.now()
            norms(gradients[i])  # which tell whether they are numbers
            over_layer.step()
            took[i] = watch.since(began)
        return took

    updates = _typical(steps, agree) if optimizers else {}
    state_bytes = _bytes(
        value
        for over_layer in optimizers.values()
        for state in over_layer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
    return updates, state_bytes


def _leaves(outputs: Value, require_grad: list[bool]) -> Value:
    return received(map_tensors(lambda tensor: tensor.detach(), outputs), require_grad)


def _require_grad(outputs: Value) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors_of(outputs)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _dtype(stages: list[Stage], inputs: Value) -> str:
    parameters = (parameter for stage in stages for parameter in stage.module.parameters())
    tensor = next(parameters, tensors_of(inputs)[0])
    return str(tensor.dtype).removeprefix("torch.")
