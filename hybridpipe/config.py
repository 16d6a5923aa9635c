"""Config of `hybridpipe train`: a TOML file with factories and sizes.

Imports neither torch nor mpi4py, so that mistakes are reported before MPI starts. `load_config` checks the
values, `Config.check` imports the factories and checks their arguments.
"""

import inspect
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from hybridpipe.errors import UserError, suggest
from hybridpipe.files import parse, read_text
from hybridpipe.planning.checks import ON_NONFINITE, non_negative_int, one_of, positive, positive_int
from hybridpipe.planning.cluster import COMPRESSIONS, NO_COMPRESSION
from hybridpipe.planning.request import AUTO, PlanRequest

SOURCES = (AUTO, "dp", "straight")


@dataclass(frozen=True)
class Factory:
    """Callable by name, "module:callable", and its arguments. CONFIG's folder is first on the import path.

    Raises:
        ValueError: the name has another form.
    """

    factory: str
    args: dict[str, Any] = field(default_factory=dict)
    where: str = field(default="", init=False, repr=False, compare=False)  # "digits.toml: model"
    folder: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        module, _, name = self.factory.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise ValueError(f"factory must be 'module:callable', got {self.factory!r}")

    def build(self, *positional: Any) -> Any:
        """Call it and return the result; errors inside the callable keep their traceback.

        Raises:
            UserError: there is no such callable, or the arguments do not fit.
        """
        return self.bind(*positional)()

    def bind(self, *positional: Any) -> Callable[[], Any]:
        """Return the call of `build` after checking its arguments, without making it."""
        return self._bind(positional, self.args, "args")

    def resolve(self) -> Callable[..., Any]:
        """Import and return the callable; UserError if there is none."""
        if self.folder and self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        module_name, _, name = self.factory.partition(":")
        try:
            target: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but an import inside it fails
            found = f"no module {error.name!r} in {self.folder} or on the import path"
            raise UserError(f"{self.where}.factory: {found}, got {self.factory!r}") from None
        for part in name.split("."):
            if not hasattr(target, part):
                names = [each for each in dir(target) if each[0] != "_" and callable(getattr(target, each))]
                found = f"{module_name} has no {part!r}{suggest(part, names)}"
                raise UserError(f"{self.where}.factory: {found}, got {self.factory!r}")
            target = getattr(target, part)
        if callable(target):
            return cast(Callable[..., Any], target)
        kind = type(target).__name__
        raise UserError(f"{self.where}.factory: must name a callable, got {self.factory!r} of type {kind}")

    def _bind(self, positional: tuple[Any, ...], args: dict[str, Any], table: str) -> Callable[[], Any]:
        target = self.resolve()
        try:
            signature = inspect.signature(target)
        except ValueError:  # some built-in callables have none
            return partial(target, *positional, **args)
        try:
            signature.bind(*positional, **args)
        except TypeError as error:
            name = self.factory.partition(":")[2]
            wrong = next((each for each in args if each not in signature.parameters), "")
            hint = suggest(wrong, list(signature.parameters)[len(positional) :])
            raise UserError(f"{self.where}.{table}: {name}() {error}{hint}") from None
        return partial(target, *positional, **args)


