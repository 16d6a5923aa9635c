"""Saving and resuming with the trainer in a world of one rank; tests/mpi/test_resuming.py has the others."""

import copy
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.directory import read_manifest, verify
from hybridpipe.checkpoint.policy import Checkpointing, Keeper
from hybridpipe.checkpoint.snapshot import Snapshot
from hybridpipe.engine import stashed_weights
from hybridpipe.errors import NotSaved, UserError
from hybridpipe.planning.schedules.generators import losses_late
from hybridpipe.stage.state import StageState

momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=3)
WHOLE = Plan((StageSpec(0, 4),), num_microbatches=4)


pytestmark = pytest.mark.usefixtures("quick")


def net(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 3)).double()


@pytest.fixture
def make(make_trainer):
    def trainer(model=None, **options) -> Trainer:
        given = {
            "loss": nn.functional.cross_entropy,
            "optimizer": momentum,
            "plan": WHOLE,
            "minibatch_size": 8,
        }
        return make_trainer(net() if model is None else model, **(given | options))

    return trainer


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(37, 4, generator=generator).double()
    return TensorDataset(inputs, torch.randint(0, 3, (37,), generator=generator))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in trainer.full_state_dict().items()}


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_single_steps_go_on(make, data, tmp_path):
    batches = [data[start : start + 8] for start in range(0, 32, 8)]
    trainer = make(lr_scheduler=step_lr)
    losses = [trainer.train_step(*batch) for batch in batches[:2]]
    path = trainer.save(tmp_path)
    losses += [trainer.train_step(*batch) for batch in batches[2:]]
    assert path == tmp_path / "step-00000002" and verify(path).step == 2
    again = make(lr_scheduler=step_lr)
    told = again.resume(tmp_path)
    assert told == [f"resuming from {path}: step 2, 0 minibatches into epoch 1"]
    assert [again.train_step(*batch) for batch in batches[2:]] == losses[2:]
    assert_equal(weights(again), weights(trainer))
    assert again.summary()["minibatches"] == 4 and again.summary()["loss_first"] == losses[0]


def test_fit_goes_on_in_the_middle_of_an_epoch_and_its_history_is_whole(make, data, tmp_path):
    trainer = make()
    losses = []
    trainer.fit(
        data,
        epochs=2,
        validation=data,
        on_minibatch=lambda record: losses.append(record.loss),
        checkpoint=Checkpointing(tmp_path, every=3, keep=9),
    )
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        f"step-{step:08d}" for step in (3, 6, 9, 10)
    ]
    for step, epochs in ((3, 2), (6, 1), (9, 1), (10, 0)):
        again, later = make(), []
        again.resume(tmp_path / f"step-{step:08d}")
        given = {"validation": data, "on_minibatch": lambda record, later=later: later.append(record)}
        assert len(again.fit(data, epochs, **given)) == epochs
        assert [record.loss for record in later] == losses[step:]
        assert [record.step for record in later] == list(range(step, 10))
        assert_equal(weights(again), weights(trainer))
        both = [[(e["epoch"], e["loss"], e["validation"]) for e in t.history] for t in (trainer, again)]
        assert both[0] == both[1] and again.epoch == 2


def test_only_the_last_ones_are_kept_and_an_epoch_is_the_default(make, data, tmp_path):
    make().fit(data, epochs=4, checkpoint=Checkpointing(tmp_path, keep=2))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000015", "step-00000020"]
    manifest = read_manifest(tmp_path / "step-00000020")
    assert (manifest.epoch, manifest.position) == (3, 5)  # trained, not evaluated yet
    assert {file.name for file in manifest.files} == {"stage-000.safetensors", "rank-0000.safetensors"}
    assert not [*tmp_path.rglob("*.p*k*l*"), *tmp_path.glob(".step*")]


def test_what_is_saved_is_the_state_right_behind_the_update(make, data, tmp_path):
    """The snapshot is a copy: training goes on while it is written."""
    trainer, seen = make(), {}

    def note(record):  # one minibatch late: the weights are those after the next one
        seen[record.step + 2] = copy.deepcopy(trainer.model.state_dict())

    trainer.fit(data, epochs=1, on_minibatch=note, checkpoint=Checkpointing(tmp_path, every=1, keep=9))
    for step in (2, 3, 4):
        saved = load_file(tmp_path / f"step-{step:08d}" / "stage-000.safetensors")
        for key, tensor in seen[step].items():
            assert torch.equal(saved[f"model.{key}"], tensor)


