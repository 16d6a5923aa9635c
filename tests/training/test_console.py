"""Console: the lines of a training in a world of one rank."""

import platform
import re
from functools import partial

import pytest

from hybridpipe import Callback, Checkpointing
from hybridpipe.training import console
from tests.training.helpers import seeded

pytestmark = pytest.mark.usefixtures("quick")
HOST = f"1 rank on {platform.node()}"
PLAN = "plan 1: 1 stage on 1 rank, 1f1b, 4 microbatches of 2 samples"


@pytest.fixture
def make(make):
    return partial(make, verbose=True)


@pytest.fixture
def said(capsys):
    """Lines that were said since the last call, without the time of day and with N for what is measured."""

    def lines() -> list[str]:
        found = re.findall(r"^\d\d:\d\d:\d\d (.*)$", capsys.readouterr().err, re.M)
        numbers = {r"loss [\d.]+": "loss N", r"[\d,]+ samples/s": "N samples/s", r"\S+ left": "N left"}
        for pattern, text in numbers.items():
            found = [re.sub(pattern, text, line) for line in found]
        return found

    return lines


def test_a_training_says_who_trains_which_plan_and_how_each_epoch_went(make, said):
    make().fit(seeded(24), 2, validation=seeded(8, seed=3))
    figures = "loss N; validation loss N, accuracy 0.2500; lr 0.1; N samples/s"
    assert [re.sub(r"accuracy [\d.]+", "accuracy 0.2500", line) for line in said()] == [
        HOST,
        f"{PLAN}, as given",
        f"epoch 1/2, minibatch 3/6: {figures}; N left",
        f"epoch 2/2, minibatch 6/6: {figures}",
    ]


def test_nothing_is_said_unless_verbose(make, capsys):
    make(verbose=False).fit(seeded(24), 2, validation=seeded(8, seed=3))
    assert capsys.readouterr() == ("", "")


def test_a_measured_plan_is_said_with_its_prediction(make, said):
    make(plan="dp").fit(seeded(8))
    host, measuring, plan, predicted, *_ = said()
    assert (host, measuring) == (HOST, "measuring the model")
    assert plan == "plan 1: 1 stage on 1 rank, 1f1b, 1 microbatch of 8 samples"
    assert re.fullmatch(r"predicted: \S+ \ws a minibatch of 8 samples, N samples/s", predicted)


def test_minibatches_have_a_line_once_the_last_one_is_old(make, said, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    make().fit(seeded(24))
    assert [line.partition(":")[0] for line in said()[2:]] == [
        "epoch 1/1, minibatch 1/3",
        "epoch 1/1, minibatch 2/3",
        "epoch 1/1, minibatch 3/3",
        "epoch 1/1, minibatch 3/3",
    ]


def test_the_last_minibatches_are_told_where_no_epoch_ends(make, said):
    make().fit(seeded(24), max_steps=5)
    assert said()[2:] == [
        "epoch 1, minibatch 3/5: loss N; lr 0.1; N samples/s; N left",
        "epoch 2, minibatch 5/5: loss N; N samples/s",
    ]


def test_a_resumed_training_needs_one_line_for_its_plan(make, said, tmp_path):
    def train(epochs):
        trainer = make(plan="dp", microbatch_size=2)
        trainer.fit(seeded(24), epochs, checkpoint=Checkpointing(tmp_path), resume="auto")
        trainer.close()
        return trainer.continues_plan, [line for line in said() if "epoch" not in line]

    continues, first = train(1)
    assert not continues and first[2] == PLAN and len(first) == 4
    continues, again = train(2)
    assert continues and again[2:] == [f"{PLAN}, as before"]


def test_what_a_resumed_training_has_left_is_counted_from_where_it_is(make, said, tmp_path):
    class Ends(Callback):
        def on_minibatch(self, run, record):
            assert run.steps == 6
            if record.step == 0:
                run.stop()

    trainer = make(callbacks=[Ends()])
    trainer.fit(seeded(48), checkpoint=Checkpointing(tmp_path))
    assert 1 <= trainer.step < 6
    trainer.close()
    said()
    trainer = make()
    trainer.resume(tmp_path)
    trainer.fit(seeded(48), 2)
    assert [line.partition(":")[0] for line in said()[2:]] == [
        "epoch 1/2, minibatch 6/12",
        "epoch 2/2, minibatch 12/12",
    ]


def test_on_a_terminal_a_bar_stands_below_the_lines(make, capsys, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("HYBRIDPIPE_TERMINAL", "1")
    make().fit(seeded(24), 2)
    err = capsys.readouterr().err
    assert re.search(r"6/6 \[.*minibatch/s, loss=\d", err.splitlines()[-1])
    assert len(re.findall(r"^\d\d:\d\d:\d\d epoch", err.replace("\r", "\n"), re.M)) == 2
