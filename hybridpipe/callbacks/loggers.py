"""Loggers: callbacks that write a training's figures where people look at them.

Only rank 0 writes. Invariant: a figure's step is the number of minibatches trained on before it was made, and
what a lost run has logged beyond a checkpoint does not stand beside what is trained again from there.
"""

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hybridpipe.checkpoint.directory import make_folder
from hybridpipe.errors import UserError, shown
from hybridpipe.files import open_after, writing
from hybridpipe.health import failure
from hybridpipe.notices import notices
from hybridpipe.planning.checks import positive_int
from hybridpipe.training.callbacks import Callback, Run
from hybridpipe.training.metrics import MinibatchRecord

LOSS = "train/loss"
_COLUMNS = ("step", "name", "value")


class Logger(Callback, ABC):
    """Base class: figures as scalars by name. A logger of your own overrides `begin`, `log` and `end`.

    Args:
        every: minibatches between two that are logged.

    Attributes:
        begins_at: step of the training in `begin`; an earlier run may have logged what comes from there on.
        continues: False if what is there is another training's, whatever its step.
        cuts: True if `begin` takes back what was logged from `begins_at` on.

    Raises:
        ValueError: `every` is no integer >= 1.
    """

    begins_at = 0
    continues = True
    cuts = False

    def __init__(self, every: int = 1) -> None:
        positive_int("every", every)
        self._every = every
        self._last: dict[str, float] = {}
        self._validated: Sequence[Any] = (None, {})  # step and scalars of the last validation

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
        self.begins_at = run.step if self.continues else 0
        if run.rank == 0:
            with failure.refusing(run.num_ranks):
                self.begin(run.settings)
            step, scalars = self._validated
            if self.cuts and step == run.step:  # before the checkpoint was written: it is not made again
                self._note(dict(scalars), step)

    def on_minibatch(self, run: Run, record: MinibatchRecord) -> None:
        """Log loss, speed, learning rate and the gradient's norm, beside what was predicted."""
        if run.rank != 0 or record.step % self._every:
            return
        scalars = {LOSS: record.loss, "train/epoch": float(record.epoch)}
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
            self._validated = run.step, {f"validation/{name}": value for name, value in metrics.items()}
            self._note(self._validated[1], run.step)

    def on_fit_end(self, run: Run) -> None:
        """Close it."""
        if run.rank == 0:
            self.end(self._last)

    def state_dict(self) -> dict[str, Any]:
        """Return the last validation."""
        return {"validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._validated = state.get("validated", self._validated)  # older versions kept none

    def _note(self, scalars: dict[str, float], step: int) -> None:
        self._last |= scalars
        self.log(scalars, step)


class CSVLogger(Logger):
    """Writes lines `step,name,value`, which pandas makes a table: `frame.pivot(columns="name", ...)`.

    A training that continues appends to its file, without the lines from its step on; another starts over.

    Args:
        path: of the file.
    """

    cuts = True

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)

    def begin(self, settings: Mapping[str, str | int | float]) -> None:
        """Open the file.

        Raises:
            UserError: it cannot be written, or is no logger's.
        """
        make_folder(self._path.parent)
        self._refuse_other()
        self._file = open_after(self._path, self._is_before)
        self._writer = csv.writer(self._file)
        with writing(self._path):
            if not self._file.tell():
                self._writer.writerow(_COLUMNS)
            self._file.flush()

    def _refuse_other(self) -> None:
        if self._path.is_file():
            with writing(self._path), self._path.open(encoding="utf-8", errors="replace") as file:
                first, header = file.readline(99).strip(), ",".join(_COLUMNS)
            if not header.startswith(first):  # whose writing may have been cut short
                raise UserError(f"{self._path}: its first line must be {header}, got {shown(first)}")

    def _is_before(self, line: str) -> bool:
        step = line.split(",", 1)[0]
        return step == _COLUMNS[0] or (step.isdecimal() and int(step) < self.begins_at)

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

    cuts = True

    def __init__(self, folder: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        self._folder = folder

    def begin(self, settings: Mapping[str, str | int | float]) -> None:
        """Open an event file, which lets readers drop what earlier ones have from `begins_at` on."""
        self._settings = dict(settings)
        if "://" not in str(self._folder):  # an object store has no folders
            make_folder(Path(self._folder))
        writer = _loaded("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(self._folder), purge_step=self.begins_at)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the scalars."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self, scalars: Mapping[str, float]) -> None:
        """Write the settings beside the names of the figures, and close the file.

        `add_hparams` would log the figures again, as of step 0.
        """
        summaries = _loaded("torch.utils.tensorboard.summary", "tensorboard")
        for summary in summaries.hparams(self._settings, dict(scalars)):
            self._writer.file_writer.add_summary(summary)
        self._writer.close()


class MLflowLogger(Logger):
    """Logs a run of MLflow, with the settings as its parameters. Extra: `mlflow`.

    Where the run goes, and how it is named, is set as for any MLflow run: by `MLFLOW_TRACKING_URI` and
    `MLFLOW_EXPERIMENT_NAME`. A run that is active already, or named by `MLFLOW_RUN_ID`, is used. If it has
    later steps, which MLflow does not take back, or other settings, a run inside of it is started.
    """

    def begin(self, settings: Mapping[str, str | int | float]) -> None:
        """Start a run, or use the active one."""
        # Several threads that log to one run race for the folders of a file store: metrics were lost.
        os.environ.setdefault("MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE", "1")
        self._mlflow = _loaded("mlflow", "mlflow-skinny")
        active = self._mlflow.active_run()
        run = active or self._mlflow.start_run()
        self._started = 0 if active else 1
        if not self._may_go_on(run.info.run_id, settings):
            inner = self._mlflow.start_run(nested=True)
            self._started += 1
            what = f"MLflow's run {run.info.run_name} has later steps or other settings"
            notices.tell(f"{what}: this training is logged as {inner.info.run_name} inside of it")
        self._mlflow.log_params(dict(settings))

    def _may_go_on(self, run_id: str, settings: Mapping[str, str | int | float]) -> bool:
        """Return True if a run has no step from `begins_at` on, and no other settings."""
        client = self._mlflow.MlflowClient()
        params = client.get_run(run_id).data.params
        steps = (each.step for each in client.get_metric_history(run_id, LOSS))
        alike = all(params.get(name, str(value)) == str(value) for name, value in settings.items())
        return alike and max(steps, default=-1) < self.begins_at

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the scalars as metrics."""
        self._mlflow.log_metrics(dict(scalars), step=step, synchronous=False)

    def end(self, scalars: Mapping[str, float]) -> None:
        """End the runs that were started here."""
        self._mlflow.flush_async_logging()
        for _ in range(self._started):
            self._mlflow.end_run()


def make_loggers(names: Iterable[str], folder: Path, every: int, continues: bool) -> list[Logger]:
    """Return loggers by the names of `config.LOGGERS`, which write into a folder, or where MLflow does.

    Args:
        every: minibatches between two that are logged.
        continues: what is in the folder is this training's.
    """
    made: dict[str, Callable[[], Logger]] = {
        "csv": lambda: CSVLogger(folder / "log.csv", every),
        "tensorboard": lambda: TensorBoardLogger(folder / "tensorboard", every),
        "mlflow": lambda: MLflowLogger(every),
    }
    loggers = [made[name]() for name in names]
    for logger in loggers:
        logger.continues = continues
    return loggers


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
