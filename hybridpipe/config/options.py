"""Options of a training: what belongs together, as an argument of `Trainer` and as a table of a config.

Not known here: torch and MPI, but for their types. Invariant: options that exist are in range.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hybridpipe.errors import UserError, suggest
from hybridpipe.files import read_plan
from hybridpipe.planning.checks import (
    AUTO_SYNC,
    BACKENDS,
    GROUP_RULES,
    NO_COMPRESSION,
    ON_NONFINITE,
    PRECISIONS,
    integer,
    non_negative,
    non_negative_int,
    one_of,
    positive,
    positive_int,
)
from hybridpipe.planning.cluster import Cluster, check_compression
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.quantities import memory_bytes
from hybridpipe.planning.request import AUTO, PlanRequest
from hybridpipe.planning.schedules.registry import DEFAULT

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from hybridpipe.types import Collate

SOURCES = (AUTO, "dp", "straight")
DEFAULT_HANG_SECONDS = 300.0  # the first step of a large model, or a slow file system, may take minutes

PlanLike = Plan | PlanRequest | str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanRequest):
    """The source of the plan, and what one that is searched for has to meet: the table [plan].

    Args:
        source: "auto" measures model and machines and searches; "dp" is data parallelism on all ranks;
            "straight" is a pipeline with one rank a stage; or the path of a plan.json.
        predict: measure model and machines also for a given plan. That takes seconds at each start; without
            it a prediction is shown only if the plan's file has one, of the machines that it was made for.
        memory: the most bytes that each rank may have, such as "2GB"; None for the limits that are found.
        expert_plan: names the modules that hold experts, for stages that split them (`StageSpec.experts`),
            such as {"layers.*.moe.experts": "ep_dispatch_experts"}; None: as transformers' models say.
        tensor_plan: names the modules whose weights shards share (`StageSpec.tensor`), such as
            {"layers.*.up": "colwise", "layers.*.down": "rowwise"}; None: as transformers' models say.

    Raises:
        ValueError: no plan has that source, or a value is out of range.
    """

    source: str = AUTO
    predict: bool = False
    memory: int | str | None = None
    expert_plan: Mapping[str, str] | None = None
    tensor_plan: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "source", os.fspath(self.source))
        if self.source not in SOURCES and not self.source.endswith(".json"):
            raise ValueError(f"source must be {', '.join(SOURCES)} or a .json file, got {self.source!r}")
        if self.memory is not None:
            memory_bytes("memory", self.memory)
        for name in ("expert_plan", "tensor_plan"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _styles(name, given))


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of updates, as in the table [train].

    Args:
        clip_grad_norm: largest norm of the whole model's gradient, to which larger ones are scaled down. Not
            under asynchronous schedules, where no such norm exists.
        scale_learning_rate: under pipedream, multiply a stage's learning rate by its replicas over the first
            stage's, because it updates more seldom by that factor (PipeDream's code).
        delay_warm_up: under asynchronous schedules, but not pipedream-2bw: number of minibatches in which a
            stage whose gradients are d updates late takes smaller steps, at first by d (PipeMare, 2021).
        precision: "bf16" and "fp16" compute the forward under autocast, and send float32 values and gradients
            over cuts in 16 bits; "bf16-params" also casts matrices, once an update.
        compression: "fp16" sends float32 gradients as float16, between replicas and between stages that
            share a parameter: three digits, up to 65504.
        on_nonfinite: where a loss or gradient is NaN or infinite: "stop" ends the job and names it, "skip"
            leaves the update out, on all ranks or an asynchronous stage's replicas; "ignore" does not check.
        sync_batchnorm: consecutive microbatches that BatchNorm normalises together, on as many replicas; each
            stage with BatchNorm must have a multiple of it. At 1 each replica normalises by itself, but
            for `nn.SyncBatchNorm`, which normalises those of all replicas of its stage.
        optimizer_per_stage: allow an optimizer that looks beyond a parameter, or under `zero` beyond an
            element: at those of its stage, or at its replica's share.

    Raises:
        ValueError: a value is out of range.
    """

    clip_grad_norm: float | None = None
    scale_learning_rate: bool = True
    delay_warm_up: int = 0
    precision: str = "fp32"
    compression: str = NO_COMPRESSION
    on_nonfinite: str = "stop"
    sync_batchnorm: int = 1
    optimizer_per_stage: bool = False

    def __post_init__(self) -> None:
        if self.clip_grad_norm is not None and self.clip_grad_norm != math.inf:  # that only measures it
            positive("clip_grad_norm", self.clip_grad_norm)
        _set_integer(self, "delay_warm_up", least=0)
        _set_integer(self, "sync_batchnorm", least=1)
        one_of("precision", self.precision, PRECISIONS)
        check_compression(self.compression)
        one_of("on_nonfinite", self.on_nonfinite, ON_NONFINITE)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of drawing and loading samples.

    Args:
        seed: of the order of samples and of all random numbers of layers and data sets; 64 bits.
        num_workers: loader processes of each rank that loads samples; 0 loads them when they are needed.
        collate_fn: makes (inputs, targets), or a dict that is both, of a list of samples; None stacks them.

    Raises:
        TypeError: `collate_fn` is no function.
        ValueError: a number is no integer, or out of range.
    """

    seed: int = 0
    num_workers: int = 0
    collate_fn: "Collate | None" = None

    def __post_init__(self) -> None:
        _set_integer(self, "seed")
        _set_integer(self, "num_workers", least=0)
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(f"collate_fn must be a function of a list of samples, got {self.collate_fn!r}")


# Options of [groups] that one rule alone uses.
_RULE_OF = {"moving_rate": "elastic", "outer_lr": "diloco", "outer_momentum": "diloco", "delay": "diloco"}


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Groups that each train a copy of the model and exchange weights now and then: the table [groups].

    Each has its part of the ranks, all under one plan, and trains on its part of each minibatch.

    Args:
        count: number of groups; it divides the ranks and the minibatch.
        every: updates between two exchanges.
        rule: "average": all groups take the mean of their weights. "elastic": each group moves towards a
            centre, which moves towards all of them (EASGD: Zhang et al. 2015, equations 5 and 6). "diloco":
            the centre takes a step of Nesterov's momentum along the mean difference, and all groups take the
            centre (Douillard et al. 2023, algorithm 1).
        moving_rate: of "elastic": the part of its distance by which a group moves; None: 0.9 / count.
        outer_lr, outer_momentum: of "diloco".
        fragments: parts of the model, as large as each other, that are exchanged in turn, each after `every`
            updates (Streaming DiLoCo: Douillard et al. 2025, section 2.1).
        delay: of "diloco": updates between an exchange's begin and the use of its result, during which it
            travels (section 2.2 there).
        mixing: with `delay`: the part that a group keeps of its own weights, which have moved meanwhile
            (equation 3 there).

    Raises:
        ValueError: a value is out of range.
    """

    count: int = 1
    every: int = 32
    rule: str = "diloco"
    moving_rate: float | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.5

    def __post_init__(self) -> None:
        for name in ("count", "every", "fragments"):
            positive_int(name, getattr(self, name))
        one_of("rule", self.rule, GROUP_RULES)
        if self.moving_rate is not None:
            positive("moving_rate", self.moving_rate)
            if self.moving_rate > 1:
                raise ValueError(f"moving_rate must be <= 1, got {self.moving_rate!r}")
        positive("outer_lr", self.outer_lr)
        for name in ("outer_momentum", "mixing"):
            non_negative(name, getattr(self, name))
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be a number < 1, got {getattr(self, name)!r}")
        if self.fragments > self.every:
            raise ValueError(f"fragments must be <= every = {self.every}, got {self.fragments}")
        non_negative_int("delay", self.delay)
        if self.delay >= self.every:
            raise ValueError(f"delay must be < every = {self.every}, got {self.delay}")
        given = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        for name, rule in _RULE_OF.items():
            if name in given and self.rule != rule:
                raise ValueError(f"{name} goes with rule = {rule!r}, got rule = {self.rule!r}")
        if "mixing" in given and not self.delay:
            raise ValueError("mixing goes with delay > 0, got delay = 0")

    @property
    def memory_factor(self) -> float:
        """Memory in units of the weights: centre, the momentum of "diloco", and a fragment on its way."""
        kept = 2 if self.rule == "diloco" else 1
        return 0.0 if self.count == 1 else kept + 1 / self.fragments


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options of the ranks: who trains together, on what, and how long one waits for another.

    Args:
        world: the ranks that train together; by default MPI.COMM_WORLD.
        device: of this rank; by default its own of the GPUs that it sees, else the CPU.
        cluster: a `Cluster` or the path of a cluster.json of as many ranks, instead of a measurement.
        sync: sums gradients over replicas: "horovod", "mpi", "torch" (gloo, or NCCL), or "auto", which is
            Horovod where it is installed, unless another was measured to be faster.
        hang_timeout: seconds in one instruction or one wait for other ranks, after which a rank reports the
            state of every rank and ends the job; 0 for never.
        groups: `GroupOptions`, for ranks that synchronise at each update within a group only.

    Raises:
        TypeError: `groups` is something else.
        ValueError: a value is out of range.
    """

    world: "MPI.Comm | None" = None
    device: "torch.device | str | None" = None
    cluster: Cluster | str | os.PathLike[str] | None = None
    sync: str = AUTO_SYNC
    hang_timeout: float = DEFAULT_HANG_SECONDS
    groups: GroupOptions = GroupOptions()

    def __post_init__(self) -> None:
        if not isinstance(self.groups, GroupOptions):
            raise TypeError(f"groups must be GroupOptions, got {self.groups!r}")
        one_of("sync", self.sync, (AUTO_SYNC, *BACKENDS))
        non_negative("hang_timeout", self.hang_timeout)


# Fields that `Trainer` also takes by themselves, as keywords; `source` is its argument `plan`.
SINGLE = {
    each.name: kind
    for kind in (PlanOptions, UpdateOptions, DataOptions, RankOptions)
    for each in fields(kind)
    if each.name != "source"
}


@dataclass(frozen=True)
class Options:
    """All options of a training.

    Args:
        given: the plan, or a name of SOURCES.
        plan: its `source` does not count; `given` does.
    """

    given: Plan | str
    plan: PlanOptions
    update: UpdateOptions
    data: DataOptions
    ranks: RankOptions


def gathered(
    plan: PlanLike,
    update: UpdateOptions,
    data: DataOptions,
    ranks: RankOptions,
    single: Mapping[str, Any],
) -> Options:
    """Return the options with single fields of them set, and the plan read.

    A given plan's schedule takes the place of the default one.

    Args:
        single: values by names of SINGLE.

    Raises:
        TypeError: an argument has another type.
        ValueError: a value is out of range.
        UserError: there is no such plan, or its file cannot be read.
    """
    for kind, value in ((UpdateOptions, update), (DataOptions, data), (RankOptions, ranks)):
        if not isinstance(value, kind):
            raise TypeError(f"{kind.__name__}, or a field of it by its name, must be given, got {value!r}")

    def of(kind: type) -> dict[str, Any]:
        return {name: value for name, value in single.items() if SINGLE[name] is kind}

    options = of(PlanOptions)
    if isinstance(plan, PlanRequest):
        options = values(plan) | options
        plan = plan.source if isinstance(plan, PlanOptions) else AUTO
    given = read_given(plan)
    if isinstance(given, Plan) and options.get("schedule", DEFAULT) == DEFAULT:
        options["schedule"] = given.schedule
    return Options(
        given,
        PlanOptions(**options),
        replace(update, **of(UpdateOptions)),
        replace(data, **of(DataOptions)),
        replace(ranks, **of(RankOptions)),
    )


def values(options: Any, kind: type | None = None) -> dict[str, Any]:
    """Return the fields of options by name.

    Args:
        kind: only those of this dataclass.
    """
    return {each.name: getattr(options, each.name) for each in fields(kind or options)}


def read_given(plan: Plan | str | os.PathLike[str]) -> Plan | str:
    """Return a plan, read from a file if it is a path, or a name of SOURCES.

    Raises:
        TypeError: the argument has another type.
        UserError: it is no known name, or the file cannot be read.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise TypeError(f"plan must be a Plan, a path or one of {', '.join(SOURCES)}, got {plan!r}")
    if plan in SOURCES:
        return str(plan)
    path = os.fspath(plan)
    if isinstance(plan, str) and not os.path.splitext(path)[1] and not os.path.exists(path):
        hint = suggest(plan, SOURCES)
        raise UserError(f"plan must be a Plan, the path of a plan.json or a name, got {plan!r}{hint}")
    return read_plan(path)


def _styles(name: str, plan: object) -> dict[str, str]:
    """Return a mapping from patterns of modules to styles; ValueError for anything else."""
    words = [*plan, *plan.values()] if isinstance(plan, Mapping) else [None]
    if not isinstance(plan, Mapping) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{name} must map patterns of modules to styles, got {plan!r}")
    return dict(plan)


def _set_integer(options: Any, name: str, least: int = -(2**63)) -> None:
    object.__setattr__(options, name, integer(name, getattr(options, name), least))
