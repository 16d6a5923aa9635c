"""Experts: the modules of a model whose experts the replicas of a stage may share, and a rank's part of them.

Knows modules, their plans and the plan of stages; no messages. The vocabulary of plans is transformers'.
Invariant: a plan is taken whole or refused in one line; a part of a plan would train something else.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.held_part import HeldPart
from hybridpipe.model.holding import hold
from hybridpipe.model.parallel_plans import StylePlan, entries_of, matched
from hybridpipe.model.plan_fit import uses_of
from hybridpipe.model.stage_module import joined
from hybridpipe.planning.plan import Plan

MODULE, PARAMETER = "ep_dispatch_experts", "grouped_gemm"  # the styles of a plan


class Experts(NamedTuple):
    """A module that holds experts: all its parameters have one part an expert, along the first dimension.

    It is called with the tokens, the indices of their experts and the weights of these, shapes
    (tokens, width), (tokens, k) and (tokens, k), and returns the weighted sums of what the experts make of
    the tokens, shape (tokens, width).

    Args:
        path: its place in the model.
        parameters: names of its parameters, within it.
        num_experts: number of its experts.
    """

    path: str
    parameters: tuple[str, ...]
    num_experts: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of its parameters in the model."""
        return tuple(joined(self.path, name) for name in self.parameters)


def experts_of(model: nn.Module, given: StylePlan | None = None) -> list[Experts]:
    """Return the modules of a model that hold experts, in the order of its modules.

    Args:
        given: style by pattern of modules, where `*` stands for a number or a name, such as
            {"layers.*.moe.experts": "ep_dispatch_experts"}. None: what models of transformers say
            themselves (`ep_plan`).

    Raises:
        ValueError: a pattern names no module, or a style that is none of these.
    """
    found = [_experts_at(model, path) for path in _paths(model, given)]
    shared = {key for uses in uses_of(model).values() if len(uses) > 1 for key, _ in uses}
    for each in found:
        if tied := sorted(shared.intersection(each.keys)):
            raise ValueError(f"expert plan: {tied[0]} must be in one place of the model, got several")
    return found


def _paths(model: nn.Module, given: StylePlan | None) -> list[str]:
    """Return the paths of the modules that plans call `ep_dispatch_experts`."""
    wanted: set[str] = set()
    parameters: dict[str, str] = {}
    for entry in entries_of(model, given, "ep_plan", (MODULE, PARAMETER), "expert"):
        if entry.style == MODULE:
            wanted.update(matched(model, entry))
        else:
            owner = entry.pattern.rpartition(".")[0]
            parameters |= dict.fromkeys(matched(model, entry, owner), entry.where)
    for path, where in parameters.items():
        if path not in wanted:
            raise ValueError(f"{where}: its module must be in the plan as {MODULE}, and is not")
    return [path for path, _ in model.named_modules() if path in wanted]


def _experts_at(model: nn.Module, path: str) -> Experts:
    module = model.get_submodule(path)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    counts = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(counts) != 1 or counts == {0}:
        what = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"
        raise ValueError(
            f"expert plan: {path} must hold parameters with one part an expert, along the first dimension, "
            f"got {what}"
        )
    if buffers := [name for name, _ in module.named_buffers()]:
        raise ValueError(f"expert plan: {path} must have no buffers, got {buffers[0]}")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"expert plan: {joined(path, name)} must have no hooks: register them later")
    return Experts(path, tuple(shapes), counts.pop())


def split_by(
    plan: Plan, experts: Sequence[Experts], holders: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Return the stage that splits each of these experts' parameters, by its key; others are whole.

    Args:
        holders: the stages that hold each tensor, by its key.

    Raises:
        ValueError: a stage has no experts to split, or replicas that do not divide their number.
    """
    found = {key: holders[key][0] for each in experts for key in each.keys}
    for each in experts:
        stages = holders[each.keys[0]]
        if len(stages) > 1 and any(map(plan.splits_experts, stages)):
            where = " and ".join(map(str, stages))
            raise ValueError(f"the experts {each.path} must be in one stage to be split, got stages {where}")
    for s in filter(plan.splits_experts, range(plan.num_stages)):
        replicas = plan.replicas[s]
        mine = [each for each in experts if found[each.keys[0]] == s]
        if not mine:
            named = f"the model's are in {experts[0].path} and so on" if experts else "the model names none"
            raise ValueError(
                f"stages[{s}].experts must be false, as the stage holds no experts, got true: {named} "
                "(expert_plan names modules of your own)"
            )
        for each in mine:
            if each.num_experts % replicas:
                told = f"must divide the {each.num_experts} experts of {each.path}, got {replicas}"
                raise ValueError(f"stages[{s}].replicas {told}")
    return {key: s for key, s in found.items() if plan.splits_experts(s)}


def hold_parts(
    model: nn.Module, experts: Sequence[Experts], index: int, count: int, numbers: Numbers | None
) -> None:
    """Let modules of the model hold part `index` of `count` of their experts, and count these.

    Args:
        numbers: of parameters on the meta device.
    """
    keys = (key for each in experts for key in each.keys)
    hold(
        model,
        {key: HeldPart(model.get_parameter(key).shape, "replica", index, count) for key in keys},
        numbers,
    )
    for each in experts:
        module = model.get_submodule(each.path)
        for name, value in vars(module).items():
            if type(value) is int and value == each.num_experts and _counts_experts(name):
                setattr(module, name, each.num_experts // count)


def _counts_experts(name: str) -> bool:
    """Return True if an attribute of this name is a number of experts, not of those that a token has."""
    words = set(name.strip("_").split("_"))
    return "experts" in words and words <= {"n", "num", "local", "routed", "total", "experts"}
