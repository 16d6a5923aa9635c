"""Parallel plans: which modules of a model a plan names, in the vocabulary of transformers' plans.

Knows modules and dictionaries from patterns to styles; nothing of what a style means.
Invariant: a plan is taken whole or refused in one line; a part of a plan would train something else.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

from hybridpipe.model.stage_module import joined

StylePlan = Mapping[str, str]


class Entry(NamedTuple):
    """An entry of a plan.

    Args:
        where: the entry, for error messages.
        pattern: of modules, where `*` stands for a number or a name.
        is_given: the user has written the plan; else it is the model's own.
    """

    where: str
    pattern: str
    style: str
    is_given: bool


def entries_of(
    model: nn.Module, given: StylePlan | None, attribute: str, styles: Collection[str], kind: str
) -> list[Entry]:
    """Return the entries of a user's plan, or else of the plans that the model's modules have.

    Args:
        attribute: where modules have their plans, such as `tp_plan`.
        styles: that are known.
        kind: of the plan, for error messages; "tensor" has the option `tensor_plan`.

    Raises:
        ValueError: a style is not known.
    """
    plans = {"": given} if given is not None else _own_plans(model, attribute)
    found = []
    for above, plan in plans.items():
        for pattern, style in plan.items():
            entry = Entry(
                f"{kind} plan: {joined(above, pattern)!r}", joined(above, pattern), style, given is not None
            )
            if style not in styles:
                own = (
                    "" if given is not None else f" in the model's own plan: give another one as {kind}_plan"
                )
                known = " or ".join(styles) if len(styles) < 3 else f"one of {', '.join(styles)}"
                raise ValueError(f"{entry.where}: style must be {known}, got {style!r}{own}")
            found.append(entry)
    return found


def _own_plans(model: nn.Module, attribute: str) -> dict[str, StylePlan]:
    """Return the plans of the topmost modules that have one, by their paths."""
    found: dict[str, StylePlan] = {}
    for path, module in model.named_modules():
        plan = getattr(module, attribute, None)
        inside = any(not above or f"{path}.".startswith(f"{above}.") for above in found)
        if isinstance(plan, Mapping) and plan and not inside:
            found[path] = plan
    return found


def matched(model: nn.Module, entry: Entry, pattern: str | None = None) -> list[str]:
    """Return the paths of the modules that an entry, or another pattern in its place, names.

    Raises:
        ValueError: a user's entry names none.
    """
    wanted = entry.pattern if pattern is None else pattern
    found = [path for path, _ in model.named_modules() if _matches(wanted, path)]
    if not found and entry.is_given:
        raise ValueError(f"{entry.where} must name a module of the model, got none")
    return found


def _matches(pattern: str, path: str) -> bool:
    pattern = pattern.removesuffix(".")  # of a module that is named by its own plan
    parts = (re.escape(each).replace(r"\*", "[^.]+") for each in pattern.split("."))
    return re.fullmatch(r"\.".join(parts), path) is not None
