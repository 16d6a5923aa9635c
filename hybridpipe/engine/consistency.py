"""Consistency: ranks compare versions, model, plan and settings before they train together.

Ranks that differ would train something else than the user asked for, or wait for each other for ever.
Invariant: a fact is a short text under a name; the first one that differs is reported on all ranks alike.
"""

import hashlib
import os
import platform
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.collectives.horovod import CYCLE_TIME
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import Wait, rank_status
from hybridpipe.config.options import GroupOptions
from hybridpipe.data.samples import comparable, drawn_anew, fingerprint
from hybridpipe.data.source import Source
from hybridpipe.model.layers import Layers
from hybridpipe.model.tensors import Tree, expanded_dimensions, named_leaves, raw_bytes
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.state import shared_tensors
from hybridpipe.types import Loss
from hybridpipe.version import __version__

_NOTHING = "nothing"
COMPARED = "comparison of settings"  # the name of the wait in reports


def check_alike(world: MPI.Comm, facts: Mapping[str, str], remedy: str = "") -> None:
    """Compare this rank's facts with rank 0's. Collective.

    Args:
        remedy: advice to append to the message.

    Raises:
        ValueError: on all ranks alike, naming the ranks and the first fact that differs.
    """
    if world.size == 1:
        return
    with rank_status.waiting(COMPARED, range(world.size)):
        first: Mapping[str, str] = world.bcast(facts)
        found = world.allgather(_difference(first, facts))
    told = next((each for each in found if each is not None), None)
    if told is None:
        return
    name, here, there = told
    ranks = [rank for rank, each in enumerate(found) if each == told]
    who = f"ranks {', '.join(map(str, ranks))} have" if len(ranks) > 1 else f"rank {ranks[0]} has"
    what = f"{name} must be the same on all ranks: rank 0 has {here}, {who} {there}"
    raise ValueError(f"{what}; {remedy}" if remedy else what)


def check_arguments(
    world: MPI.Comm,
    model: nn.Module,
    loss: Loss,
    rule: UpdateRule,
    plan: Plan | str,
    metrics: Mapping[str, Callable[..., Any]],
    **settings: object,
) -> None:
    """Check that every rank was given the same arguments of a training (`facts`). Collective."""
    texts = {name: callable_text(metric) for name, metric in metrics.items()}
    check_alike(world, facts(model, loss, rule, plan, **settings, metrics=texts))


def check_data_alike(world: MPI.Comm, name: str, source: Source, seed: int) -> dict[str, str]:
    """Compare the length of a data set and a few of its samples. Collective.

    Returns:
        the facts that are the same on all ranks.

    Raises:
        TypeError, ValueError: the ranks pass different data sets, or one that cannot be trained on.
    """
    own = fingerprint(name, source, seed)
    with rank_status.waiting(COMPARED, range(world.size)):
        anew = set().union(*world.allgather(drawn_anew(own)))
    if anew and source.is_iterable:
        raise ValueError(
            f"{name} gives other samples each time it is iterated, so neither ranks nor a resumed training "
            "would read the same: let __iter__ begin anew each time, and draw random numbers from torch, "
            "random or numpy.random only, or from generators seeded in __iter__"
        )
    alike = comparable(own, anew)
    whole = "every rank passes the whole data set, of which hybridpipe loads each rank's part itself"
    check_alike(world, alike, remedy=whole)
    return alike


def check_repeatable(plan: Plan, facts_of_data: Mapping[str, str], layers: Layers) -> None:
    """Check that each load of a sample gives the same values, where several ranks load it.

    Args:
        layers: the model's; stages behind the first may need inputs as well, such as masks.

    Raises:
        ValueError: targets, or inputs, change from load to load, and several ranks load them.
    """
    anew = drawn_anew(facts_of_data)
    later = (layers.stage(stage.start, stage.stop) for stage in plan.stages[1:])
    several = plan.splits_tensors or any(stage.needs_inputs(training=True) for stage in later)
    part = "target" if "target" in anew else "input" if "inputs" in anew and several else None
    if part is not None and (plan.num_stages > 1 or plan.splits_tensors):
        raise ValueError(
            f"a sample's {part} changes each time it is loaded, so inputs and targets, which different ranks "
            "load, would not match: draw random numbers from torch, random or numpy.random only"
        )


def check_same_minibatch(world: MPI.Comm, inputs: Tree, targets: Tree) -> None:
    """Compare the shapes and the first and last sample of an in-memory minibatch. Collective.

    Raises:
        ValueError: the ranks' minibatches differ; raised on all ranks alike.
    """
    if world.size == 1:
        return
    digest = 0
    for key, leaf in named_leaves(inputs=inputs, targets=targets):
        if not isinstance(leaf, Tensor):
            digest = zlib.crc32(f"{key} {leaf!r}".encode(), digest)
            continue
        digest = zlib.crc32(f"{key} {leaf.dtype} {tuple(leaf.shape)}".encode(), digest)
        for sample in (leaf[:1], leaf[-1:]) if leaf.ndim else (leaf,):
            digest = zlib.crc32(raw_bytes(sample), digest)
    extremes = np.array([digest, -digest])
    rank_status.wait = Wait(COMPARED, tuple(range(world.size)))
    world.Allreduce(MPI.IN_PLACE, extremes, op=MPI.MIN)
    rank_status.wait = None
    if extremes[0] != -extremes[1]:
        raise ValueError(
            "train_step: inputs and targets must be the same on all ranks, and they differ: every rank "
            "passes the whole minibatch, of which hybridpipe takes each rank's part itself"
        )


