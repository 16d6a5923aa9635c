"""Under mpirun with 3 ranks: callbacks, breaks within an epoch and averages are alike on every rank.

Usage: callbacks.py FOLDER
"""

import copy
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybridpipe import Callback, Checkpointing, Plan, StageSpec, Trainer
from hybridpipe.callbacks import EMA, BestCheckpoint, CSVLogger, EarlyStopping
from hybridpipe.checkpoint.saved_model import SavedModel, find_checkpoint

folder = Path(sys.argv[1])
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
SAMPLES = torch.utils.data.TensorDataset(torch.randn(48, 4).double(), torch.randint(0, 3, (48,)))
HELD_OUT = torch.utils.data.TensorDataset(torch.randn(12, 4).double(), torch.randint(0, 3, (12,)))
LOSS, ADAM = nn.functional.cross_entropy, partial(torch.optim.Adam, lr=0.01)


def make(schedule="1f1b", zero=0, model=MODEL, **options):
    count = 1 if schedule == "pipedream" else 3
    stages = StageSpec(0, 3, 2, zero=zero), StageSpec(3, 5)
    given = {"loss": LOSS, "optimizer": ADAM, "minibatch_size": 12, "plan": Plan(stages, schedule, count)}
    return Trainer(copy.deepcopy(model), **(given | options))


class OneWants(Callback):
    """Rank 1 alone wants the end, with its fourth record."""

    def on_minibatch(self, run, record):
        if run.rank == 1 and record.step == 3:
            run.stop()


class Told(Callback):
    def __init__(self):
        self.said = []

    def on_minibatch(self, run, record):
        self.said.append(record.step)

    def on_evaluate(self, run, metrics):
        self.said.append(metrics)

    def on_checkpoint(self, run, path):
        self.said.append(str(path))


def alike(trainer, value):
    seen = trainer.world.allgather(value)
    assert all(each == seen[0] for each in seen), seen


def one_rank_ends_it(schedule, last):
    told = Told()
    trainer = make(schedule, callbacks=[OneWants(), told], minibatch_size=6)
    trainer.fit(SAMPLES, 10, validation=HELD_OUT, checkpoint=Checkpointing(folder / schedule))
    alike(trainer, (trainer.step, trainer.stopped, told.said))
    assert trainer.stopped and trainer.step == last, trainer.step
    trainer.close()


def breaks():
    told = Told()
    best, log = BestCheckpoint(folder / "best", restore=True), CSVLogger(folder / "log.csv")
    trainer = make(callbacks=[told, best, log, EarlyStopping(patience=99)])
    trainer.fit(SAMPLES, max_steps=7, validation=HELD_OUT, eval_every=3)
    alike(trainer, (trainer.step, told.said, best.best.value))
    evaluated = [each for each in told.said if isinstance(each, dict)]
    assert trainer.step == 7 and len(evaluated) == 3  # at 3, 4 and 6
    assert best.best.value == min(each["loss"] for each in evaluated)
    assert trainer.evaluate(HELD_OUT)["loss"] == best.best.value and trainer.step == 7
    trainer.close()
    again = make()
    again.resume(folder / "best")
    assert again.evaluate(HELD_OUT)["loss"] == best.best.value
    again.close()


def averages():
    reference = copy.deepcopy(MODEL)
    average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    update = ADAM(reference.parameters())
    for start in [*range(0, 48, 12)] * 3:
        inputs, targets = SAMPLES[start : start + 12]
        update.zero_grad()
        LOSS(reference(inputs), targets).backward()
        update.step()
        average.update_parameters(reference)
    held_out = LOSS(average.module(HELD_OUT[:][0]), HELD_OUT[:][1]).item()
    for zero in (0, 1):  # the second one resumes from the first
        trainer = make(zero=zero, callbacks=[EMA(0.9)])
        trainer.resume(folder / "ema", or_anew=True)
        saving = Checkpointing(folder / "ema")
        history = trainer.fit(SAMPLES, 1 + zero, shuffle=False, validation=HELD_OUT, checkpoint=saving)
        trainer.close()
    assert abs(history[-1]["validation"]["loss"] - held_out) < 1e-12
    saved = SavedModel(find_checkpoint(folder / "ema")[0], averages=True)  # of parts, which two ranks updated
    for key, tensor in average.module.state_dict().items():
        torch.testing.assert_close(saved.read(key), tensor, rtol=0, atol=1e-12)


