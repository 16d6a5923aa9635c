"""Plans beside the memory that their ranks have, in a world of one rank."""

import pytest
import torch
from torch import nn

from hybridpipe.environment.memory_limits import RESERVE, RankMemory
from hybridpipe.errors import UserError
from hybridpipe.planning.search.search import NoPlanFits
from hybridpipe.training.planner import planner
from tests.training.helpers import data, whole

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("plan", ["dp", "straight", "auto"])
def test_no_plan_is_made_beyond_a_given_limit(make, plan):
    trainer = make(plan=plan, memory="1MB")  # less than Python has
    with pytest.raises(NoPlanFits, match="no plan fits into memory") as caught:
        trainer.train_step(*data(8)[:])
    told = str(caught.value).splitlines()[-1]
    assert told.startswith("rank 0 has 0 B for its stage: its limit is 1 MB (given), its process has ")


def test_a_given_plan_beyond_a_given_limit_is_refused(make):
    trainer = make(plan=whole(), memory=10**6)
    with pytest.raises(UserError, match=r"plan 1 does not fit .* its limit is 1 MB \(given\): plan 'auto'"):
        trainer.train_step(*data(8)[:])


def test_a_given_plan_beyond_a_limit_that_was_found_runs_with_a_warning(make, monkeypatch, capsys):
    monkeypatch.setattr(planner, "memory_of_ranks", lambda *_: [RankMemory(10**6, 10**6, "RAM")])
    trainer = make(plan=whole(), predict=True)
    trainer.train_step(*data(8)[:])
    told = capsys.readouterr().err
    assert told.startswith("hybridpipe: plan 1 does not fit into memory by prediction: rank 0 has 1 MB")
    assert trainer.summary()["memory_limit_origin"] == ["RAM"]


def test_a_limit_with_room_changes_nothing(make):
    free, limited = make(plan="auto", microbatch_size=2), make(plan="auto", microbatch_size=2, memory="8GB")
    for trainer in (free, limited):
        trainer.train_step(*data(8)[:])
    assert limited.plan.stages == free.plan.stages
    summary = limited.summary()
    assert summary["memory_limit_bytes"] == [8 * 10**9] and summary["memory_limit_origin"] == ["given"]


@pytest.mark.parametrize("memory", [0, -5, 1.5, True, "much", "2 GBit", "0GB"])
def test_other_limits_are_refused(make, memory):
    with pytest.raises(ValueError, match="memory must be "):
        make(memory=memory)


def test_a_checkpoints_plan_that_does_not_fit_gives_way_to_a_search(make, monkeypatch, capsys, tmp_path):
    """One microbatch of 8 samples needs more than four of 2; the checkpoint knows no prediction."""
    small, large = (make(plan="auto", microbatch_size=size) for size in (2, 8))
    for trainer in (small, large):
        trainer.train_step(*data(8)[:])
    needs, most = (trainer.summary()["predicted_memory_bytes"][0] for trainer in (small, large))
    limit = most - 1
    assert needs <= limit / RESERVE
    large.save(tmp_path)
    monkeypatch.setattr(planner, "memory_of_ranks", lambda *_: [RankMemory(0, limit, "given")])
    again = make(plan="auto", memory=limit)
    assert again.resume(tmp_path)[-1] == "with its plan 1, 1f1b"
    again.train_step(*data(8)[:])
    assert again.plan.num_microbatches > 1 and again.step == 2
    assert "does not fit into memory by prediction" in capsys.readouterr().err


def test_a_checkpoints_plan_is_predicted_as_that_of_a_search(make, tmp_path):
    """Else a training that goes on under "auto" has no prediction, and no check of its memory."""
    first = make(plan="auto", microbatch_size=2)
    first.train_step(*data(8)[:])
    first.save(tmp_path)
    again = make(plan="auto", microbatch_size=2)
    assert again.resume(tmp_path)[-1] == "with its plan 1, 1f1b"
    again.train_step(*data(8)[:])
    assert again.plan.predicted is not None and again.choice is not None


class Huge(nn.Module):
    """A layer whose output for more than two samples is beyond any memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return (x * self.weight).expand(2**48 if len(x) > 2 else 1, *x.shape).contiguous()[0]


def test_a_microbatch_too_large_to_be_measured_is_told(make):
    trainer = make(nn.Sequential(Huge(), nn.Linear(4, 3).double()), plan="auto", microbatch_size=4)
    with pytest.raises(MemoryError, match="the whole model on a microbatch of 4 samples: give a smaller one"):
        trainer.train_step(*data(8)[:])
