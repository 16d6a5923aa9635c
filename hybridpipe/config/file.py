"""Config: the TOML file of `hybridpipe train CONFIG`, which names factories and sizes.

Not known here: torch and MPI. Invariant: mistakes are reported before MPI starts; `load_config` checks the
text, `Config.check` imports the factories and checks their arguments.
"""

import inspect
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from hybridpipe.config.options import SOURCES, GroupOptions, PlanOptions, UpdateOptions
from hybridpipe.errors import REMEDIES, UserError, suggest
from hybridpipe.files import parse, read_text
from hybridpipe.planning.checks import (
    AUTO_SYNC,
    BACKENDS,
    non_negative_int,
    one_of,
    positive,
    positive_int,
)

LOGGERS = ("csv", "tensorboard", "mlflow")


@dataclass(frozen=True)
class Factory:
    """A callable's name, "module:callable", and its keyword arguments.

    The folder of CONFIG comes first on the import path.

    Raises:
        ValueError: `factory` is no such name.
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
        """Call it with `positional` and its own arguments; errors inside it keep their traceback.

        Raises:
            UserError: there is no such callable, or the arguments do not fit it.
        """
        return self.bind(*positional)()

    def bind(self, *positional: Any) -> Callable[[], Any]:
        """Return the call of `build`, checked but not made yet. Raises UserError as `build` does."""
        return self._bind(positional, self.args, "args")

    def bound(self) -> Callable[..., Any]:
        """Return the callable with its own arguments, which takes one more. Raises UserError as `build`."""
        self.bind(None)  # stands for the argument
        return partial(self.resolve(), **self.args)

    def resolve(self) -> Callable[..., Any]:
        """Import the callable.

        Raises:
            UserError: there is none of that name.
        """
        if self.folder and self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        module_name, _, name = self.factory.partition(":")
        try:
            target: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name in REMEDIES or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # one of the module's own imports fails, or torch is not installed
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
class ModelConfig(Factory):
    """The model.

    Args:
        materialize: "all": a rank makes the weights of the whole model; "stage": those of its stage.

    Raises:
        ValueError: `materialize` is another word.
    """

    materialize: str = "stage"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("materialize", self.materialize, ("all", "stage"))


@dataclass(frozen=True)
class DataConfig(Factory):
    """The data sets: the factory returns one, or a DataLoader of one (`hybridpipe.data.source.source_of`).

    Args:
        validation_args: replace or extend `args` for the held-out set; None: there is none.
        num_workers: as in `Trainer`.
    """

    validation_args: dict[str, Any] | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        non_negative_int("num_workers", self.num_workers)

    def build_validation(self) -> Any:
        """Build the held-out data set; None: there is none."""
        return self.bind_validation()()

    def bind_validation(self) -> Callable[[], Any]:
        """Return the call of `build_validation`, checked but not made yet. Raises UserError as `build`."""
        if self.validation_args is None:
            return lambda: None
        return self._bind((), self.args | self.validation_args, "validation_args")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(UpdateOptions):
    """The training loop. Fields that are not listed here are those of `Trainer.fit`.

    Args:
        minibatch: samples of a minibatch.
        epochs: None: one, or with `max_steps` as many as that takes.
        microbatch: samples of a microbatch; None for a plan file's, else for a rank's share of the minibatch,
            of which the plan "auto" also tries a half and a quarter.
    """

    minibatch: int
    microbatch: int | None = None
    epochs: int | None = None
    max_steps: int | None = None
    eval_every: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    target_accuracy: float | None = None
    target_loss: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int("minibatch", self.minibatch)
        if self.microbatch is not None:
            positive_int("microbatch", self.microbatch)
            if self.microbatch > self.minibatch:
                raise ValueError(f"microbatch must be <= minibatch = {self.minibatch}, got {self.microbatch}")
        for name in ("epochs", "max_steps", "eval_every"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        non_negative_int("seed", self.seed)
        if self.target_accuracy is not None:
            positive("target_accuracy", self.target_accuracy)
            if self.target_accuracy > 1:
                raise ValueError(f"target_accuracy must be <= 1, got {self.target_accuracy}")
        if self.target_loss is not None:
            positive("target_loss", self.target_loss)

    @property
    def most_epochs(self) -> int:
        """Number of epochs after which the training ends at the latest."""
        return self.epochs or self.max_steps or 1  # an epoch has a minibatch at least


@dataclass(frozen=True)
class SyncConfig:
    """The sums of gradients over a stage's replicas.

    Args:
        backend: as `sync` of `Trainer`.
    """

    backend: str = AUTO_SYNC

    def __post_init__(self) -> None:
        one_of("backend", self.backend, (AUTO_SYNC, *BACKENDS))


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints in OUT/checkpoints.

    Args:
        every: minibatches between two; None: one at the end of each epoch.
        keep: number of checkpoints that are kept.
    """

    every: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every is not None:
            positive_int("every", self.every)
        positive_int("keep", self.keep)