def test_only_who_saves_notes_what_is_in_flight(make, data, tmp_path, monkeypatch):
    """It copies the buffers that a forward changes."""
    trainer, noted = make(plan=Plan((StageSpec(0, 4),), "pipedream", num_microbatches=1)), []
    before = stashed_weights.ChangingBuffers.before
    note = lambda buffers: noted.append(buffers) or before(buffers)  # noqa: E731
    monkeypatch.setattr(stashed_weights.ChangingBuffers, "before", note)
    trainer.fit(data)
    assert not noted
    trainer.fit(data, checkpoint=Checkpointing(tmp_path))
    assert len(noted) == 5
    trainer.fit(data)
    assert len(noted) == 5


def test_of_an_asynchronous_stream_one_snapshot_at_a_time_waits(make, data, tmp_path, monkeypatch):
    """Each is a copy of the whole state, and waits here for the losses of three minibatches more."""
    trainer = make(plan=Plan((StageSpec(0, 4),), "pipedream", num_microbatches=1))
    copies, at_resume_point = [], Keeper.at_resume_point

    def look(keeper, step, point):
        at_resume_point(keeper, step, point)
        copies.append(len(keeper._waiting))

    monkeypatch.setattr(Keeper, "at_resume_point", look)
    trainer.fit(data, epochs=2, checkpoint=Checkpointing(tmp_path, every=1, keep=99))
    assert max(copies) == 1
    late = losses_late(trainer.plan)
    assert late == 3
    steps = sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    assert steps == [late + 2, 2 * (late + 2)]


def test_a_stop_is_saved_and_can_be_gone_on_with_in_the_same_process(make, data, tmp_path):
    whole, trainer = make(net()), make()
    trainer.model.load_state_dict(whole.model.state_dict())
    whole.fit(data, epochs=2)

    def note(record):
        if record.step == 5:
            trainer.stop_from(8)

    history = trainer.fit(data, epochs=2, on_minibatch=note, checkpoint=Checkpointing(tmp_path))
    assert trainer.stopped and trainer.step == 8 and [entry["epoch"] for entry in history] == [0]
    assert (tmp_path / "step-00000008").is_dir()
    trainer.fit(data, epochs=1)
    assert not trainer.stopped and trainer.step == 10
    assert_equal(weights(trainer), weights(whole))


def test_auto_takes_the_checkpoints_plan(make, data, tmp_path):
    make(plan=Plan((StageSpec(0, 4),), "gpipe", num_microbatches=2)).save(tmp_path)
    trainer = make(plan="auto", schedule="auto")
    assert trainer.resume(tmp_path)[1] == "with its plan 1, gpipe"
    trainer.fit(data)
    assert trainer.plan.schedule == "gpipe" and trainer.microbatch_size == 4
    other = make(plan="auto", schedule="1f1b")
    told = other.resume(tmp_path)[1]
    assert told == (
        "its plan 1, gpipe, does not fit here, so a new one is searched for: schedule = 1f1b is requested"
    )
    other.fit(data)
    assert other.plan.schedule == "1f1b"


def test_a_plan_that_was_made_for_less_or_otherwise_is_searched_for_anew(make, tmp_path):
    """Such as for the two hosts that were left of four: it would leave the others idle for good."""
    make().save(tmp_path)
    found = make(plan="auto", microbatch_size=2).resume(tmp_path)
    assert found[1] == "with its plan 1, 1f1b"
    told = make(plan="auto")._planner.prefer(WHOLE, 2)
    assert told.endswith("so a new one is searched for: it was made for 2 ranks, and there are 1")
    other = make(plan="auto", microbatch_size=4).resume(tmp_path)[1]
    assert "so a new one is searched for: microbatch_size = 4 disagrees with the plan" in other
    make(plan=replace(WHOLE, recompute=True)).save(tmp_path / "recomputed")
    other = make(plan="auto").resume(tmp_path / "recomputed")[1]
    assert other.endswith("so a new one is searched for: recompute = False is requested")
    assert "with its plan" in make(plan="auto", recompute=True).resume(tmp_path)[1]


