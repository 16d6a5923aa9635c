"""Loggers: what was logged is read back with the tools that people read it with."""

import csv
import time

import pytest

from hybridpipe import Checkpointing
from hybridpipe.callbacks import CSVLogger, MLflowLogger, TensorBoardLogger
from hybridpipe.callbacks.loggers import make_loggers
from hybridpipe.errors import UserError
from tests.training.helpers import seeded, seeded_mlp

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
    assert [each.value for each in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)
    assert events.summary_metadata.keys() >= {"_hparams_/experiment", "_hparams_/session_start_info"}


def test_tensorboard_in_an_object_store_makes_no_folder_here(make, tmp_path, monkeypatch):
    """A folder called `memory:` appeared where the script was started."""
    pytest.importorskip("tensorboard")
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    trained(make, TensorBoardLogger("memory://runs/a"))
    assert fsspec.filesystem("memory").find("/runs/a") and not [*tmp_path.iterdir()]


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
    with pytest.raises(UserError, match=r"mlflow cannot be imported .*pip install mlflow-skinny"):
        trained(make, MLflowLogger())


def run(make, logger, checkpoints, resume=None, epochs=2):
    """Train four minibatches an epoch, with a validation and a checkpoint every second one."""
    trainer = make(seeded_mlp(), callbacks=[logger])
    if resume is not None:
        trainer.resume(checkpoints / f"step-0000000{resume}")
    held_out, saving = seeded(8, seed=3), Checkpointing(checkpoints, every=2, keep=9)
    trainer.fit(seeded(32), epochs - trainer.epoch, validation=held_out, eval_every=2, checkpoint=saving)
    trainer.close()


def csv_rows(path):
    with path.open(newline="") as file:
        return [(int(row["step"]), row["name"], row["value"]) for row in csv.DictReader(file)]


def without_seconds(rows):
    return [row for row in rows if not row[1].startswith("speed/")]


@pytest.mark.parametrize("step", [2, 4, 6, 8])
def test_csv_has_each_step_once_after_a_lost_run(make, tmp_path, step):
    """Validations of 2 and 6 are in the checkpoints, those of the epochs' ends, 4 and 8, are made again."""
    path = tmp_path / "run.csv"
    run(make, CSVLogger(path), tmp_path)
    whole = csv_rows(path)
    run(make, CSVLogger(path), tmp_path, resume=step)
    again = csv_rows(path)
    assert without_seconds(again) == without_seconds(whole)
    assert [row[:2] for row in again] == [row[:2] for row in whole]


def test_csv_continues_behind_what_a_killed_run_has_cut_short(make, tmp_path):
    path = tmp_path / "run.csv"
    run(make, CSVLogger(path), tmp_path, epochs=1)
    whole = csv_rows(path)
    path.write_bytes(path.read_bytes()[:-5])
    run(make, CSVLogger(path), tmp_path, resume=4, epochs=1)
    assert without_seconds(csv_rows(path)) == without_seconds(whole)


def test_csv_of_another_training_is_begun_anew_and_no_other_file_is_touched(make, tmp_path):
    path = tmp_path / "log.csv"
    run(make, CSVLogger(path), tmp_path, epochs=1)
    whole = csv_rows(path)
    run(make, CSVLogger(path), tmp_path / "other", epochs=1)  # from step 0
    assert without_seconds(csv_rows(path)) == without_seconds(whole)
    (logger,) = make_loggers(["csv"], tmp_path, 1, continues=False)
    run(make, logger, tmp_path, resume=2, epochs=1)  # a checkpoint from elsewhere: its lines are not here
    rows = csv_rows(path)
    assert rows[0][:2] == (2, "validation/loss") and rows[-1][0] == 4
    path.write_text("a,table\n")
    with pytest.raises(UserError, match=r"log\.csv: its first line must be step,name,value, got 'a,table'"):
        run(make, CSVLogger(path), tmp_path)
    assert path.read_text() == "a,table\n"


@pytest.mark.parametrize("step", [2, 4])
def test_tensorboard_has_each_step_once_after_a_lost_run(make, tmp_path, step):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def scalars():
        events = reading.EventAccumulator(str(tmp_path / "events")).Reload()
        tags = sorted(events.Tags()["scalars"])
        return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}

    run(make, TensorBoardLogger(tmp_path / "events"), tmp_path)
    whole = scalars()
    assert [step for step, _ in whole["train/loss"]] == [*range(8)]
    run(make, TensorBoardLogger(tmp_path / "events"), tmp_path, resume=step)
    again = scalars()
    assert again.keys() == whole.keys()
    for tag in ("train/loss", "validation/loss"):
        assert again[tag] == whole[tag]
    assert [step for step, _ in again["speed/minibatch_seconds"]] == [*range(8)]


def test_mlflow_goes_on_inside_of_a_run_that_is_ahead(make, tmp_path, monkeypatch):
    """MLflow takes nothing back: a script's run, or the one of MLFLOW_RUN_ID, had each step twice."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    client = mlflow.MlflowClient()

    def steps(run_id):
        return [each.step for each in client.get_metric_history(run_id, "train/loss")]

    with mlflow.start_run() as outer:
        run(make, MLflowLogger(), tmp_path, epochs=1)
        run(make, MLflowLogger(), tmp_path, resume=4)  # nothing was lost
        assert mlflow.active_run() is not None
    assert sorted(steps(outer.info.run_id)) == [*range(8)]
    monkeypatch.setenv("MLFLOW_RUN_ID", outer.info.run_id)
    run(make, MLflowLogger(), tmp_path, resume=6)
    assert mlflow.active_run() is None
    inner, _ = mlflow.search_runs(output_format="list")
    assert inner.data.tags["mlflow.parentRunId"] == outer.info.run_id
    assert sorted(steps(inner.info.run_id)) == [6, 7] and len(steps(outer.info.run_id)) == 8


def test_mlflow_is_sent_one_batch_at_a_time(make, tmp_path, monkeypatch):
    """Ten threads made the folders of a file store at once: who came second lost its metrics."""
    mlflow = pytest.importorskip("mlflow")
    store = pytest.importorskip("mlflow.store.tracking.file_store").FileStore
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    at_once, most, log_batch = [], [], store.log_batch

    def slow(*args, **kwargs):
        at_once.append(args)
        most.append(len(at_once))
        time.sleep(0.02)
        log_batch(*args, **kwargs)
        at_once.pop()

    monkeypatch.setattr(store, "log_batch", slow)
    with mlflow.start_run():
        run(make, MLflowLogger(), tmp_path)
    assert len(most) >= 8 and max(most) == 1
