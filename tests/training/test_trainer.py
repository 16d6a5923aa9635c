"""The trainer in a world of one rank; tests/mpi has the others."""

import copy
import json
import math
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hybridpipe.errors import UserError
from hybridpipe.optim.nonfinite import NotFinite
from tests.training.helpers import assert_same_weights, cross_entropy, data, mlp, momentum, plain_loop, whole

mse = nn.functional.mse_loss
pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_train_step_equals_a_plain_loop(make, schedule):
    model = mlp()
    reference, batches = copy.deepcopy(model), [data(n)[:] for n in (8, 8, 5, 1, 8)]
    trainer = make(model, plan=whole(schedule=schedule))
    losses = [trainer.train_step(*batch) for batch in batches]
    assert all(type(loss) is float for loss in losses)
    assert losses == pytest.approx(plain_loop(reference, batches), rel=0, abs=1e-12)
    assert_same_weights(model, reference)


def test_fit_equals_a_plain_loop(make):
    model, samples = mlp(), data(19)
    reference = copy.deepcopy(model)
    batches = [samples[start : start + 8] for start in range(0, 19, 8)] * 2
    losses = []
    history = make(model).fit(
        samples, epochs=2, shuffle=False, on_minibatch=lambda record: losses.append(record.loss)
    )
    expected = plain_loop(reference, batches)
    assert losses == pytest.approx(expected, rel=0, abs=1e-12)
    assert_same_weights(model, reference)
    means = [
        sum(loss * n for loss, n in zip(part, (8, 8, 3), strict=True)) / 19
        for part in (expected[:3], expected[3:])
    ]
    assert [entry["epoch"] for entry in history] == [0, 1]
    assert [entry["loss"] for entry in history] == pytest.approx(means, rel=0, abs=1e-12)


def test_fit_validates_after_each_epoch(make):
    trainer, samples = make(), data(16)
    history = trainer.fit(samples, epochs=2, validation=samples)
    assert [entry["validation"].keys() for entry in history] == [{"loss", "accuracy"}] * 2
    assert history[-1]["validation"] == trainer.evaluate(samples)


def test_fit_ends_with_the_epoch_that_reaches_the_target(make):
    samples = data(32)

    def history(**targets):
        torch.manual_seed(5)
        trainer = make()
        return trainer.fit(samples, epochs=6, validation=samples, **targets), trainer.summary()

    entries, summary = history()
    losses = [entry["validation"]["loss"] for entry in entries]
    assert losses == sorted(losses, reverse=True), "it learns, so that any epoch's loss can be the target"
    assert summary["epochs_to_target"] is summary["seconds_to_target"] is None
    for targets in ({"target_loss": losses[3]}, {"target_loss": losses[3], "target_accuracy": 1e-9}):
        entries, summary = history(**targets)
        assert [entry["validation"]["loss"] for entry in entries] == losses[:4]
        assert summary["epochs_to_target"] == 4
        assert summary["seconds_to_target"] == pytest.approx(sum(entry["seconds"] for entry in entries))
    entries, summary = history(target_loss=losses[3], target_accuracy=1.0)
    assert len(entries) == 6 and summary["epochs_to_target"] is None, "both are to be reached"


def test_seconds_to_the_target_leave_evaluation_out(make, monkeypatch):
    trainer, samples = make(), data(16)
    evaluate = trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda dataset: time.sleep(0.5) or evaluate(dataset))
    trainer.fit(samples, epochs=2, validation=samples, target_loss=100.0)
    assert trainer.summary()["epochs_to_target"] == 1 and 0 < trainer.summary()["seconds_to_target"] < 0.5


def test_a_target_that_cannot_be_measured_is_refused(make):
    with pytest.raises(ValueError, match=r"target_loss = 0\.5 needs validation, got None"):
        make().fit(data(8), target_loss=0.5)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    regression = TensorDataset(torch.randn(8, 4).double(), torch.randn(8, 3).double())
    with pytest.raises(ValueError, match="needs targets that are classes"):
        make(model, loss=mse).fit(regression, validation=regression, target_accuracy=0.5)


def test_records_number_the_updates_across_epochs(make):
    records = []
    make().fit(data(19), epochs=2, on_minibatch=records.append)
    assert [(r.step, r.epoch, r.num_samples) for r in records] == [
        (0, 0, 8), (1, 0, 8), (2, 0, 3), (3, 1, 8), (4, 1, 8), (5, 1, 3),
    ]  # fmt: skip
    assert all(r.seconds > 0 for r in records)


def test_epochs_count_on_in_the_next_fit(make):
    def weights(*epochs):
        torch.manual_seed(1)
        trainer, samples = make(model := mlp()), data(19)
        numbers = [entry["epoch"] for count in epochs for entry in trainer.fit(samples, count)]
        assert numbers == list(range(sum(epochs)))
        return [p.tolist() for p in model.parameters()]

    assert weights(1, 2) == weights(3)  # another order of the samples in each epoch


