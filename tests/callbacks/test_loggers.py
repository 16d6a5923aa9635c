"""Loggers: what was logged is read back with the tools that people read it with."""

import csv

import pytest

from hybridpipe.callbacks import CSVLogger, MLflowLogger, TensorBoardLogger
from hybridpipe.errors import UserError
from tests.training.helpers import seeded

pytestmark = pytest.mark.usefixtures("quick")
NAMES = {
    "train/loss",
    "train/epoch",
    "train/learning_rate",
    "train/gradient_norm",
    "speed/minibatch_seconds",
    "speed/samples_per_second",
    "validation/loss",
    "validation/accuracy",
}


def trained(make, logger):
    trainer = make(callbacks=[logger], clip_grad_norm=float("inf"))
    losses = []
    trainer.fit(
        seeded(16),
        epochs=2,
        validation=seeded(8, seed=3),
        on_minibatch=lambda record: losses.append(record.loss),
    )
    return losses, trainer


def test_csv(make, tmp_path):
    path = tmp_path / "logs" / "run.csv"
    losses, trainer = trained(make, CSVLogger(path))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == NAMES
    of_loss = [(int(row["step"]), float(row["value"])) for row in rows if row["name"] == "train/loss"]
    assert of_loss == list(enumerate(losses))
    validation = [(int(row["step"]), float(row["value"])) for row in rows if row["name"] == "validation/loss"]
    assert validation == [(2 * (i + 1), each["validation"]["loss"]) for i, each in enumerate(trainer.history)]
    rates = {float(row["value"]) for row in rows if row["name"] == "train/learning_rate"}
    assert rates == {0.1}


def test_every_third_minibatch(make, tmp_path):
    trained(make, CSVLogger(tmp_path / "run.csv", every=3))
    with (tmp_path / "run.csv").open(newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["name"] == "train/loss"]
    assert steps == ["0", "3"]


def test_tensorboard(make, tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    losses, _ = trained(make, TensorBoardLogger(tmp_path))
    events = reading.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    assert [each.value for each in events.Scalars("train/loss")][:4] == pytest.approx(losses, rel=1e-6)


def test_mlflow(make, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # files are refused by default since MLflow 3.7
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    losses, _ = trained(make, MLflowLogger())
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.params["minibatch_size"] == "8" and run.data.params["schedule"] == "1f1b"
    assert set(run.data.metrics) == NAMES and run.info.status == "FINISHED"
    of_loss = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [each.value for each in sorted(of_loss, key=lambda each: each.step)] == losses


def test_what_is_not_installed_is_named(make, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(UserError, match=r"mlflow cannot be imported .*pip install 'hybridpipe\[mlflow\]'"):
        trained(make, MLflowLogger())
