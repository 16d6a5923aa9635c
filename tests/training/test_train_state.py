"""Where a training stands: what a checkpoint says of it, and which of that is believed."""

from dataclasses import asdict

import pytest

from hybridpipe.errors import UserError
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.stage.losses import LossSum
from hybridpipe.training.train_state import EpochProgress, TrainState, is_resume_point

ASYNCHRONOUS = Plan((StageSpec(0, 1, 2), StageSpec(1, 2)), "pipedream", num_microbatches=1)


def begun(**fields) -> EpochProgress:
    """Three minibatches of the second stream of an epoch, after two of the first."""
    return EpochProgress(44, True, **({"position": 5, "recorded": 5, "stream_start": 2} | fields))


def test_losses_count_by_their_weights():
    progress = EpochProgress(44, True, stream_start=1, recorded=1)
    progress.note(LossSum(16.0, 8))
    progress.note(LossSum(20.0, 4))
    assert (progress.recorded, progress.losses_in, progress.loss_weight) == (3, 2, 12)
    assert progress.loss_sum == 36.0


def test_a_place_in_a_stream_counts_from_its_start():
    assert begun().resume_point(minibatch_size=8) == ResumePoint(3, 4)  # of six minibatches, one short
    assert EpochProgress(48, True).resume_point(8) == ResumePoint(0, 6)
    assert TrainState(progress=begun()).resume_point(8) == ResumePoint(3, 4)
    assert TrainState().resume_point(8) == ResumePoint(0, 0)
    unknown = EpochProgress(0, False, position=3)  # an iterable data set, whose end is not known yet
    assert unknown.resume_point(8) == ResumePoint(3, 4)


def test_a_checkpoint_has_the_data_sets_state_where_its_losses_end():
    progress = EpochProgress(0, False, position=4, recorded=3)
    state = TrainState(progress=progress, data_states={2: "b", 3: "c", 4: "d"})
    document = state.state_dict()["so_far"]
    assert document["position"] == 3 and document["data_state"] == "c"
    loaded = TrainState()
    loaded.load(3, 0, EpochProgress.read(document, "file"), [])
    assert loaded.data_states == {3: "c"}
    assert loaded.begin_epoch(None, shuffle=False).position == 3
    before = {name: value for name, value in document.items() if name != "data_state"}
    assert EpochProgress.read(before, "file").data_state is None  # of an older version


def test_what_is_written_of_an_epoch_is_read():
    assert EpochProgress.read(asdict(begun()), "file") == begun()
    assert EpochProgress.read(asdict(EpochProgress(0, True)), "file") == EpochProgress(0, True)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"position": -1}, "so_far.position: must be an integer >= 0, got -1"),
        ({"recorded": 5.0}, "so_far.recorded: must be an integer >= 0, got 5.0"),
        ({"loss_weight": True}, "so_far.loss_weight: must be a number, got True"),
        ({"loss_sum": None}, "so_far.loss_sum: must be a number, got None"),
        ({"seconds": "2"}, "so_far.seconds: must be a number, got "),
        ({"shuffle": 3}, "so_far.shuffle: must be true or false, got 3"),
        ({"recorded": 4}, "so_far: cannot be"),
        ({"stream_start": 6}, "so_far: cannot be"),
        ({"other": 0}, "so_far: must have data_state, dataset_samples, "),
    ],
)
def test_what_cannot_be_is_refused(changes, told):
    with pytest.raises(UserError, match=f"^file: {told}"):
        EpochProgress.read(asdict(begun()) | changes, "file")


def test_an_epoch_that_was_begun_goes_on_with_the_same_samples_only():
    state = TrainState(epoch=3, progress=begun())
    assert state.begin_epoch(44, True) is state.progress
    for samples, shuffle in ((45, True), (44, False)):
        with pytest.raises(UserError, match=r"^epoch 4 was begun with 44 samples and shuffle = True, and "):
            state.begin_epoch(samples, shuffle)
    state.progress = EpochProgress(44, True)  # nothing of it is trained yet
    assert state.begin_epoch(45, False) == EpochProgress(45, False)


def test_an_epoch_ends_as_an_entry_of_the_history():
    state = TrainState(epoch=3, progress=begun(loss_sum=30.0, loss_weight=20, seconds=7.0))
    assert state.end_epoch(None) == {"epoch": 3, "loss": 1.5, "seconds": 7.0}
    assert (state.epoch, state.progress, len(state.history)) == (4, None, 1)
    state.progress = begun(loss_sum=30.0, loss_weight=20)
    assert state.end_epoch({"loss": 2.0})["validation"] == {"loss": 2.0}


def test_a_request_to_stop_does_not_put_off_another():
    state = TrainState(stop_from=5)
    state.preempt(7)
    assert state.preempted and state.stop_from == 5
    state.preempt(4)
    assert state.stop_from == 4
    fresh = TrainState()
    fresh.preempt(9)
    assert fresh.stop_from == 9


def test_the_last_step_is_known_where_an_epochs_length_or_max_steps_is():
    state = TrainState(step=25, progress=begun(position=5, recorded=5))
    assert state.last_step(2, 44, 8, None) == 25 - 5 + 2 * 6
    assert state.last_step(2, 44, 8, 30) == 30
    assert state.last_step(2, None, 8, 30) == 30 and state.last_step(2, None, 8, None) is None
    state.progress = begun(position=6, recorded=6)  # only its validation is left
    assert state.last_step(2, 44, 8, None) == 25 + 2 * 6


def test_a_checkpoint_says_no_more_than_the_losses_that_are_in():
    state = TrainState(progress=begun(position=6))
    assert state.state_dict()["so_far"] == asdict(begun())
    assert TrainState().state_dict()["so_far"]["dataset_samples"] == 0


def test_a_training_stands_where_the_checkpoint_does():
    state = TrainState(stop_from=3, preempted=True)
    state.load(40, 2, begun(), [{"epoch": 0}, {"epoch": 1}])
    assert (state.step, state.epoch, state.progress, len(state.history)) == (40, 2, begun(), 2)
    assert state.stop_from is None and not state.preempted
    state.load(40, 2, EpochProgress(44, True), [])
    assert state.progress is None  # between two epochs


def test_a_stream_can_be_left_where_every_stage_has_updated():
    """Two replicas in front update once in two minibatches."""
    assert [is_resume_point(ASYNCHRONOUS, ResumePoint(done, 5)) for done in range(6)] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]