def test_the_seed_decides_order_and_dropout(make):
    def losses(seed):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
        torch.manual_seed(2)
        samples = data(16)
        torch.seed()
        return [entry["loss"] for entry in make(model, seed=seed).fit(samples, epochs=2)]

    assert losses(3) == losses(3) != losses(4)


def test_two_trainers_one_after_the_other(make):
    model = mlp()
    others, batches = copy.deepcopy(model), [data(8)[:] for _ in range(3)]
    first = make(model)
    losses = [first.train_step(*batch) for batch in batches]
    first.close()
    second = make(others)
    assert [second.train_step(*batch) for batch in batches] == losses
    assert_same_weights(model, others)


def test_close_twice_does_nothing(make):
    trainer = make()
    trainer.close()
    trainer.close()


def as_predicted(samples: TensorDataset, model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        outputs = model.eval()(samples.tensors[0])
    right = outputs.argmax(1) == samples.tensors[1]
    return {
        "loss": cross_entropy(outputs, samples.tensors[1]).item(),
        "accuracy": right.double().mean().item(),
    }


def test_no_sync_adds_gradients_up_and_may_be_nested(make):
    model, batches = mlp(), [data(n)[:] for n in (8, 8, 5)]
    reference, before = copy.deepcopy(model), copy.deepcopy(model)
    trainer = make(model, clip_grad_norm=0.3)
    with trainer.no_sync():
        trainer.train_step(*batches[0])
        with trainer.no_sync():
            pass
        trainer.train_step(*batches[1])
        assert_same_weights(model, before)
        with pytest.raises(ValueError, match="fit makes no sense inside no_sync"):
            trainer.fit(data(8))
    trainer.train_step(*batches[2])
    update = momentum(reference.parameters())
    for inputs, targets in batches:
        cross_entropy(reference(inputs), targets).backward()
    assert nn.utils.clip_grad_norm_(reference.parameters(), 0.3) > 0.3
    update.step()
    assert_same_weights(model, reference)


def test_no_sync_ends_with_an_error_inside(make):
    trainer = make()
    with pytest.raises(RuntimeError, match="mine"), trainer.no_sync():
        raise RuntimeError("mine")
    before = copy.deepcopy(trainer.model)
    trainer.train_step(*data(8)[:])
    assert not torch.equal(trainer.model[0].weight, before[0].weight)


@pytest.mark.parametrize("schedule, count", [("1f1b", 4), ("pipedream", 1), ("pipedream-2bw", 4)])
def test_an_update_of_numbers_that_are_not_finite_is_left_out(make, capsys, schedule, count):
    """The rest trains as if that minibatch had had no gradient; "stop" ends it, "ignore" spoils it."""
    samples = data(24)
    samples.tensors[0][9] = torch.nan  # of the second minibatch

    def train(**options):
        trainer = make(mlp(), plan=whole(count, schedule=schedule), **options)
        trainer.fit(samples, shuffle=False)
        return trainer.model

    assert all(p.isfinite().all() for p in train(on_nonfinite="skip").parameters())
    told = capsys.readouterr().err
    assert told.count("the update is skipped") == 1 and "the loss of step 1, microbatch" in told
    with pytest.raises(NotFinite, match=r"the loss of step 1, microbatch \d \(stage 0\) is not finite: nan"):
        train()
    assert not all(p.isfinite().all() for p in train(on_nonfinite="ignore").parameters())


@pytest.mark.parametrize(
    "option, told",
    [
        ({"on_nonfinite": "hope"}, "on_nonfinite must be one of stop, skip, ignore, got 'hope'"),
        ({"hang_timeout": -1}, "hang_timeout must be a finite number >= 0, got -1"),
        ({"hang_timeout": math.inf}, "hang_timeout must be a finite number >= 0, got inf"),
    ],
)
def test_what_to_do_when_things_go_wrong_is_checked(make, option, told):
    with pytest.raises(ValueError, match=told):
        make(**option)


@pytest.mark.parametrize("schedule, count", [("pipedream", 1), ("pipedream-2bw", 4)])
def test_asynchronous_schedules_refuse_single_steps(make, schedule, count):
    trainer = make(plan=whole(count, schedule=schedule))
    with pytest.raises(ValueError, match=f"train_step makes no sense under {schedule}.*; use fit") as caught:
        trainer.train_step(*data(8)[:])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"no_sync makes no sense under {schedule}"), trainer.no_sync():
        pass
    with pytest.raises(ValueError, match=f"clip_grad_norm must not be given under {schedule}"):
        make(plan=whole(count, schedule=schedule), clip_grad_norm=1.0)


