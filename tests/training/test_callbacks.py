"""Callbacks: their order, what they see, and how they end a training; breaks within an epoch."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from hybridpipe import Callback, Checkpointing
from hybridpipe.callbacks import EarlyStopping
from hybridpipe.run_folder.write import MetricsFile
from hybridpipe.training.callbacks import CallbackList, OnMinibatch
from tests.training.helpers import assert_same_weights, plain_loop, seeded, seeded_mlp, whole

pytestmark = pytest.mark.usefixtures("quick")


class Told(Callback):
    """Notes what it is told."""

    def __init__(self, stop_at=None):
        self.said, self.stop_at, self.given = [], stop_at, None

    def on_fit_start(self, run):
        self.said.append(f"start {run.epochs}")

    def on_minibatch(self, run, record):
        self.said.append(f"minibatch {record.step}")
        if record.step == self.stop_at:
            run.stop()

    def on_evaluate(self, run, metrics):
        self.said.append(f"evaluate {run.step}")

    def on_epoch_end(self, run, entry):
        self.said.append(f"epoch {entry['epoch']} of {run.epochs}, {run.epoch} complete")

    def on_checkpoint(self, run, path):
        assert (path / "manifest.json").exists()
        self.said.append(f"checkpoint {path.name[-1]}")

    def on_fit_end(self, run):
        self.said.append("end")

    def state_dict(self):
        return {"said": len(self.said)}

    def load_state_dict(self, state):
        self.given = state


def test_the_order_of_events(make, tmp_path):
    told = Told()
    make(callbacks=[told]).fit(
        seeded(16), 2, validation=seeded(8, seed=3), checkpoint=Checkpointing(tmp_path)
    )
    assert told.said == [
        "start 2",
        *("minibatch 0", "minibatch 1", "evaluate 2", "epoch 0 of 2, 1 complete"),
        *("minibatch 2", "minibatch 3", "checkpoint 2", "evaluate 4", "epoch 1 of 2, 2 complete"),
        *("checkpoint 4", "end"),
    ]


def test_a_callback_sees_the_training(make):
    class Sees(Callback):
        def on_minibatch(self, run, record):
            self.seen = (
                run.rank,
                run.num_ranks,
                run.step,
                record.learning_rate,
                record.gradient_norm,
                run.plan,
            )
            self.settings = run.settings

    sees = Sees()
    trainer = make(callbacks=[sees])
    trainer.fit(seeded(8))
    assert sees.seen == (0, 1, 1, 0.1, None, trainer.plan)
    assert sees.settings["minibatch_size"] == 8 and sees.settings["plan"] == "1"


def test_a_record_has_the_rate_and_the_norm_of_its_own_update(make):
    """They were those of the last update, although a record comes one minibatch late."""
    records, model = [], seeded_mlp()
    reference, samples = copy.deepcopy(model), seeded(24)
    make(
        model,
        clip_grad_norm=float("inf"),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    ).fit(samples, shuffle=False, on_minibatch=records.append)
    assert [record.learning_rate for record in records] == [0.1, 0.05, 0.025]
    torch.nn.functional.cross_entropy(reference(samples[:8][0]), samples[:8][1]).backward()
    squares = sum(p.grad.square().sum() for p in reference.parameters())
    assert records[0].gradient_norm == pytest.approx(float(squares) ** 0.5, rel=1e-12)


def test_a_checkpoint_while_losses_travel_is_refused(make, tmp_path):
    """It had the weights of one minibatch more than its losses, and a resumed training trained that twice."""

    class Saves(Callback):
        def on_minibatch(self, run, record):
            run.save(tmp_path)

    with pytest.raises(RuntimeError, match="save was called while losses are under way; call it in on_eval"):
        make(callbacks=[Saves()]).fit(seeded(24))


def test_a_checkpoint_knows_the_evaluation_at_its_step(make, tmp_path):
    """It was written before, so a resumed training missed one."""

    class Counts(Callback):
        count = 0

        def on_evaluate(self, run, metrics):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    saving = Checkpointing(tmp_path, every=2)
    trainer = make(seeded_mlp(), callbacks=[Counts()])
    trainer.fit(seeded(32), max_steps=2, validation=seeded(8, seed=3), eval_every=2, checkpoint=saving)
    trainer.close()
    again = Counts()
    trainer = make(seeded_mlp(), callbacks=[again])
    trainer.resume(tmp_path)
    trainer.fit(seeded(32), validation=seeded(8, seed=3), eval_every=2)
    assert again.count == 2  # at 2 before, and at the epoch's end


def test_a_callback_ends_the_training_soon(make):
    told = Told(stop_at=1)
    trainer = make(callbacks=[told])
    trainer.fit(seeded(80), 5)
    assert trainer.stopped and 2 <= trainer.step <= 5 and told.said[-1] == "end"


def test_state_is_kept_in_checkpoints(make, tmp_path):
    told = [Told(), Told()]
    make(seeded_mlp(), callbacks=told).fit(seeded(16), checkpoint=Checkpointing(tmp_path))
    again = [Told(), Told()]
    trainer = make(seeded_mlp(), callbacks=again)
    trainer.resume(tmp_path)
    trainer.fit(seeded(16))
    assert [each.given for each in again] == [{"said": 3}] * 2  # start and two minibatches


@pytest.mark.parametrize("callbacks", [[print], Told, "x"])
def test_what_is_no_callback_is_refused(make, callbacks):
    with pytest.raises(TypeError, match=r"callbacks must be a list of .*Callback objects, got"):
        make(callbacks=callbacks)


def test_max_steps_ends_within_an_epoch_and_a_resumed_training_goes_on(make, tmp_path):
    model, samples = seeded_mlp(), seeded(32)
    reference = copy.deepcopy(model)
    batches = [samples[i : i + 8] for i in (0, 8, 16, 24)] * 2
    trainer = make(model)
    trainer.fit(samples, max_steps=3, shuffle=False, checkpoint=Checkpointing(tmp_path))
    trainer.close()
    assert (trainer.step, trainer.epoch, trainer.stopped, trainer.history) == (3, 0, True, [])
    resumed = make(seeded_mlp())
    resumed.resume(tmp_path)
    resumed.fit(samples, max_steps=7, shuffle=False, checkpoint=Checkpointing(tmp_path))
    resumed.close()
    assert (resumed.step, resumed.epoch) == (7, 1)
    plain_loop(reference, batches[:7])
    assert_same_weights(resumed.model, reference)
    again = make(seeded_mlp())
    again.resume(tmp_path)
    again.fit(samples, max_steps=7, shuffle=False)
    assert again.step == 7


def test_max_steps_at_an_epochs_end_ends_the_epoch(make):
    trainer = make()
    history = trainer.fit(seeded(16), max_steps=4, validation=seeded(8, seed=3))
    assert [list(entry["validation"]) for entry in history] == [["loss", "accuracy"]] * 2


def test_evaluations_within_an_epoch_leave_the_training_as_it_is(make):
    samples, validation = seeded(40), seeded(8, seed=3)
    plain, evaluated, told = make(seeded_mlp()), make(seeded_mlp()), Told()
    evaluated = make(seeded_mlp(), callbacks=[told])
    plain.fit(samples)
    evaluated.fit(samples, validation=validation, eval_every=2)
    assert [each for each in told.said if "evaluate" in each] == ["evaluate 2", "evaluate 4", "evaluate 5"]
    assert_same_weights(evaluated.model, plain.model)


def test_drop_last_leaves_out_the_short_minibatch(make):
    counts = []
    trainer = make()
    trainer.fit(seeded(19), 2, drop_last=True, on_minibatch=lambda record: counts.append(record.num_samples))
    assert counts == [8] * 4
    trainer.fit(
        DataLoader(seeded(19), batch_size=8), on_minibatch=lambda record: counts.append(record.num_samples)
    )
    assert counts[4:] == [8, 8, 3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_steps": 0}, "max_steps must be an integer >= 1, got 0"),
        ({"eval_every": 2}, "eval_every = 2 needs validation, got None"),
    ],
)
def test_bad_breaks_are_named(make, options, message):
    with pytest.raises(ValueError, match=message):
        make().fit(seeded(8), **options)


def test_breaks_are_refused_under_asynchronous_schedules(make):
    trainer = make(plan=whole(1, schedule="pipedream"))
    with pytest.raises(ValueError, match="max_steps must not be given under pipedream, whose minibatches"):
        trainer.fit(seeded(8), max_steps=3)


def test_only_callbacks_of_users_may_change_the_model():
    """Under `train` the command's own callback had the settings compared after each minibatch."""

    class Users(Callback):
        pass

    own = [EarlyStopping(), OnMinibatch(MetricsFile.note)]
    assert not CallbackList(own, None).are_users
    for each in (Users(), OnMinibatch(print), OnMinibatch(lambda record: None)):
        assert CallbackList([*own, each], None).are_users
