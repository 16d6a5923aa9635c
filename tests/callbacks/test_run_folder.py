"""RunFolder: a script's training leaves what a report shows, and so does one that continues."""

import json

import pytest

from hybridpipe import Checkpointing
from hybridpipe.callbacks import RunFolder
from hybridpipe.report.folder import REPORT, read_run
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


def test_a_folder_that_cannot_be_made_is_told_in_one_line(make, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        trainer = make(seeded_mlp(), plan="dp", callbacks=[RunFolder(tmp_path / "file" / "run")])
        trainer.fit(seeded(16))
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"hybridpipe: {tmp_path / 'file' / 'run'}: cannot be made: Not a directory"
    )
