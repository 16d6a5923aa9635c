"""RunFolder: a script's training leaves what a report shows, and so does one that continues."""

import json
from pathlib import Path

import pytest

from hybridpipe import Callback, Checkpointing
from hybridpipe.callbacks import BestCheckpoint, Run, RunFolder
from hybridpipe.errors import UserError
from hybridpipe.run_folder.report import REPORT, read_run
from hybridpipe.training.metrics import MinibatchRecord
from tests.training.helpers import seeded, seeded_mlp

pytestmark = pytest.mark.usefixtures("quick")


def trained(make, folder, epochs):
    trainer = make(seeded_mlp(), plan="dp", callbacks=[RunFolder(folder)])
    trainer.fit(
        seeded(16), epochs, validation=seeded(8, 3), checkpoint=Checkpointing(folder / "ck"), resume="auto"
    )
    losses = [entry["loss"] for entry in trainer.history]
    trainer.close()
    return losses


def test_a_script_leaves_what_a_report_shows(make, tmp_path):
    losses = trained(make, tmp_path / "run", epochs=2)
    run = read_run(tmp_path / "run")
    assert run.left_out == () and run.plan.name == "1" and run.profile.num_layers == run.plan.num_layers
    assert [record.step for record in run.records] == [0, 1, 2, 3]
    assert [epoch.loss for epoch in run.summary.epochs] == losses
    assert run.timelines.keys() == {"measured", "predicted"} and run.start.settings["trainer"]["ranks"] == 1
    assert "validation" in (tmp_path / "run" / REPORT).read_text()


def test_a_training_that_continues_keeps_its_records(make, tmp_path):
    trained(make, tmp_path, epochs=1)
    trained(make, tmp_path, epochs=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "name, taken, told",
    [
        ("file/run", "", "file/run: cannot be written: Not a directory"),
        ("", "plan.json", "plan.json: cannot be written: it exists and is no regular file"),
        ("", "metrics.jsonl", "metrics.jsonl: cannot be written: it exists and is no regular file"),
        ("", "report.html", "report.html: cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_line(make, tmp_path, name, taken, told):
    (tmp_path / "file").touch()
    (tmp_path / taken).mkdir(exist_ok=True)
    trainer = make(seeded_mlp(), plan="dp", callbacks=[RunFolder(tmp_path / name)])
    with pytest.raises(UserError) as refused:
        trainer.fit(seeded(16))
    assert str(refused.value) == f"{tmp_path}/{told}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_second_script_in_the_folder_of_a_running_one_touches_nothing(make, tmp_path):
    """It was refused at its first save; by then plan.json and run.json were its own, metrics.jsonl empty."""
    seen = []

    class Second(Callback):
        def on_minibatch(self, run: Run, record: MinibatchRecord) -> None:
            before = contents(tmp_path)
            for callback in (RunFolder(tmp_path), BestCheckpoint(tmp_path)):
                with pytest.raises(UserError, match="another running training writes there"):
                    make(seeded_mlp(), plan="dp", callbacks=[callback]).fit(seeded(16), validation=seeded(8))
            assert contents(tmp_path) == before
            seen.append(record.step)

    trainer = make(seeded_mlp(), plan="dp", callbacks=[RunFolder(tmp_path), Second()])
    trainer.fit(seeded(16))
    assert seen == [0, 1] and len(read_run(tmp_path).records) == 2
    trainer.close()
    trained(make, tmp_path, epochs=1)


def test_one_training_may_write_all_into_one_folder(make, tmp_path):
    callbacks = [RunFolder(tmp_path), BestCheckpoint(tmp_path / "best")]
    trainer = make(seeded_mlp(), plan="dp", callbacks=callbacks)
    trainer.fit(seeded(16), validation=seeded(8), checkpoint=Checkpointing(tmp_path))
    assert read_run(tmp_path).left_out == () and (tmp_path / "latest").exists()
