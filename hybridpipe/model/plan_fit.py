"""Plan fit: whether a plan fits a model, and what of the model may stand in several stages.

Knows modules and plans, and no kind of model. Invariant: whatever is refused is refused in one line that says
what to do instead.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from torch import nn

from hybridpipe.model.recording.refusals import writes_weight
from hybridpipe.model.stage_module import joined
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import SharedParameter


def check_num_layers(plan: Plan, count: int, why_whole: str) -> None:
    """Raise ValueError if a plan is for another number of layers.

    Args:
        why_whole: the reason why the model is one layer, if it is.
    """
    if plan.num_layers != count:
        told = f"the plan cuts num_layers = {plan.num_layers}, the model has {count} layer{'s' * (count > 1)}"
        raise ValueError(f"{told}: {why_whole}; use plan='dp'" if why_whole else told)


def check_writes(plan: Plan, told: str) -> None:
    """Raise ValueError if a plan would order a forward's writes to parameters otherwise than one process.

    Args:
        told: how the forward writes to parameters, with the user's line; "" if it does not.
    """
    if told and not plan.alternates:
        raise writes_weight(told)


def check_backward(plan: Plan, told: str) -> None:
    """Raise ValueError if gradients that a forward adds by itself, as `told`, would not be weighted right."""
    if plan.num_ranks > 1 or plan.num_microbatches > 1:
        raise ValueError(f"{told}: only one rank and one microbatch a minibatch train it right")


def check_shared(model: nn.Module, plan: Plan, stages_of: Mapping[str, Sequence[int]]) -> None:
    """Check that tensors in several stages may be there.

    Args:
        stages_of: the stages that hold each tensor (`holders`).

    Raises:
        ValueError: a tensor must stay in one stage.
    """
    for uses in uses_of(model).values():
        if len(stages_of[uses[0][0]]) > 1:
            _check_may_be_shared(uses, stages_of, plan)


def shared_parameters(
    model: nn.Module, layers_of: Mapping[str, tuple[int, ...]]
) -> tuple[SharedParameter, ...]:
    """Return the parameters that several layers hold, and such buffers that training writes to.

    Frozen parameters count no bytes, as in their layers.

    Args:
        layers_of: the layers that hold each tensor, by each of its keys.
    """
    parameters, found = dict(model.named_parameters()), []
    for uses in uses_of(model).values():
        key, stays = uses[0][0], _reason_to_stay(uses)
        if len(layers_of[key]) > 1 and (key in parameters or stays):
            parameter = parameters.get(key)
            num_bytes = parameter.nbytes if parameter is not None and parameter.requires_grad else 0
            found.append(SharedParameter(key, layers_of[key], num_bytes, separable=stays is None))
    return tuple(found)


def uses_of(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return the keys of each parameter and buffer, and the modules that hold it there, by the tensor's id.

    Keys are in the order of the layers.
    """
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), []).append((joined(path, name), module))
    return found


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
        (first, _), (last, _) = uses[0], uses[-1]
        begin, *_, end = stages_of[first]
        what = f"separates {first} (stage {begin}) and {last} (stage {end}), which are one tensor,"
        if first == last:
            what = f"lets stages {begin} and {end} share {first},"
        raise ValueError(
            f"the plan {what} {reason}; keep the layers that share it in one stage, as plan='dp' does"
        )