@dataclass(frozen=True)
class LogConfig:
    """Destinations of figures besides OUT/metrics.jsonl.

    Args:
        to: names of LOGGERS: OUT/log.csv, event files in OUT/tensorboard, a run of MLflow.
        every: minibatches between two that are logged.
    """

    to: tuple[str, ...] = ()
    every: int = 1

    def __post_init__(self) -> None:
        for name in self.to:
            one_of("to", name, LOGGERS)
        positive_int("every", self.every)


@dataclass(frozen=True)
class Config:
    """A training run.

    Args:
        loss: called without positional arguments; maps (outputs, targets) to the mean over the samples, or
            to (sum, weight).
        optimizer: called with the parameters.
        lr_scheduler: called with the optimizer.
        callbacks: each returns a `hybridpipe.Callback`.

    Raises:
        ValueError: a target or `eval_every` is given without a validation set.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: Factory
    train: TrainConfig
    loss: Factory = field(default_factory=lambda: Factory("torch.nn:CrossEntropyLoss"))
    lr_scheduler: Factory | None = None
    plan: PlanOptions = PlanOptions()
    sync: SyncConfig = SyncConfig()
    groups: GroupOptions = GroupOptions()
    checkpoint: CheckpointConfig = CheckpointConfig()
    callbacks: tuple[Factory, ...] = ()
    log: LogConfig = LogConfig()
    where: str = field(default="", init=False, repr=False, compare=False)  # "digits.toml with --set ..."

    def __post_init__(self) -> None:
        for name in ("target_accuracy", "target_loss", "eval_every"):
            value = getattr(self.train, name)
            if value is not None and self.data.validation_args is None:
                raise ValueError(
                    f"train.{name} must not be given without data.validation_args, whose samples it is "
                    f"measured on, got {value}"
                )

    def settings(self) -> dict[str, Any]:
        """Return the settings that are not their defaults, by table and name; of `callbacks` a list."""
        return dict(_changed(self))

    def check(self) -> None:
        """Import every factory and check that its arguments fit, without calling it.

        Raises:
            UserError: a factory does not exist, or its arguments do not fit.
        """
        self.model.bind()
        self.data.bind()
        self.data.bind_validation()
        self.loss.bind()
        self.optimizer.bind(None)  # stands for the parameters
        if self.lr_scheduler is not None:
            self.lr_scheduler.bind(None)  # stands for the optimizer
        for callback in self.callbacks:
            callback.bind()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a TOML file. A plan file in `plan.source` is relative to it.

    Args:
        overrides: fields and values, such as "train.epochs=2" or "model.factory=models:mlp". A value is TOML,
            or else a string.

    Raises:
        UserError: a mistake in one line: file, field, value and what is allowed.
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
    tables = {name: getattr(config, name) for name in ("model", "data", "loss", "optimizer", "lr_scheduler")}
    tables |= {f"callbacks[{i}]": callback for i, callback in enumerate(config.callbacks)}
    for table, factory in tables.items():
        if factory is not None:
            object.__setattr__(factory, "where", f"{source}: {table}")
            object.__setattr__(factory, "folder", str(path.resolve().parent))
    object.__setattr__(config, "where", source)
    return config


def _changed(value: Any) -> Any:
    """Return a dataclass's fields that differ from their defaults, by name, at any depth."""
    if isinstance(value, tuple):
        return [_changed(item) for item in value]
    if not is_dataclass(value):
        return value
    given = {each: getattr(value, each.name) for each in fields(value) if each.init}
    return {
        each.name: _changed(item)
        for each, item in given.items()
        if item != (each.default if each.default_factory is MISSING else each.default_factory())
    }


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
