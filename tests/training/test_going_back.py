"""--resume PATH: what a training that is lost before it saves again is started from."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.directory import last_good
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.cli.train import CHECKPOINTS, _claim_checkpoints, _continues_own, _resume
from hybridpipe.errors import UserError
from hybridpipe.run_folder.write import MetricsFile


def trainer() -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        plan=Plan((StageSpec(0, 2),), num_microbatches=2),
        minibatch_size=8,
    )


def test_going_back_to_a_checkpoint_lasts_though_nothing_is_saved(tmp_path):
    folder = tmp_path / CHECKPOINTS
    first = trainer()
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
    first.fit(data, checkpoint=Checkpointing(folder, every=2))
    first.close()
    assert last_good(folder)[0] == folder / "step-00000004"
    second = trainer()
    assert _resume(second, str(folder / "step-00000002"), tmp_path) == [
        f"resuming from {folder}/step-00000002: step 2, 2 minibatches into epoch 1"
    ]
    assert _claim_checkpoints(tmp_path, str(folder / "step-00000002")) == []
    second.close()  # lost, before anything was saved; then --resume auto
    third = trainer()
    (told,) = _resume(third, "auto", tmp_path)
    assert f"resuming from {folder}/step-00000002" in told and third.step == 2
    third.close()
    assert (folder / "step-00000004").is_dir()


def test_a_training_anew_loses_no_earlier_one(tmp_path):
    folder = tmp_path / CHECKPOINTS
    for number in ("1", "2", "3"):
        (folder / f"step-0000000{number}").mkdir(parents=True)
        (told,) = _claim_checkpoints(tmp_path, None)
    assert f"is now {folder}.old.3" in told
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/step-*")) == [
        "checkpoints.old.2/step-00000002",
        "checkpoints.old.3/step-00000003",
        "checkpoints.old/step-00000001",
    ]


def test_a_second_training_is_kept_out_while_the_first_one_runs(tmp_path):
    folder = tmp_path / CHECKPOINTS
    first, second = trainer(), trainer()
    first.save(folder)
    told = f"^{folder}: another running training writes there"
    with pytest.raises(UserError, match=told):
        second.save(folder)
    with pytest.raises(UserError, match=told):
        _claim_checkpoints(tmp_path, None)
    assert last_good(folder)[0] == folder / "step-00000000"  # and nothing of the second one's
    assert not [*folder.glob(".step*")]
    first.close()
    second.save(folder)
    second.close()


def test_records_of_another_training_do_not_stand_before_those_of_one_that_comes_from_elsewhere(tmp_path):
    """--resume A/checkpoints/step-2 --out B, where B has its own records; and, to compare, --resume auto."""
    steps = [json.dumps({"step": step}) for step in range(4)]
    for source, kept in (("auto", steps[:2]), (str(tmp_path / "A/checkpoints/step-00000002"), [])):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in steps))
        at_two = trainer()
        for _ in range(2):
            at_two.train_step(torch.randn(8, 4), torch.randint(0, 3, (8,)))
        MetricsFile(at_two, tmp_path, _continues_own(tmp_path, source)).close()
        at_two.close()
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == kept
