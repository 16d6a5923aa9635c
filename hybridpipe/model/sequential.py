"""Split: a model's layers in order, and the ones that a stage holds.

An `nn.Sequential` is cut between its children. The stage's modules are the model's own, not copies.
"""

import copy

from torch import nn

from hybridpipe.errors import UserError
from hybridpipe.planning.plan import Plan


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by name, in order.

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
    """Raises ValueError unless the plan cuts this model, and every layer does in its stage what it says.

    No two uses of a parameter or buffer are parted, and no SyncBatchNorm stands in a replicated stage.
    """
    layers = layers_of(model)
    if plan.num_layers != len(layers):
        raise ValueError(f"the plan cuts num_layers = {plan.num_layers}, the model has {len(layers)} layers")
    holder: dict[int, tuple[int, str]] = {}
    for s, stage in enumerate(plan.stages):
        for name in list(layers)[stage.start : stage.stop]:
            if stage.replicas > 1:
                _check_no_sync_norm(name, layers[name], f"{plan.name} replicates stage {s}")
            for key, tensor in layers[name].state_dict(prefix=f"{name}.", keep_vars=True).items():
                at, other = holder.setdefault(id(tensor), (s, key))
                if at != s:
                    raise ValueError(
                        f"the plan separates {other} (stage {at}) and {key} (stage {s}), "
                        "which are one tensor; keep the layers that share it in one stage, as plan='dp' does"
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
    """A copy of a model, without gradients, to be measured.

    Raises:
        UserError: a layer cannot be copied; with its name.
    """
    try:
        copy_of = copy.deepcopy(model)
    except Exception as error:  # whatever a layer's own attributes raise
        raise UserError(f"{_not_copied(model, error)}; give a plan, which needs no measuring") from error
    copy_of.zero_grad(set_to_none=True)
    return copy_of


def _not_copied(model: nn.Module, error: Exception) -> str:
    """The first layer that refuses, and why."""
    for name, layer in layers_of(model).items():
        try:
            copy.deepcopy(layer)
        except Exception as refused:
            what = f"layer {name} ({type(layer).__name__})"
            return f"the model is measured on a copy, and {what} cannot be copied: {refused}"
    return f"the model is measured on a copy, and cannot be copied: {error}"
