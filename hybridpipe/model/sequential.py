"""Sequential: the children of an `nn.Sequential` as layers, between which a plan cuts.

Any other model is one layer here. Invariant: layers are in the order in which the model calls them.
"""

from collections.abc import Collection

from torch import nn

from hybridpipe.model.plan_fit import check_num_layers, check_shared, uses_of
from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.stage_module import StageModule, calls_children
from hybridpipe.planning.plan import Plan

WHOLE = ""  # the name of the one layer of a model that no plan can cut: the model itself


def is_sequential(model: nn.Module) -> bool:
    """Return True if the model only calls its children in order, so that a plan can cut it."""
    return calls_children(model) and not (model._parameters or model._buffers)


def num_layers(model: nn.Module) -> int:
    """Return the number of layers that a plan cuts.

    Raises:
        TypeError: the model is not an `nn.Module`.
        ValueError: it is an empty `nn.Sequential`.
    """
    return len(_layers_of(model))


def stage_module(model: nn.Module, start: int, stop: int, precision: Precision = FP32) -> StageModule:
    """Return the layers from `start` up to, not including, `stop`."""
    layers = list(_layers_of(model).items())[start:stop]
    names = [name for name, _ in layers]
    shared: dict[str, str] = {}
    for uses in uses_of(model).values():
        inside = [key for key, _ in uses if _layer_of(key, names) in names]
        if len(inside) < len(uses):
            shared |= dict.fromkeys(inside, uses[0][0])
    return StageModule([layer for _, layer in layers], start, names, shared, precision)


def single_layers(model: nn.Module, precision: Precision = FP32) -> list[StageModule]:
    """Return each layer as a stage by itself that shares nothing, for measurements."""
    layers = enumerate(_layers_of(model).items())
    return [StageModule([layer], i, [name], precision=precision) for i, (name, layer) in layers]


def holders(model: nn.Module, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each tensor of the model, its owner first, by each of the tensor's keys."""
    layers = list(_layers_of(model))
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in layers[stage.start : stage.stop]}

    def stages(*keys: str) -> tuple[int, ...]:
        return tuple(sorted({stage_of[_layer_of(key, layers)] for key in keys}))

    found = {key: stages(key) for key in model.state_dict()}
    for uses in uses_of(model).values():
        keys = [key for key, _ in uses]
        found |= dict.fromkeys(keys, stages(*keys))
    return found


def _layer_of(key: str, layers: Collection[str]) -> str:
    return WHOLE if WHOLE in layers else key.partition(".")[0]


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by name, in order.

    Raises:
        TypeError: the model is not an `nn.Module`.
        ValueError: it is an empty `nn.Sequential`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not is_sequential(model):
        return {WHOLE: model}
    # not named_children(): it passes over a module that stands in a second place, such as a shared ReLU
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    }
    if not layers:
        raise ValueError("model must have at least one layer, got an empty nn.Sequential")
    return layers


def check_plan(model: nn.Module, plan: Plan, why_whole: str = "") -> None:
    """Check that a plan fits a model.

    Args:
        why_whole: the reason why the model is one layer.

    Raises:
        ValueError: the number of layers differs, or stages share a tensor that must stay in one of them.
    """
    layers = _layers_of(model)
    check_num_layers(plan, len(layers), why_whole)
    check_shared(model, plan, holders(model, plan))