def predictions():
    """More samples than a minibatch, a short last one, and microbatches that replicas share."""
    expected = copy.deepcopy(MODEL).eval()(SAMPLES[:41][0])
    stages = StageSpec(0, 3), StageSpec(3, 5, 2)
    trainer = make(plan=Plan(stages, num_microbatches=3))
    found = trainer.predict(torch.utils.data.Subset(SAMPLES, range(41)))
    assert found is None if trainer.world.rank else torch.allclose(found, expected, 0, 1e-12)
    trainer.close()


class Stacked(nn.Module):
    """As many layers of state as a microbatch has samples."""

    def forward(self, x):
        return x, torch.stack([x] * 4)


def lists():
    """Lengths that differ, and a state whose samples are not in its first dimension."""
    words = [torch.randn(1 + i % 5, 4).double() for i in range(24)]
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    stages = StageSpec(0, 3), StageSpec(3, 6, 2)
    trainer = make(
        model=nn.Sequential(*copy.deepcopy(MODEL), Stacked()),
        plan=Plan(stages, num_microbatches=3),
        loss=lambda outputs, targets: LOSS(outputs[0], targets),
        collate_fn=lambda samples: (pad([each for each, _ in samples]), torch.zeros(len(samples))),
    )
    found = trainer.predict([(each, 0) for each in words])
    if trainer.world.rank == 0:
        outputs, states = found
        assert [len(each) for each in outputs[:8]] == [4] * 4 + [5] * 4 and len(states) == 6
        for i, (output, each) in enumerate(zip(outputs, words, strict=True)):
            torch.testing.assert_close(output[: len(each)], MODEL(each), rtol=0, atol=1e-12)
            torch.testing.assert_close(states[i // 4][0, i % 4], output, rtol=0, atol=0)
    trainer.close()


def by_name(named_parameters):
    """AdamW of torch's own form for names, without decay of biases."""
    groups = {0.1: [], 0.0: []}
    for name, parameter in named_parameters:
        assert parameter.shape == dict(MODEL.named_parameters())[name].shape
        groups[0.0 if name.endswith("bias") else 0.1].append((name, parameter))
    made = [{"params": named, "weight_decay": decay} for decay, named in groups.items()]
    return torch.optim.AdamW(made, lr=0.01)


def names():
    """Parameters are told apart by name under any plan, and a training goes on under another one."""
    reference = copy.deepcopy(MODEL)
    update = by_name(reference.named_parameters())
    for start in [*range(0, 48, 12)] * 2:
        inputs, targets = SAMPLES[start : start + 12]
        update.zero_grad()
        LOSS(reference(inputs), targets).backward()
        update.step()
    for stages in ((StageSpec(0, 3, 2), StageSpec(3, 5)), (StageSpec(0, 5, 3, zero=1),)):
        trainer = make(plan=Plan(stages, num_microbatches=3), optimizer=by_name)
        trainer.resume(folder / "names", or_anew=True)
        trainer.fit(SAMPLES, shuffle=False, checkpoint=Checkpointing(folder / "names"))
        state = trainer.full_state_dict()
        trainer.close()
    for key, tensor in reference.state_dict().items() if state else ():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-12)


def without_room():
    """Rank 1 has no room for a copy of its state: all ranks wait, and what is saved is the same."""
    states = []
    for limit in (None, 1):
        trainer = make(callbacks=[])
        trainer._checkpoints.limit_bytes = limit if trainer.world.rank == 1 else None
        trainer.fit(SAMPLES, max_steps=3, checkpoint=Checkpointing(folder / f"room{limit}", every=2))
        trainer.close()
        again = make()
        again.resume(folder / f"room{limit}" / "step-00000002")
        again.fit(SAMPLES, max_steps=3)
        states.append((trainer.model.state_dict(), again.full_state_dict()))
        again.close()
    for before, after in zip(*states, strict=True):
        assert before is None or all(torch.equal(before[key], after[key]) for key in before)


one_rank_ends_it("1f1b", 7)
one_rank_ends_it("pipedream", 8)  # with the epoch
breaks()
averages()
predictions()
lists()
names()
without_room()
print("callbacks: alike", flush=True)
