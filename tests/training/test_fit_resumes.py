"""`fit(resume="auto")`: a script that is started again trains the rest, and no epoch twice."""

import re

import pytest

from hybridpipe import Checkpointing
from hybridpipe.errors import UserError
from hybridpipe.notices import Notices
from hybridpipe.training import checkpoints
from tests.training.helpers import seeded, seeded_mlp


def weights(trainer) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in trainer.full_state_dict().items()}


def test_each_start_trains_what_is_left_of_all_epochs(make, tmp_path, capsys, monkeypatch):
    notices = Notices()
    monkeypatch.setattr(checkpoints, "notices", notices)
    undisturbed = make(seeded_mlp())
    undisturbed.fit(seeded(24), epochs=3)
    steps = []
    for total in (1, 3, 3, 2):
        trainer = make(seeded_mlp())
        trainer.fit(seeded(24), epochs=total, checkpoint=Checkpointing(tmp_path), resume="auto")
        steps.append(trainer.step)
        come_to = weights(trainer)
        trainer.close()
    assert steps == [3, 9, 9, 9] and come_to == weights(undisturbed)
    assert not notices.lines(), "a first start, and a resumed one, are as they should be"
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"hybridpipe: no checkpoint in {tmp_path}: training starts anew"
    assert told[1].startswith(
        f"hybridpipe: resuming from {tmp_path}/step-00000003: step 3, 3 minibatches into epoch 1"
    )


def test_a_trainer_that_has_trained_goes_on_with_what_it_has(make, tmp_path):
    """The second call would otherwise go back to the checkpoint that the first has left elsewhere."""
    trainer = make(seeded_mlp())
    trainer.fit(seeded(24), epochs=1, checkpoint=Checkpointing(tmp_path), resume="auto")
    trainer.fit(seeded(24), epochs=1)
    trainer.fit(seeded(24), epochs=3, checkpoint=Checkpointing(tmp_path), resume="auto")
    assert (trainer.epoch, trainer.step) == (3, 9)


def test_a_reached_target_ends_the_training_for_good(make, tmp_path):
    for _ in range(2):
        trainer = make(seeded_mlp())
        trainer.fit(
            seeded(24), epochs=5, validation=seeded(8), target_loss=100.0,
            checkpoint=Checkpointing(tmp_path), resume="auto",
        )  # fmt: skip
        assert trainer.epoch == 1
        trainer.close()


def test_another_training_in_the_folder_is_refused(make, tmp_path):
    first = make(seeded_mlp())
    first.fit(seeded(24), checkpoint=Checkpointing(tmp_path), resume="auto")
    first.close()
    other = make(seeded_mlp(), seed=7)
    with pytest.raises(UserError, match="seed: the training has 7, the checkpoint 0"):
        other.fit(seeded(24), checkpoint=Checkpointing(tmp_path), resume="auto")


@pytest.mark.parametrize(
    "resume, message",
    [
        ("auto", 'resume="auto" needs a folder: fit(..., checkpoint=Checkpointing(folder))'),
        ("runs/x", "resume must be None or \"auto\", got 'runs/x'; Trainer.resume takes a path"),
    ],
)
def test_what_cannot_be_resumed_is_refused(make, resume, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make().fit(seeded(24), resume=resume)


def test_a_folder_is_no_checkpointing(make):
    with pytest.raises(
        TypeError, match=r"^checkpoint must be a hybridpipe.Checkpointing\(folder\), got 'runs/x'$"
    ):
        make().fit(seeded(24), checkpoint="runs/x")
