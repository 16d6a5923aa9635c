"""Loggers: callbacks that write a training's figures where people look at them.

Only rank 0 writes. Invariant: a figure's step is the number of minibatches trained on before it was made.
"""

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hybridpipe.errors import UserError
from hybridpipe.planning.checks import positive_int
from hybridpipe.training.callbacks import Callback, Run
from hybridpipe.training.metrics import MinibatchRecord


class Logger(Callback, ABC):
    """Base class: figures as scalars by name. A logger of your own overrides `begin`, `log` and `end`.

    Args:
        every: minibatches between two that are logged.

    Raises:
        ValueError: `every` is no integer >= 1.
    """

    def __init__(self, every: int = 1) -> None:
        positive_int("every", every)
        self._every = every
        self._last: dict[str, float] = {}

    def begin(self, settings: Mapping[str, str | int | float]) -> None:
        """Open what is written to; called on rank 0, when a `fit` begins."""

    @abstractmethod
    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars; called on rank 0."""

    def end(self, scalars: Mapping[str, float]) -> None:
        """Close it; called on rank 0 with the last figures when `fit` ends."""

    def on_fit_start(self, run: Run) -> None:
        """Open what is written to."""
        self._last = {}
        if run.rank == 0:
            self.begin(run.settings)

    def on_minibatch(self, run: Run, record: MinibatchRecord) -> None:
        """Log loss, speed, learning rate and the gradient's norm, beside what was predicted."""
        if run.rank != 0 or record.step % self._every:
            return
        scalars = {"train/loss": record.loss, "train/epoch": float(record.epoch)}
        scalars["speed/minibatch_seconds"] = record.seconds
        scalars["speed/samples_per_second"] = record.num_samples / record.seconds
        if run.plan.predicted is not None:
            scalars["speed/predicted_minibatch_seconds"] = run.plan.predicted.minibatch_seconds
        if record.learning_rate is not None:
            scalars["train/learning_rate"] = record.learning_rate
        if record.gradient_norm is not None:
            scalars["train/gradient_norm"] = record.gradient_norm
        self._note(scalars, record.step)

    def on_evaluate(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        if run.rank == 0:
            self._note({f"validation/{name}": value for name, value in metrics.items()}, run.step)

    def on_fit_end(self, run: Run) -> None:
        """Close it."""
        if run.rank == 0:
            self.end(self._last)

    def _note(self, scalars: dict[str, float], step: int) -> None:
        self._last |= scalars
        self.log(scalars, step)


class CSVLogger(Logger):
    """Writes lines `step,name,value`, which pandas makes a table: `frame.pivot(columns="name", ...)`.

    A file that is there is appended to, as a resumed training does.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)

    def begin(self, settings: Mapping[str, str | int | float]) -> None:
        """Open the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(["step", "name", "value"])

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write a line for each scalar."""
        self._writer.writerows([step, name, value] for name, value in scalars.items())
        self._file.flush()

    def end(self, scalars: Mapping[str, float]) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger(Logger):
    """Writes TensorBoard's event files, and the settings as hyperparameters. Extra: `tensorboard`.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        self._folder = folder

    def begin(self, settings: Mapping[str, str | int | float]) -> None:
        """Open an event file."""
        self._settings = dict(settings)
        self._writer = _loaded("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(self._folder))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the scalars."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self, scalars: Mapping[str, float]) -> None:
        """Write settings beside the last figures, and close the file."""
        self._writer.add_hparams(self._settings, dict(scalars), run_name=".")
        self._writer.close()


class MLflowLogger(Logger):
    """Logs a run of MLflow, with the settings as its parameters. Extra: `mlflow`.

    Where the run goes, and how it is named, is set as for any MLflow run: by `MLFLOW_TRACKING_URI` and
    `MLFLOW_EXPERIMENT_NAME`. A run that is active already is used.
    """

    def begin(self, settings: Mapping[str, str | int | float]) -> None:
        """Start a run, or use the active one."""
        self._mlflow = _loaded("mlflow", "mlflow-skinny")
        self._owns_run = self._mlflow.active_run() is None
        if self._owns_run:
            self._mlflow.start_run()
        self._mlflow.log_params(dict(settings))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the scalars as metrics."""
        self._mlflow.log_metrics(dict(scalars), step=step, synchronous=False)

    def end(self, scalars: Mapping[str, float]) -> None:
        """End the run, if it was started here."""
        self._mlflow.flush_async_logging()
        if self._owns_run:
            self._mlflow.end_run()


def make_loggers(names: Iterable[str], folder: Path, every: int) -> list[Logger]:
    """Return loggers by the names of `config.LOGGERS`, which write into a folder, or where MLflow does.

    Args:
        every: minibatches between two that are logged.
    """
    made: dict[str, Callable[[], Logger]] = {
        "csv": lambda: CSVLogger(folder / "log.csv", every),
        "tensorboard": lambda: TensorBoardLogger(folder / "tensorboard", every),
        "mlflow": lambda: MLflowLogger(every),
    }
    return [made[name]() for name in names]


def _loaded(module: str, package: str) -> Any:
    """Return a module that another package brings.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{module} cannot be imported ({why}): pip install {package}") from error
