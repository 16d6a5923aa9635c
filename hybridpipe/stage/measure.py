"""Measure: from a model and one microbatch to its profile, on stock PyTorch.

The model runs as single-layer stages, all layers forward and then all backward, as training would; each
layer's figure is the median over the repetitions. What it costs to run a layer by itself (Python
included) is thereby in the figure. Copies are measured, so model and data stay as they were.
"""

import copy
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.stage.split import layers_of
from hybridpipe.stage.stage import Loss, Stage, received
from hybridpipe.stage.values import Value, map_tensors, tensors_of

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

# Warm-up lets allocators and oneDNN settle; the budget keeps big models from taking minutes.
WARM_UP = 3
MAX_REPEATS = 15
BUDGET_SECONDS = 10.0


def measure(
    model: nn.Module,
    inputs: Value,
    targets: Value,
    loss: Loss,
    optimizer: OptimizerFactory | None = None,
    device: torch.device | None = None,
) -> ModelProfile:
    """Measure every layer on one microbatch.

    Args:
        inputs, targets: one microbatch, samples in the first dimension.
        loss: counted with the last layer.
        optimizer: its step over each layer's parameters is measured too, and the weight of its state.
    """
    device = device or torch.device("cpu")
    layers = layers_of(copy.deepcopy(model))
    stages = [Stage([layer], i, device) for i, layer in enumerate(layers.values())]
    stages[-1].loss = loss
    inputs, targets = (  # copies, as the first layer may work in place
        map_tensors(lambda tensor: tensor.to(device, copy=True), value) for value in (inputs, targets)
    )

    activation_bytes, output_bytes = _measure_bytes(stages, inputs, targets)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    began = time.perf_counter()
    for repeat in range(WARM_UP + MAX_REPEATS):
        sample = _pass(stages, inputs, targets, device)
        if repeat >= WARM_UP:
            for key, value in sample.items():
                seconds[key].append(value)
            if time.perf_counter() - began > BUDGET_SECONDS:
                break
    updates, state_bytes = _measure_updates(stages, optimizer, device)
    parameter_bytes = [_bytes(p for p in stage.module.parameters() if p.requires_grad) for stage in stages]
    return ModelProfile(
        layers=tuple(
            LayerProfile(
                name=name,
                forward_seconds=statistics.median(seconds["forward", i]),
                backward_seconds=statistics.median(seconds["backward", i]),
                parameter_bytes=parameter_bytes[i],
                output_bytes=output_bytes[i],
                activation_bytes=activation_bytes[i],
                update_seconds=updates[i],
            )
            for i, name in enumerate(layers)
        ),
        samples=len(tensors_of(inputs)[0]),
        device=str(device),
        dtype=_dtype(model, inputs),
        state_factor=state_bytes / sum(parameter_bytes) if sum(parameter_bytes) else 0.0,
        versions={"python": platform.python_version(), "torch": torch.__version__},
    )


def _pass(
    stages: list[Stage], inputs: Value, targets: Value, device: torch.device
) -> dict[tuple[str, int], float]:
    """Seconds of every layer in one forward and one backward."""
    seconds = {}
    value = inputs
    for i, stage in enumerate(stages):
        began = _now(device)
        if stage.loss is None:
            outputs = stage.forward(0, value, step=0)
            value = _leaves(outputs)
        else:
            stage.forward_loss(0, value, targets, share=1.0, step=0)
        seconds["forward", i] = _now(device) - began
    gradients: tuple[Tensor | None, ...] = ()
    for i, stage in reversed(list(enumerate(stages))):
        began = _now(device)
        gradients = stage.backward(0, gradients)
        seconds["backward", i] = _now(device) - began
    return seconds


def _measure_bytes(stages: list[Stage], inputs: Value, targets: Value) -> tuple[list[int], list[int]]:
    """What each layer keeps for its backward and passes on; a storage counts where it is first kept."""
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

    activation_bytes, output_bytes = [], []
    value = inputs
    for stage in stages:
        counting.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if stage.loss is None:
                outputs = stage.forward(0, value, step=0)
                value = _leaves(outputs)
                output_bytes.append(_bytes(tensors_of(outputs)))
            else:
                stage.forward_loss(0, value, targets, share=1.0, step=0)
                output_bytes.append(0)
        activation_bytes.append(counting[-1])
    gradients: tuple[Tensor | None, ...] = ()
    for stage in reversed(stages):
        gradients = stage.backward(0, gradients)
    return activation_bytes, output_bytes


def _measure_updates(
    stages: list[Stage], optimizer: OptimizerFactory | None, device: torch.device
) -> tuple[list[float], int]:
    """Seconds of the optimizer's step over each layer, and the bytes of its state over all."""
    updates, state_bytes = [], 0
    for stage in stages:
        parameters = [p for p in stage.module.parameters() if p.grad is not None]
        if optimizer is None or not parameters:
            updates.append(0.0)
            continue
        over_layer = optimizer(parameters)
        over_layer.step()
        samples = []
        for _ in range(WARM_UP):
            began = _now(device)
            over_layer.step()
            samples.append(_now(device) - began)
        updates.append(statistics.median(samples))
        state_bytes += _bytes(
            value
            for state in over_layer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.numel() > 1
        )
    return updates, state_bytes


def _leaves(outputs: Value) -> Value:
    return received(
        map_tensors(lambda tensor: tensor.detach(), outputs),
        [tensor.requires_grad for tensor in tensors_of(outputs)],
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _dtype(model: nn.Module, inputs: Value) -> str:
    tensor = next(model.parameters(), tensors_of(inputs)[0])
    return str(tensor.dtype).removeprefix("torch.")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