@dataclass(frozen=True)
class DataConfig(Factory):
    """Data sets: the factory returns a map-style data set of (inputs, targets).

    Args:
        validation_args: arguments of the held-out data set that replace `args`; None for no such data set.
        num_workers: as in `Trainer`.
    """

    validation_args: dict[str, Any] | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        non_negative_int("num_workers", self.num_workers)

    def build_validation(self) -> Any:
        """Build the held-out data set; None if there is none."""
        return self.bind_validation()()

    def bind_validation(self) -> Callable[[], Any]:
        """Return the call of `build_validation` after checking its arguments, without making it."""
        if self.validation_args is None:
            return lambda: None
        return self._bind((), self.args | self.validation_args, "validation_args")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training; `minibatch` and `microbatch` are sizes in samples.

    `microbatch` is not needed with a plan file. `Trainer.fit` explains the targets, `Trainer` the others.
    """

    minibatch: int
    microbatch: int | None = None
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    clip_grad_norm: float | None = None
    scale_learning_rate: bool = True
    delay_warm_up: int = 0
    compression: str = NO_COMPRESSION
    on_nonfinite: str = "stop"
    target_accuracy: float | None = None
    target_loss: float | None = None

    def __post_init__(self) -> None:
        positive_int("minibatch", self.minibatch)
        if self.microbatch is not None:
            positive_int("microbatch", self.microbatch)
            if self.microbatch > self.minibatch:
                raise ValueError(f"microbatch must be <= minibatch = {self.minibatch}, got {self.microbatch}")
        positive_int("epochs", self.epochs)
        non_negative_int("seed", self.seed)
        if self.clip_grad_norm is not None:
            positive("clip_grad_norm", self.clip_grad_norm)
        non_negative_int("delay_warm_up", self.delay_warm_up)
        one_of("compression", self.compression, COMPRESSIONS)
        one_of("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        if self.target_accuracy is not None:
            positive("target_accuracy", self.target_accuracy)
            if self.target_accuracy > 1:
                raise ValueError(f"target_accuracy must be <= 1, got {self.target_accuracy}")
        if self.target_loss is not None:
            positive("target_loss", self.target_loss)


@dataclass(frozen=True)
class PlanConfig(PlanRequest):
    """Source of the plan, and requirements for a plan that is searched for (`PlanRequest`).

    Args:
        source: one of `SOURCES`, or a plan.json.
        predict: False to run a plan.json without measuring model and machines, which takes some seconds at
            each start; the summary then has no prediction.
    """

    source: str = "auto"
    predict: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in SOURCES and not self.source.endswith(".json"):
            raise ValueError(f"source must be {', '.join(SOURCES)} or a .json file, got {self.source!r}")

    @property
    def request(self) -> dict[str, Any]:
        """Requirements for the plan, as keyword arguments of `Trainer`."""
        return {field.name: getattr(self, field.name) for field in fields(PlanRequest)}


@dataclass(frozen=True)
class CheckpointConfig:
    """Interval of checkpoints in minibatches, and number of those that stay (`Checkpointing`)."""

    every: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every is not None:
            positive_int("every", self.every)
        positive_int("keep", self.keep)


@dataclass(frozen=True)
class Config:
    """Config of a training run.

    Besides their `args`, the factory of the optimizer gets the parameters, and that of the scheduler the
    optimizer. The built loss is called with (outputs, targets) and returns the mean over the samples.
    """

    model: Factory
    data: DataConfig
    optimizer: Factory
    train: TrainConfig
    loss: Factory = field(default_factory=lambda: Factory("torch.nn:CrossEntropyLoss"))
    lr_scheduler: Factory | None = None
    plan: PlanConfig = PlanConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        for name in ("target_accuracy", "target_loss"):
            value = getattr(self.train, name)
            if value is not None and self.data.validation_args is None:
                raise ValueError(
                    f"train.{name} must not be given without data.validation_args, whose samples it is "
                    f"measured on, got {value}"
                )

    def check(self) -> None:
        """Import every factory and check its arguments without calling it; UserError if they do not fit."""
        self.model.bind()
        self.data.bind()
        self.data.bind_validation()
        self.loss.bind()
        self.optimizer.bind(None)  # stands for the parameters
        if self.lr_scheduler is not None:
            self.lr_scheduler.bind(None)  # stands for the optimizer


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read CONFIG, with overrides such as "train.epochs=2" or "model.factory=models:mlp".

    The value of an override is TOML or else a string. A plan file in `plan.source` is relative to CONFIG.

    Raises:
        UserError: the file or an override is wrong.
    """
    path = Path(path)
    try:
        document = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: must be TOML: {error}") from None
    for override in overrides:
        _override(document, override)
    source = f"{path} with --set {' '.join(overrides)}" if overrides else str(path)
    config = parse(Config, document, source)
    if config.plan.source not in SOURCES:
        config = replace(config, plan=replace(config.plan, source=str(path.parent / config.plan.source)))
    for table in ("model", "data", "loss", "optimizer", "lr_scheduler"):
        factory = getattr(config, table)
        if factory is not None:
            object.__setattr__(factory, "where", f"{source}: {table}")
            object.__setattr__(factory, "folder", str(path.resolve().parent))
    return config


def _override(document: dict[str, Any], override: str) -> None:
    """Set one "a.b=value" in the document."""
    key, equals, text = override.partition("=")
    *tables, name = key.strip().split(".")
    if not equals or not tables or not all([*tables, name]):
        raise UserError(f"--set {override}: must be table.key=value, such as train.epochs=2")
    for table in tables:
        document = document.setdefault(table, {})
        if not isinstance(document, dict):
            raise UserError(f"--set {override}: {table} must be a table, got {document!r}")
    text = text.strip()
    try:
        document[name] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text[:1] in tuple("[{\"'"):
            raise UserError(f"--set {override}: must be a TOML value or a bare word: {error}") from None
        document[name] = text