def test_2bw_with_a_prediction_by_hand(make):
    """As a keyword, with one rank: w(t+1) = w(t) - rate v(t+1), with the gradient at w(t-1) - rate v(t-1)."""
    model, samples, (rate, momentum) = mlp(), data(32), (0.1, 0.9)
    reference = copy.deepcopy(model)
    versions = [[p.detach().clone() for p in reference.parameters()]]
    velocities = [[torch.zeros_like(p) for p in versions[0]]]
    for t in range(4):
        at = max(0, t - 1)
        for p, w, v in zip(reference.parameters(), versions[at], velocities[at], strict=True):
            p.data, p.grad = w - (t - at) * rate * v, None
        inputs, targets = samples[8 * t : 8 * t + 8]
        cross_entropy(reference(inputs), targets).backward()
        gradients = [p.grad for p in reference.parameters()]
        velocities.append([momentum * v + g for v, g in zip(velocities[t], gradients, strict=True)])
        versions.append([w - rate * v for w, v in zip(versions[t], velocities[t + 1], strict=True)])
    make(model, plan=whole(schedule="pipedream-2bw", prediction="spectrain")).fit(samples, shuffle=False)
    for p, w in zip(model.parameters(), versions[-1], strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-12)


def test_an_optimizer_that_predicts_nothing_is_refused_before_training(make):
    told = "^prediction = 'xpipe' reads the state of torch's own Adam or AdamW, got SGD: set "
    trainer = make(plan="straight", schedule="pipedream", prediction="xpipe")
    with pytest.raises(UserError, match=told):
        trainer.fit(data(16))
    with pytest.raises(ValueError, match=r"^prediction must be off under 1f1b, whose gradients"):
        make(plan="straight", prediction="xpipe")


@pytest.mark.parametrize("method", ["evaluate", "full_state_dict"])
def test_what_needs_a_drained_pipeline_is_refused_while_it_is_full(make, method):
    """Evaluating from `on_minibatch` took the stream's messages for its own."""
    trainer = make(plan=whole(1, schedule="pipedream"))

    def interfere(_):
        getattr(trainer, method)(*[data(8)] * (method != "full_state_dict"))

    with pytest.raises(RuntimeError, match=f"{method} was called while minibatches are under way"):
        trainer.fit(data(48), on_minibatch=interfere)


@pytest.mark.parametrize("schedule, count", [("1f1b", 4), ("pipedream", 1)])
@pytest.mark.parametrize("method", ["train_step", "fit", "prepare", "save", "resume"])
def test_what_changes_the_state_is_refused_while_fit_trains(make, tmp_path, method, schedule, count):
    """A step within `fit` once ended in an assertion; what only looks is allowed after a flush."""
    trainer, samples = make(plan=whole(count, schedule=schedule)), data(16)
    saved = make().save(tmp_path / "before")
    calls = {
        "train_step": lambda: trainer.train_step(*samples[:8]),
        "fit": lambda: trainer.fit(samples),
        "prepare": lambda: trainer.prepare(samples),
        "save": lambda: trainer.save(tmp_path),
        "resume": lambda: trainer.resume(saved),
    }

    def called(record):
        if schedule == "1f1b":
            trainer.evaluate(samples)
        with pytest.raises(RuntimeError, match=f"^{method} was called while fit trains; "):
            calls[method]()

    trainer.fit(samples, on_minibatch=called)
    assert trainer.epoch == 1


def test_resume_refuses_gradients_that_await_an_update(make, tmp_path):
    """The next step once added them to the resumed weights' own."""
    trainer, samples = make(), data(8)
    saved = trainer.save(tmp_path)
    with trainer.no_sync():
        trainer.train_step(*samples[:])
    with pytest.raises(RuntimeError, match=r"^resume was called between no_sync and the update"):
        trainer.resume(saved)
    trainer.train_step(*samples[:])
    trainer.resume(saved)
    assert trainer.step == 0


@pytest.mark.parametrize(
    "method", ["train_step", "fit", "evaluate", "prepare", "save", "resume", "full_state_dict"]
)
def test_a_closed_trainer_says_so(make, tmp_path, method):
    """A closed trainer once made a new plan and measured the model for it."""
    trainer, samples = make(), data(8)
    given = {"train_step": samples[:], "save": (tmp_path,), "resume": (tmp_path,), "full_state_dict": ()}
    trainer.close()
    with pytest.raises(RuntimeError, match=f"^{method} was called after close; make a new Trainer$"):
        getattr(trainer, method)(*given.get(method, (samples,)))