def test_weights_alone(make, data, tmp_path):
    model = net()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    trainer = make(net())
    assert trainer.resume(tmp_path / "model.safetensors") == [
        f"weights of {tmp_path / 'model.safetensors'}; everything else starts anew"
    ]
    assert_equal(weights(trainer), dict(model.state_dict())) and trainer.step == 0


# Its own process: a training that is stopped ends it. TERM comes while the first `fit` writes its last state.
ASKED_LATE = """
import sys
from functools import partial
import torch
from torch import nn
from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.policy import Checkpointing

inputs = torch.randn(24, 4)
data = torch.utils.data.TensorDataset(inputs, inputs.argmax(1))
trainer = Trainer(nn.Sequential(nn.Linear(4, 4)), loss=nn.functional.cross_entropy,
    optimizer=partial(torch.optim.SGD, lr=0.1), plan=Plan((StageSpec(0, 1),)), minibatch_size=8)
trainer.fit(data, checkpoint=Checkpointing(sys.argv[1]))
print("first", trainer.step, flush=True)
trainer.fit(data)
print("not saved", trainer.step, flush=True)
trainer.fit(data, checkpoint=Checkpointing(sys.argv[1]))
print("not reached", flush=True)
"""


def test_a_signal_behind_the_last_minibatch_stops_the_next_fit_that_saves(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ASKED_LATE, str(tmp_path)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "HYBRIDPIPE_FAULT": "point=save-manifest,kind=term"},
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert done.stdout == "first 3\nnot saved 6\n"
    assert f"stopped at step 6, saved as {tmp_path}/step-00000006" in done.stderr
    assert verify(tmp_path / "step-00000006").step == 6