def _difference(first: Mapping[str, str], own: Mapping[str, str]) -> tuple[str, str, str] | None:
    for name in dict.fromkeys([*first, *own]):
        here, there = first.get(name, _NOTHING), own.get(name, _NOTHING)
        if here != there:
            return name, here, there
    return None


def facts(
    model: nn.Module, loss: Loss, rule: UpdateRule, plan: Plan | str, **settings: object
) -> dict[str, str]:
    """Return the facts that must be the same on all ranks that train together, by name."""
    return {
        "the version of hybridpipe": __version__,
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        CYCLE_TIME: os.environ.get(CYCLE_TIME, _NOTHING),  # Horovod's tensor fusion depends on it
        **{name: repr(value) for name, value in settings.items()},
        "plan": plan_text(plan) if isinstance(plan, Plan) else repr(str(plan)),
        "loss": callable_text(loss),
        **{field.name: _text(getattr(rule, field.name)) for field in fields(rule)},
        **structure(model),
    }


def structure(model: nn.Module) -> dict[str, str]:
    """Return a model's layer types, tensor shapes and dtypes, modes and requires_grad flags, by name."""
    layers = {f"layer {name} of the model": type(layer).__name__ for name, layer in model.named_children()}
    tensors = {f"{name} of the model": _described(tensor) for name, tensor in shared_tensors(model).items()}
    return layers | tensors | modes_and_requires_grad(model)


def modes_and_requires_grad(model: nn.Module) -> dict[str, str]:
    """Return the facts that users may change at any time: modes of modules and requires_grad flags.

    Shapes of buffers are left out, since a layer may grow its buffers on the ranks that run it.
    """
    modes = {
        f"the mode of {name or 'the model'}": "training" if module.training else "evaluation"
        for name, module in model.named_modules()
    }
    trained = {
        f"requires_grad of {name}": str(parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    return modes | trained


def _described(tensor: Tensor) -> str:
    form = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    expanded = f" expanded along {expanded_dimensions(tensor)}" if expanded_dimensions(tensor) else ""
    return f"{form}{expanded}"


def plan_text(plan: Plan) -> str:
    """Return a plan's name, schedule and digest in one line; its prediction does not count."""
    digest = _digest(repr(replace(plan, predicted=None)).encode())
    return f"{plan.name} under {plan.schedule} ({digest})"


def settings(model: nn.Module, loss: Loss, rule: UpdateRule, groups: GroupOptions) -> dict[str, str]:
    """Return the settings, beside optimizer, scheduler and data, that a resumed training must not change.

    `optimizer_per_stage` is none: it allows what a plan would refuse, and each start asks for it again.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    of_groups = asdict(groups) if groups.count > 1 else {"count": 1}
    return {
        "loss": callable_text(loss, with_code=True),
        "clip_grad_norm": repr(rule.clip_grad_norm),
        "scale_learning_rate": repr(rule.scale_learning_rate),
        "delay_warm_up": repr(rule.delay_warm_up),
        "compression": repr(rule.compression),
        "precision": repr(rule.precision),
        "sync_batchnorm": repr(rule.sync_batchnorm),
        "frozen parameters": ", ".join(frozen) or "none",
        **{f"groups.{name}": repr(value) for name, value in of_groups.items()},
    }


def callable_text(function: Callable[..., Any], with_code: bool = False) -> str:
    """Describe a callable by names and options without addresses, so that all processes give one text.

    Args:
        with_code: add a hash of a user's code and of the plain values that it closes over. Those values may
            differ between ranks.
    """
    if isinstance(function, partial):
        given = [*map(_text, function.args), *(f"{k}={_text(v)}" for k, v in function.keywords.items())]
        return f"{callable_text(function.func, with_code)}({', '.join(given)})"
    if isinstance(function, nn.Module):
        options = {
            name: value for name, value in vars(function).items() if name[0] != "_" and name != "training"
        }
        shown = [f"{name}={_text(value)}" for name, value in options.items()]
        shown += [f"{name}={_digest(raw_bytes(tensor))}" for name, tensor in function.state_dict().items()]
        return f"{type(function).__name__}({', '.join(shown)})"
    name = str(getattr(function, "__qualname__", type(function).__name__))
    code = getattr(function, "__code__", None)
    if code is None or not with_code or str(getattr(function, "__module__", "")).startswith("torch."):
        return name
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return (
        f"{name} ({_digest(_code_bytes(code) + repr([each for each in cells if _is_plain(each)]).encode())})"
    )


def _code_bytes(code: CodeType) -> bytes:
    """Return a function's bytecode, names and constants; line numbers do not count."""
    inner = [
        _code_bytes(each) if isinstance(each, CodeType) else repr(each).encode() for each in code.co_consts
    ]
    return code.co_code + repr((code.co_names, inner)).encode()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _text(value: object) -> str:
    if _is_plain(value):
        return repr(value)
    if isinstance(value, Tensor):
        return _digest(raw_bytes(value))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return callable_text(value) if callable(value) else type(value).__name__
