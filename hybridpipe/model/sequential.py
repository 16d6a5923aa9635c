"""Sequential: a model's layers in order, the layers of a stage, and the keys of their tensors.

Only this module knows that a model is an `nn.Sequential`, which a plan cuts between its children.
Invariant: a stage's modules are the model's own, not copies. A tensor that several stages hold belongs to the
first of them, its owner, and is named by its first key.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor, nn

from hybridpipe.errors import UserError
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import SharedParameter


class StageModule:
    """The layers of one stage, and the keys of their tensors in the whole model's `state_dict()`.

    A path names a tensor or a module in the stage, such as "0.weight".

    Args:
        layers: the layers, in order.
        first_layer: index of the first layer in the whole model.
        names: the layers' names in the model; by default their indices.
        shared: the first key in the model of each tensor that layers outside the stage hold, too, by its key.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int = 0,
        names: Sequence[str] | None = None,
        shared: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.first_layer = nn.Sequential(*layers), first_layer
        self.names = names or [str(first_layer + i) for i in range(len(layers))]
        self._shared = shared or {}
        buffers = self.module.named_buffers(remove_duplicate=False)
        self.shared_buffers = [path for path, _ in buffers if self.key(path) in self._shared]

    def key(self, path: str) -> str:
        """Return the key in the whole model of the tensor at a path."""
        index, _, rest = path.partition(".")
        return f"{self.names[int(index)]}.{rest}"

    def numbered(self, path: str) -> str:
        """Return the path in the whole model, with the layer's index: "3.norm"."""
        index, dot, rest = path.partition(".")
        return f"{self.first_layer + int(index)}{dot}{rest}"

    def described(self, path: str) -> str:
        """Return a description of a path for messages: "layer 3 (Linear), weight"."""
        index, _, rest = path.partition(".")
        return f"layer {self.first_layer + int(index)} ({type(self.module[int(index)]).__name__}), {rest}"

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the stage's `state_dict()`, not detached, by key."""
        held = self.module.state_dict(keep_vars=True)
        return {self.key(path): tensor for path, tensor in held.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers among `tensors`, by key."""
        return {k: t for k, t in self.tensors().items() if not isinstance(t, nn.Parameter)}

    def parameters(self) -> dict[Tensor, str]:
        """Return the key of each parameter; a tied one has its first key in the whole model."""
        found: dict[Tensor, str] = {}
        for path, parameter in self.module.named_parameters(remove_duplicate=False):
            found.setdefault(parameter, self._shared.get(self.key(path), self.key(path)))
        return found

    def owned_parameters(self) -> dict[Tensor, str]:
        """Return `parameters` without those that an earlier stage owns."""
        others = {first for key, first in self._shared.items() if first not in self._shared}
        return {parameter: key for parameter, key in self.parameters().items() if key not in others}

    def weights(self, weights: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return a version's leaves by the keys of the parameters that they replace.

        Args:
            weights: one mapping a layer, from the parameter's name within the layer to the leaf.
        """
        wanted = {key for parameter, key in self.parameters().items() if parameter.requires_grad}
        named = {
            f"{layer}.{name}": leaf
            for layer, leaves in zip(self.names, weights, strict=True)
            for name, leaf in leaves.items()
        }
        return {key: leaf for key, leaf in named.items() if key in wanted}


def num_layers(model: nn.Module) -> int:
    """Return the number of layers that a plan cuts.

    Raises:
        TypeError: the model is not an `nn.Sequential`, or does more than call its children in order.
        ValueError: it has no children.
    """
    return len(_layers_of(model))


def stage_module(model: nn.Module, start: int, stop: int) -> StageModule:
    """Return the layers from `start` up to, not including, `stop`."""
    layers = list(_layers_of(model).items())[start:stop]
    names = [name for name, _ in layers]
    shared: dict[str, str] = {}
    for uses in _uses(model).values():
        inside = [key for key, _ in uses if key.partition(".")[0] in names]
        if len(inside) < len(uses):
            shared |= dict.fromkeys(inside, uses[0][0])
    return StageModule([layer for _, layer in layers], start, names, shared)


def single_layers(model: nn.Module) -> list[StageModule]:
    """Return each layer as a stage by itself that shares nothing, for measurements."""
    return [StageModule([layer], i, [name]) for i, (name, layer) in enumerate(_layers_of(model).items())]


def holders(model: nn.Module, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each tensor of the model, its owner first, by each of the tensor's keys."""
    layers = list(_layers_of(model))
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in layers[stage.start : stage.stop]}

    def stages(*keys: str) -> tuple[int, ...]:
        return tuple(sorted({stage_of[key.partition(".")[0]] for key in keys}))

    found = {key: stages(key) for key in model.state_dict()}
    for uses in _uses(model).values():
        keys = [key for key, _ in uses]
        found |= dict.fromkeys(keys, stages(*keys))
    return found


def shared_parameters(model: nn.Module) -> tuple[SharedParameter, ...]:
    """Return what several layers hold: parameters, of which frozen ones count no bytes, as in their layers',
    and buffers that training writes to.
    """
    layers_of = holders(model, Plan(tuple(StageSpec(i, i + 1) for i in range(num_layers(model)))))
    parameters, found = dict(model.named_parameters()), []
    for uses in _uses(model).values():
        key, stays = uses[0][0], _reason_to_stay(uses)
        if len(layers_of[key]) > 1 and (key in parameters or stays):
            parameter = parameters.get(key)
            num_bytes = parameter.nbytes if parameter is not None and parameter.requires_grad else 0
            found.append(SharedParameter(key, layers_of[key], num_bytes, separable=stays is None))
    return tuple(found)


def _uses(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return the keys of each parameter and buffer, and the modules that hold it there, by the tensor's id.

    Keys are in the order of the layers.
    """
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), []).append((f"{path}.{name}", module))
    return found


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by name, in order.

    Raises:
        TypeError: the model is not an `nn.Sequential`, or does more than call its children in order.
        ValueError: it has no children.
    """
    if not isinstance(model, nn.Sequential):
        raise TypeError(
            f"model must be an nn.Sequential, whose children are the layers, got {type(model).__name__}; "
            "wrap its parts as nn.Sequential(...)"
        )
    own = [*model._parameters, *model._buffers]
    if type(model).forward is not nn.Sequential.forward:
        own.append("forward")
    if own:
        raise TypeError(
            f"{type(model).__name__} has its own {', '.join(own)}, which would be lost between its children; "
            "make it one layer: nn.Sequential(model)"
        )
    # not named_children(): it passes over a module that stands in a second place, such as a shared ReLU
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    }
    if not layers:
        raise ValueError("model must have at least one layer, got an empty nn.Sequential")
    return layers


def check_plan(model: nn.Module, plan: Plan) -> None:
    """Check that a plan fits a model.

    Raises:
        ValueError: the number of layers differs, a replicated stage holds a SyncBatchNorm, or stages share a
            tensor that must stay in one of them.
    """
    layers = _layers_of(model)
    if plan.num_layers != len(layers):
        raise ValueError(f"the plan cuts num_layers = {plan.num_layers}, the model has {len(layers)} layers")
    for s, stage in enumerate(plan.stages):
        for name in list(layers)[stage.start : stage.stop] if stage.replicas > 1 else ():
            _check_no_sync_norm(name, layers[name], f"{plan.name} replicates stage {s}")
    stages_of = holders(model, plan)
    for uses in _uses(model).values():
        if len(stages_of[uses[0][0]]) > 1:
            _check_may_be_shared(uses, stages_of, plan)


def _reason_to_stay(uses: Sequence[tuple[str, nn.Module]]) -> str | None:
    """Return why a tensor with these uses must stay in one stage under any schedule; None if it need not."""
    for key, module in uses:
        name = key.rpartition(".")[2]
        if name in module._buffers and isinstance(module, nn.modules.batchnorm._NormBase):
            return "to which training writes"
        if name == "weight" and getattr(module, "sparse", False) is True:
            return "whose gradients are sparse (an embedding's sparse=False makes them dense)"
    return None


def _check_may_be_shared(
    uses: Sequence[tuple[str, nn.Module]], stages_of: Mapping[str, Sequence[int]], plan: Plan
) -> None:
    """Raise ValueError if a tensor that several stages hold must stay in one of them."""
    reason = _reason_to_stay(uses)
    if plan.is_asynchronous and any(key.rpartition(".")[2] in module._parameters for key, module in uses):
        reason = f"which the stages would update at different times under {plan.schedule}"
    if reason is not None:
        (first, _), *others = uses
        s, (last, _) = stages_of[first], others[-1]
        raise ValueError(
            f"the plan separates {first} (stage {s[0]}) and {last} (stage {s[-1]}), which are one tensor, "
            f"{reason}; keep the layers that share it in one stage, as plan='dp' does"
        )


def _check_no_sync_norm(name: str, layer: nn.Module, why: str) -> None:
    for path, module in layer.named_modules(prefix=name):
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"layer {path} is a SyncBatchNorm, which synchronises under torch.distributed only, and plan "
                f"{why}: use BatchNorm, whose running statistics replicas average, or GroupNorm, or "
                "a plan with one replica there"
            )


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients, for measurements.

    Raises:
        UserError: a layer cannot be copied; names the layer.
    """
    try:
        copy_of = copy.deepcopy(model)
    except Exception as error:  # whatever a layer's own attributes raise
        raise UserError(f"{_not_copied(model, error)}; give a plan, which needs no measuring") from error
    copy_of.zero_grad(set_to_none=True)
    return copy_of


def _not_copied(model: nn.Module, error: Exception) -> str:
    """Return a message with the first layer that cannot be copied, and its error."""
    for name, layer in _layers_of(model).items():
        try:
            copy.deepcopy(layer)
        except Exception as refused:
            what = f"layer {name} ({type(layer).__name__})"
            return f"the model is measured on a copy, and {what} cannot be copied: {refused}"
    return f"the model is measured on a copy, and cannot be copied: {error}"