REFUSED = {
    "model": (
        {"model": net(width=7)},
        r"0\.weight: the model has float64\[7, 4\], the file float64\[6, 4\]$",
    ),
    "seed": ({"seed": 1}, r"seed: the training has 1, the checkpoint 0$"),
    "minibatch": ({"minibatch_size": 12}, r"minibatch_size: the training has 12, the checkpoint 8$"),
    "optimizer": (
        {"optimizer": torch.optim.Adam},
        r"optimizer: the checkpoint has torch\.optim\.sgd\.SGD, the training torch\.optim\.adam\.Adam$",
    ),
    "scheduler": (
        {"lr_scheduler": step_lr},
        r"lr_scheduler: the training has 'torch\.optim\.lr_scheduler\.StepLR', the checkpoint 'none';",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_changes(make, data, tmp_path, what):
    options, told = REFUSED[what]
    trainer = make()
    trainer.fit(data)
    trainer.save(tmp_path)
    other = make(copy.deepcopy(options.pop("model", None)), **options)
    before = weights(other)
    with pytest.raises(UserError, match=rf"^{tmp_path}/step-00000005: {told}"):
        other.resume(tmp_path)
    assert_equal(weights(other), before)
    assert other.step == 0 and not other.history
    other.fit(data)  # as if nobody had asked


def test_other_data_cannot_go_on_with_an_epoch(make, data, tmp_path):
    make().fit(data, checkpoint=Checkpointing(tmp_path, every=3))
    trainer = make()
    trainer.resume(tmp_path / "step-00000003", allow_changed=True)
    with pytest.raises(UserError, match=r"^epoch 1 was begun with 37 samples and shuffle = True, and cannot"):
        trainer.fit(TensorDataset(*data[:30]))


def test_a_damaged_one_is_passed_over_or_refused(make, data, tmp_path):
    make().fit(data, checkpoint=Checkpointing(tmp_path, every=3))
    damaged = tmp_path / "step-00000005" / "stage-000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{damaged}: its SHA-256 must be"):
        make().resume(damaged.parent)
    trainer = make()
    told = trainer.resume(tmp_path, or_anew=True)
    assert told[0].startswith(f"passed over step-00000005: {damaged}: its SHA-256 must be")
    assert trainer.step == 3


def test_nothing_to_resume_from(make, tmp_path):
    with pytest.raises(UserError, match=rf"^{tmp_path}: holds no checkpoint to resume from$"):
        make().resume(tmp_path)
    assert make().resume(tmp_path, or_anew=True) == [f"no checkpoint in {tmp_path}: training starts anew"]


def test_a_failed_write_ends_fit_in_one_line_and_the_one_before_stays(make, data, tmp_path, monkeypatch):
    from hybridpipe.checkpoint import snapshot

    trainer = make()
    trainer.fit(data, checkpoint=Checkpointing(tmp_path))
    real = snapshot.write_shard

    def full(path, *arguments):
        if path.name.startswith("rank"):
            raise UserError(f"{path}: cannot be written: No space left on device")
        return real(path, *arguments)

    monkeypatch.setattr(snapshot, "write_shard", full)
    with pytest.raises(NotSaved, match=r"/rank-0000\.safetensors: cannot be written: No space left") as told:
        trainer.fit(data, checkpoint=Checkpointing(tmp_path))
    assert (told.value.exit_code, told.value.step) == (1, 10)  # no mistake: `launch` may start it again
    assert make().resume(tmp_path)[0].startswith(f"resuming from {tmp_path}/step-00000005: ")
    assert not [*tmp_path.glob(".step*")]


@pytest.mark.parametrize(
    "optimizer, loss, told",
    [
        (
            partial(torch.optim.SGD, lr=math.inf),
            nn.functional.cross_entropy,
            r"0\.weight is not finite: \d+ NaN",
        ),
        (
            partial(torch.optim.Adam, lr=0.1),
            lambda outputs, _: 1e200 * outputs.sum(),
            r"optimizer\.0\.weight\.exp_avg_sq is not finite: 0 NaN and \d+ infinite of 24;",
        ),
    ],
    ids=["weights", "the optimizer's state"],
)
@pytest.mark.parametrize("schedule, on_nonfinite", [("1f1b", "stop"), ("pipedream", "ignore")])
def test_what_the_last_update_has_spoilt_is_not_saved(
    make, data, tmp_path, optimizer, loss, told, schedule, on_nonfinite
):
    """Losses and gradients are looked at before an update; nobody looked at what the last one made."""
    plan = Plan((StageSpec(0, 4),), schedule, num_microbatches=4 if schedule == "1f1b" else 1)
    trainer = make(optimizer=optimizer, loss=loss, plan=plan, on_nonfinite=on_nonfinite)
    with pytest.raises(NotSaved, match=f"^after step 1 {told}") as refused:
        trainer.fit(TensorDataset(*data[:8]), checkpoint=Checkpointing(tmp_path))
    assert refused.value.exit_code == 1
    assert str(refused.value).endswith(
        "; nothing is saved; the checkpoint before, if there is one, stays the latest"
    )
    assert not [*tmp_path.glob("*step*"), *tmp_path.glob(".step*")], "neither a checkpoint nor a part of one"
    with pytest.raises(NotSaved, match=told):
        trainer.save(tmp_path)


def test_what_an_older_version_saved_is_looked_at_before_the_training_ends_well(
    make, data, tmp_path, monkeypatch
):
    """A finished training that was resumed wrote NaN to model.safetensors: there was nothing to save."""
    spoilt, data = partial(make, optimizer=partial(torch.optim.SGD, lr=math.inf)), TensorDataset(*data[:8])
    with monkeypatch.context() as older:
        older.setattr(Snapshot, "not_finite", lambda self: None)
        trainer = spoilt()
        trainer.fit(data, checkpoint=Checkpointing(tmp_path))
        trainer.close()
    trainer = spoilt()
    trainer.resume(tmp_path)
    told = r"^after step 1 0\.weight is not finite: .*, and so it is in the resumed checkpoint"
    with pytest.raises(NotSaved, match=told) as refused:
        trainer.fit(data, 0, checkpoint=Checkpointing(tmp_path))
    assert (refused.value.exit_code, refused.value.step) == (1, 1)


def test_kept_versions_are_looked_at():
    held = StageState({"model.0.weight": torch.ones(2), "version.3.0.weight": torch.tensor([1.0, math.nan])})
    found = Snapshot(4, {"stage-000.safetensors": held}, frozenset({"0.weight"})).not_finite()
    assert found == "after step 4 version.3.0.weight is not finite: 1 NaN and 0 infinite of 2"


def test_infinity_where_no_training_put_it_is_saved(make, data, tmp_path):
    model = net()
    model[1].register_buffer("mask", torch.full((3,), -math.inf))
    model[3].register_parameter("bound", nn.Parameter(torch.full((3,), math.inf), requires_grad=False))
    make(model).fit(data, checkpoint=Checkpointing(tmp_path))
    assert make(model).resume(tmp_path)[0].startswith("resuming from")


class Odd(torch.optim.SGD):
    """Keeps what no file without pickle can hold."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["when"] = object()


def test_state_that_cannot_be_saved_is_told_with_the_first_minibatch(make, data, tmp_path):
    seen = []
    with pytest.raises(UserError, match=r"^optimizer\.0\.weight\.when: a checkpoint holds tensors, numbers"):
        make(optimizer=partial(Odd, lr=0.1)).fit(
            data, on_minibatch=seen.append, checkpoint=Checkpointing(tmp_path)
        )
    assert not seen


def test_save_waits_for_a_moment_when_there_is_something_to_save(make, data, tmp_path):
    trainer = make()
    with trainer.no_sync():
        trainer.train_step(*data[:8])
    with pytest.raises(RuntimeError, match="between no_sync and the update"):
        trainer.save(tmp_path)
    trainer.train_step(*data[:8])
    trainer.save(tmp_path)


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}])
def test_counts_are_positive(tmp_path, options):
    with pytest.raises(ValueError, match=f"^{min(options)} must be an integer >= 1, got 0$"):
        Checkpointing(tmp_path, **options)


def test_the_summary_counts_the_updates_that_were_left_out(make):
    trainer = make(on_nonfinite="skip")
    for value in (1.0, torch.nan, 1.0):
        trainer.train_step(torch.full((8, 4), value).double(), torch.zeros(8, dtype=torch.long))
    assert trainer.summary()["updates_left_out"] == 1


def test_updates_left_out_before_a_checkpoint_are_counted_under_any_plan(make, tmp_path):
    """The count began anew at each resumption, and the report said that few were left out."""
    for count, plan in enumerate((WHOLE, WHOLE, replace(WHOLE, num_microbatches=2), WHOLE), 1):
        trainer = make(on_nonfinite="skip", plan=plan)
        trainer.resume(tmp_path, or_anew=True)
        trainer.train_step(torch.full((8, 4), torch.nan).double(), torch.zeros(8, dtype=torch.long))
        assert trainer.summary()["updates_left_out"] == count
        trainer.save(tmp_path)
        trainer.close()


def tensors_in(folder):
    return {
        f"{path.parent.name}/{path.name}:{name}": tensor
        for path in sorted(folder.glob("step-*/*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_without_room_for_a_copy_the_training_waits_until_the_state_is_written(make, data, tmp_path):
    """The copy took as much as weights and optimizer state, which no prediction counts."""
    found, model = [], net()
    for name, limit in (("copied", None), ("written", 1)):
        trainer = make(copy.deepcopy(model))
        trainer._checkpoints.limit_bytes = limit
        trainer.fit(data, 2, checkpoint=Checkpointing(tmp_path / name, every=2, keep=9))
        trainer.close()
        found.append(tensors_in(tmp_path / name))
    assert found[0].keys() == found[1].keys() and len({key.split("/")[0] for key in found[0]}) == 5
    assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())


def test_a_copy_without_room_is_told_where_the_training_cannot_wait(make, data, tmp_path, capsys):
    """Under an asynchronous schedule minibatches are between the ranks."""
    trainer = make(plan=replace(WHOLE, schedule="pipedream", num_microbatches=1))
    trainer._checkpoints.limit_bytes = 1
    trainer.fit(data, 1, checkpoint=Checkpointing(tmp_path, every=2))
    told = capsys.readouterr().err
    assert re.search(r"^hybridpipe: rank 0: a checkpoint's copy takes 0 MB of 0 left: under", told, re.M)
