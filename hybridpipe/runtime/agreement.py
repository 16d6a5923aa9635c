"""Agreement: before ranks start together they compare what must be the same on all of them.

Ranks with another version, model or setting would train something that nobody asked for, or wait for each
other for ever. Facts are short texts under a name, in an order; the first that differs is told.
"""

import hashlib
import os
import platform
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import hybridpipe
from hybridpipe.planning.plan import Plan
from hybridpipe.runtime.gradients import CYCLE_TIME
from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.update import UpdateRule
from hybridpipe.stage.stage import Loss
from hybridpipe.stage.values import Value, raw_bytes, tensors_of

_NOTHING = "nothing"


def check_alike(world: MPI.Comm, facts: Mapping[str, str], remedy: str = "") -> None:
    """Compare this rank's facts with rank 0's. Collective.

    Args:
        remedy: added to the message.

    Raises:
        ValueError: on all ranks alike, naming the ranks and the first fact that differs.
    """
    if world.size == 1:
        return
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


def check_same_minibatch(world: MPI.Comm, value: Value) -> None:
    """Compare the shapes, and the first and last sample, of a minibatch that is in memory. Collective.

    Raises:
        ValueError: on all ranks alike, if they differ.
    """
    if world.size == 1:
        return
    digest = 0
    for tensor in tensors_of(value):
        digest = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest)
        for sample in (tensor[:1], tensor[-1:]):
            digest = zlib.crc32(raw_bytes(sample), digest)
    extremes = np.array([digest, -digest])
    world.Allreduce(MPI.IN_PLACE, extremes, op=MPI.MIN)
    if extremes[0] != -extremes[1]:
        raise ValueError(
            "train_step: inputs and targets must be the same on all ranks, and are not: every rank passes "
            "the whole minibatch, of which hybridpipe takes each rank's part itself"
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
    """What must be the same wherever a model is trained together."""
    return {
        "the version of hybridpipe": hybridpipe.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        CYCLE_TIME: os.environ.get(CYCLE_TIME, _NOTHING),  # what Horovod joins depends on it
        **{name: repr(value) for name, value in settings.items()},
        "plan": plan_text(plan) if isinstance(plan, Plan) else repr(str(plan)),
        "loss": callable_text(loss),
        **{field.name: _text(getattr(rule, field.name)) for field in fields(rule)},
        **structure(model),
    }


def structure(model: nn.Module) -> dict[str, str]:
    """Names, shapes and types of what a model trains and keeps, and what its layers are."""
    layers = {f"layer {name} of the model": type(layer).__name__ for name, layer in model.named_children()}
    tensors = {
        f"{name} of the model": f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in model.state_dict().items()
    }
    return layers | tensors


def plan_text(plan: Plan) -> str:
    """Short enough for a line; what a plan predicts does not count."""
    digest = hashlib.sha256(repr(replace(plan, predicted=None)).encode()).hexdigest()[:8]
    return f"{plan.name} under {plan.schedule} ({digest})"


def callable_text(function: Callable[..., Any]) -> str:
    """What is the same in all processes of what a callable is: no addresses."""
    if isinstance(function, partial):
        given = [*map(_text, function.args), *(f"{k}={_text(v)}" for k, v in function.keywords.items())]
        return f"{callable_text(function.func)}({', '.join(given)})"
    return str(getattr(function, "__qualname__", type(function).__name__))


def _text(value: object) -> str:
    if isinstance(value, str | int | float | None):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return callable_text(value) if callable(value) else type(value).__name__
