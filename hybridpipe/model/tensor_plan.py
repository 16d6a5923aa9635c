"""Tensor plan: the modules of a model whose weights the shards of a replica may have in parts.

Knows modules, their plans and the plan of stages; no messages. The vocabulary of plans is transformers'.
Source: Megatron-LM (Shoeybi et al. 2019, section 3).
Invariant: a plan is taken whole or refused in one line; a part of a plan would train something else.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from hybridpipe.model.held_part import HeldPart
from hybridpipe.model.parallel_plans import StylePlan, entries_of, matched
from hybridpipe.model.plan_fit import uses_of
from hybridpipe.model.stage_module import joined
from hybridpipe.planning.plan import Plan

SHARD = "shard"  # the axis of `Place`


class Cut(NamedTuple):
    """The cut of a parameter, as in a `HeldPart`."""

    dim: int
    packs: int = 1


class Style(NamedTuple):
    """A style of a plan: the modules it is for, and the cuts of their parameters.

    Args:
        kind: of the module; subclasses may do something else in their forward.
        cuts: of its parameters, by name; others are whole.
        stands_alone: inputs and outputs are whole, so that it needs no partner in the module around it.
    """

    kind: type[nn.Module]
    cuts: Mapping[str, Cut]
    stands_alone: bool = False


_ROWS = {"weight": Cut(0), "bias": Cut(0)}
_PACKED = {"weight": Cut(0, packs=2), "bias": Cut(0, packs=2)}
COLUMNS, PACKED_COLUMNS, GATHERED = "colwise", "packed_colwise", "colwise_gather_output"
ROWS, ROWS_OF_WHOLE = "rowwise", "rowwise_split_input"
VOCABULARY, SUMMED_GRADIENT = "embedding_rowwise", "replicated_with_grad_allreduce"
STYLES: Mapping[str, Style] = {
    COLUMNS: Style(nn.Linear, _ROWS),
    PACKED_COLUMNS: Style(nn.Linear, _PACKED),
    GATHERED: Style(nn.Linear, _ROWS, stands_alone=True),
    ROWS: Style(nn.Linear, {"weight": Cut(1)}),
    ROWS_OF_WHOLE: Style(nn.Linear, {"weight": Cut(1)}, stands_alone=True),
    VOCABULARY: Style(nn.Embedding, {"weight": Cut(0)}, stands_alone=True),
    SUMMED_GRADIENT: Style(nn.Module, {}),
}


class SplitModule(NamedTuple):
    """A module that a tensor plan names.

    Args:
        path: its place in the model.
        cuts: of its parameters, by name.
    """

    path: str
    style: str
    cuts: Mapping[str, Cut]

    @property
    def keys(self) -> dict[str, Cut]:
        """The cuts of the parameters that it has in parts, by their keys in the model."""
        return {joined(self.path, name): cut for name, cut in self.cuts.items()}

    def all_keys(self, model: nn.Module) -> list[str]:
        """Return the keys of its own parameters, of those that are whole as well."""
        return [
            joined(self.path, name)
            for name, _ in model.get_submodule(self.path).named_parameters(recurse=False)
        ]

    @property
    def around(self) -> str:
        """The path of the module that stages must call whole, since values inside are in parts."""
        return self.path if STYLES[self.style].stands_alone else self.path.rpartition(".")[0]


def split_modules_of(model: nn.Module, given: StylePlan | None = None) -> list[SplitModule]:
    """Return the modules that a model's tensor plan names, in the order of its modules.

    Args:
        given: style by pattern of modules, where `*` stands for a number or a name, such as
            {"layers.*.up": "colwise", "layers.*.down": "rowwise"}. None: what models of transformers say
            themselves (`tp_plan`).

    Raises:
        ValueError: a pattern names no module, or one of another kind; or a style is none of `STYLES`.
    """
    styles: dict[str, str] = {}
    for entry in entries_of(model, given, "tp_plan", tuple(STYLES), "tensor"):
        for path in matched(model, entry):
            _check_kind(model.get_submodule(path), path, entry.where, STYLES[entry.style])
            styles[path] = entry.style
    found = []
    for path, module in model.named_modules():
        if path in styles:
            of_style = STYLES[styles[path]].cuts
            mine = {name: cut for name, cut in of_style.items() if module._parameters.get(name) is not None}
            found.append(SplitModule(path, styles[path], mine))
    _check_shared(model, found)
    return found


def called_whole(model: nn.Module, given: StylePlan | None = None) -> frozenset[str]:
    """Return the paths of the modules that stages must call whole.

    Args:
        given: as for `split_modules_of`.

    Raises:
        ValueError: as `split_modules_of`.
    """
    return frozenset(each.around for each in split_modules_of(model, given))


def _check_kind(module: nn.Module, path: str, where: str, style: Style) -> None:
    if style.kind is not nn.Module and type(module) is not style.kind:
        raise ValueError(
            f"{where}: {path} must be an nn.{style.kind.__name__}, got {type(module).__name__}: give a plan "
            "without it as tensor_plan"
        )
    if isinstance(module, nn.Embedding) and (
        module.sparse or module.max_norm is not None or module.scale_grad_by_freq
    ):
        raise ValueError(f"{where}: {path} must have no sparse, max_norm or scale_grad_by_freq")
    if style.cuts and module._parameters.get("weight") is None:
        raise ValueError(f"{where}: {path} must have its weight as a parameter, and not parametrised")
    for name, parameter in module.named_parameters(recurse=False):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{where}: {joined(path, name)} must have no hooks: register them later")


def _check_shared(model: nn.Module, found: Sequence[SplitModule]) -> None:
    """Raise ValueError unless parameters in several places are cut alike in all of them."""
    cuts = {key: cut for each in found for key, cut in each.keys.items()}
    for uses in uses_of(model).values():
        keys = [key for key, _ in uses]
        if any(key in cuts for key in keys) and len({cuts.get(key) for key in keys}) > 1:
            told = ", ".join(f"{key} {cuts[key]._asdict() if key in cuts else 'whole'}" for key in keys)
            raise ValueError(
                f"tensor plan: what is one tensor must be cut alike in all its places, got {told}"
            )


def parts_by(
    model: nn.Module,
    plan: Plan,
    modules: Sequence[SplitModule],
    holders: Mapping[str, tuple[int, ...]],
) -> dict[str, HeldPart]:
    """Return the first part of each parameter that a plan's stages have in parts, by its key.

    Args:
        holders: the stages that hold each tensor, by its key.

    Raises:
        ValueError: a stage has nothing to split, or shards that do not divide a weight or its heads.
    """
    found: dict[str, HeldPart] = {}
    groups = set[int]()  # of ranks, that have something to split
    for each in modules:
        for key, cut in each.keys.items():
            counts = {plan.stages[s].tensor for s in holders[key]}
            if len(counts) > 1:
                told = f"must be the same in all stages that hold {key}, got {sorted(counts)}"
                raise ValueError(f"stages[{holders[key][0]}].tensor {told}")
            if (count := counts.pop()) > 1:
                shape = model.get_parameter(key).shape
                found[key] = HeldPart(shape, SHARD, 0, count, cut.dim, cut.packs)
                groups.update(map(plan.group_of, holders[key]))
                _check_divides(model, each, key, found[key], holders[key][0])
    for s, stage in enumerate(plan.stages):
        if stage.tensor > 1 and plan.group_of(s) not in groups:
            named = f"it names {modules[0].path} and so on" if modules else "the model has none"
            raise ValueError(
                f"stages[{s}].tensor must be 1, as the tensor plan names nothing in the stage, got "
                f"{stage.tensor}: {named} (tensor_plan names modules of your own)"
            )
    return found


def _check_divides(model: nn.Module, module: SplitModule, key: str, part: HeldPart, stage: int) -> None:
    size, told = part.whole[part.dim], f"stages[{stage}].tensor must divide"
    if not part.is_possible:
        packed = f"each of the {part.packs} parts of " if part.packs > 1 else ""
        raise ValueError(f"{told} {packed}the {size} of {key}, got {part.count}")
    heads = getattr(model.get_submodule(module.around), "head_dim", None)
    columns = module.style == COLUMNS and type(heads) is int and heads > 0
    if columns and isinstance(heads, int) and size % heads == 0 and size // heads % part.count:
        raise ValueError(f"{told} the {size // heads} heads of {module.path}, got {part.count}")