@pytest.mark.parametrize("schedule, count", [("1f1b", 4), ("pipedream", 1), ("pipedream-2bw", 4)])
def test_fit_left_in_the_middle_can_go_on_where_nothing_is_under_way(make, schedule, count):
    """On one rank; on several an asynchronous schedule ends the job (tests/mpi)."""
    samples, seen = data(48), []

    def leave(record):
        seen.append(record.step)
        if record.step == 2:
            raise LookupError("seen enough")

    trainer = make(plan=whole(count, schedule=schedule))
    with pytest.raises(LookupError, match="seen enough"):
        trainer.fit(samples, on_minibatch=leave)
    done = trainer.step
    trainer.fit(samples)
    assert seen == [0, 1, 2] and 3 <= done <= 6 and trainer.step == done + 6


@pytest.mark.parametrize("named", [False, True], ids=["a given plan", "a plan that is measured"])
@pytest.mark.parametrize(
    "options, told",
    [
        ({"optimizer": torch.optim.LBFGS}, r"got LBFGS with step\(closure\)"),
        ({"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "got ReduceLROnPlateau with step"),
    ],
)
def test_what_wants_a_closure_or_a_metric_is_refused(make, options, told, named):
    with pytest.raises(ValueError, match=told):
        make(plan="dp" if named else whole(), **options).prepare(data(8))


def test_modules_that_are_not_split_have_names(make):
    inner = nn.Sequential(nn.PReLU(6), nn.Linear(6, 3))
    model = nn.Sequential(nn.Linear(4, 6), inner, nn.PReLU()).double()
    assert make(model, plan=whole(schedule="zero-bubble")).not_split() == ["1.0 (PReLU)", "2 (PReLU)"]
    assert make(model).not_split() == []


def test_evaluate_is_over_all_samples(make):
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    samples = data(21)
    assert make(model).evaluate(samples) == pytest.approx(as_predicted(samples, model), rel=0, abs=1e-12)


def test_evaluating_changes_nothing(make):
    trainer, samples = make(model := mlp()), data(8)
    before = copy.deepcopy(model)
    trainer.evaluate(samples)
    assert_same_weights(model, before)
    assert all(p.grad is None for p in model.parameters())


def test_full_state_dict_is_that_of_the_model(make):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    trainer = make(model)
    trainer.fit(data(16))
    state, expected = trainer.full_state_dict(), model.state_dict()
    assert list(state) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor) and state[key].dtype == tensor.dtype
        assert state[key].data_ptr() != tensor.data_ptr(), "a copy, as training goes on"
    model.load_state_dict(state)


def test_summary(make):
    trainer = make()
    trainer.fit(data(8 * 6))
    summary = trainer.summary()
    named_in_the_design = {
        "plan", "ranks", "samples_per_second", "minibatch_seconds_median", "predicted_minibatch_seconds",
        "bubble_fraction", "loss_first", "loss_last", "metrics", "peak_memory_bytes", "bytes_sent_p2p",
        "bytes_allreduced",
    }  # fmt: skip
    assert named_in_the_design <= summary.keys()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["minibatches"] == 6 and summary["bytes_sent_p2p"] == summary["bytes_allreduced"] == 0
    assert summary["samples_per_second"] == pytest.approx(8 / summary["minibatch_seconds_median"])
    assert 0 <= summary["bubble_fraction"] < 1
    timeline = trainer.timeline()
    assert list(timeline.events) == [0] and timeline.seconds <= 2 * summary["minibatch_seconds_median"] + 0.1


def test_train_step_is_in_the_summary(make):
    trainer, batch = make(), data(8)[:]
    losses = [trainer.train_step(*batch) for _ in range(5)]
    summary = trainer.summary()
    assert summary["minibatches"] == 5 and summary["samples_per_second"] > 0
    assert (summary["loss_first"], summary["loss_last"]) == (losses[0], losses[-1])


def test_what_is_no_model_is_refused(make):
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got int"):
        make(3)
    with pytest.raises(TypeError, match="a function that returns one; <lambda> returns None"):
        make(lambda: None)


class Nothing(Dataset):
    def __len__(self):
        return 0


@pytest.mark.parametrize("plan", [whole(), "dp"])
def test_an_empty_data_set_is_refused(make, plan):
    for method in ("fit", "evaluate"):
        with pytest.raises(ValueError, match="dataset must hold at least one sample"):
            getattr(make(plan=plan), method)(Nothing())


def test_tuples_of_inputs(make):
    class Add(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    model = nn.Sequential(Add(), nn.Linear(4, 6), nn.Linear(6, 3)).double()
    reference, (inputs, targets) = copy.deepcopy(model), data(8)[:]
    batch = ((inputs, 2 * inputs), targets)
    assert make(model).train_step(*batch) == pytest.approx(
        plain_loop(reference, [batch])[0], rel=0, abs=1e-12
    )
    assert_same_weights(model, reference)


def test_a_rank_0_error_in_the_loss_comes_through(make):
    with pytest.raises(ValueError, match=r"loss must return .* got shape \(2,\)"):
        make(loss=partial(cross_entropy, reduction="none")).train_step(*data(8)[:])
