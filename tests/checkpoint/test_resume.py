"""Streams that are stopped and resumed, in threads: the weights are those of a stream without a stop.

Without dropout, as threads share torch's generator; tests/mpi has it, and the files.
"""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridpipe import Plan, StageSpec
from hybridpipe.checkpoint.resume import _loss_scales, is_exact
from hybridpipe.data.stream import Stream, slice_minibatch
from hybridpipe.errors import UserError
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.schedules.generators import resume_points_every
from hybridpipe.planning.schedules.instructions import RankProgram
from hybridpipe.planning.schedules.resume_point import (
    ResumePoint,
    num_updates,
    resumed_program,
    versions_in_use,
)
from hybridpipe.stage.state import pack
from tests.engine.helpers import each_in_a_thread, make_executors, make_plan
from tests.engine.test_asynchronous import cross_entropy, make_data

MICROBATCH = 2
KINDS = {
    "stashing": {"schedule": "pipedream", "num_microbatches": 1},
    "vertical sync": {"schedule": "pipedream", "num_microbatches": 1, "vertical_sync": True},
    "limited": {"schedule": "pipedream", "num_microbatches": 1, "max_in_flight": 2},
    "recomputing": {"schedule": "pipedream", "num_microbatches": 1, "recompute": True},
    "2bw": {"schedule": "pipedream-2bw", "num_microbatches": 3},
    "predicting": {"schedule": "pipedream", "num_microbatches": 1, "prediction": "spectrain"},
    "predicting 2bw": {"schedule": "pipedream-2bw", "num_microbatches": 3, "prediction": "spectrain"},
    "predicting early": {
        "schedule": "pipedream-2bw",
        "num_microbatches": 2,
        "prediction": "spectrain",
        "max_in_flight": 1,
    },
}
RULE = UpdateRule(
    partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=60),
    delay_warm_up=0,
)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.Linear(5, 5),
        nn.Linear(5, 3),
    ]
    return nn.Sequential(*layers).double()


class Kept:
    """What a rank has at a point: what a checkpoint holds of it."""

    def __init__(self, plan, executor, point):
        module, update = executor.stages[0].module, executor.update
        before = executor.stashed.oldest_forward_state()
        state = module.state_dict() | (before.buffers if before else {})
        self.module = {key: value.clone() for key, value in state.items()}
        stepping = (update.optimizer, update.scheduler) if update.optimizer else ()
        self.update = copy.deepcopy([each.state_dict() for each in stepping])
        self.num_minibatches = update.num_minibatches
        numbers = versions_in_use(plan, executor.place, point)
        self.versions = {
            number: [{name: leaf.detach().clone() for name, leaf in layer.items()} for layer in weights]
            for number, weights in executor.stashed.kept(numbers).items()
        }
        self.newest = num_updates(plan, executor.place.stage, point)

    def put(self, executor):
        module, update = executor.stages[0].module, executor.update
        module.load_state_dict(self.module)
        for each, state in zip((update.optimizer, update.scheduler), self.update, strict=False):
            each.load_state_dict(state)
        update.num_minibatches = self.num_minibatches
        older = {
            number: {
                parameter: weights[i][name]
                for i, layer in enumerate(module)
                for name, parameter in layer.named_parameters()
            }
            for number, weights in self.versions.items()
        }
        executor.stashed.restore(self.newest, older)


def train(plan, minibatches, point=None, kept=None, wanted=()):
    """The rest of the stream behind `point`; what each rank has at the `wanted` points, and at the end."""
    point = point or ResumePoint(0, len(minibatches))
    executors, barriers = make_executors(plan, make_model(), cross_entropy, RULE)
    stream = Stream([slice_minibatch(*each, MICROBATCH) for each in minibatches], 0)
    found = {rank: {} for rank in plan.ranks}
    losses = {}

    def work(rank):
        executor = executors[rank]
        if kept is not None:
            kept[rank].put(executor)
        done = point.done
        for update in executor.run(
            RankProgram(resumed_program(plan, executor.place, len(stream.sizes), point)), stream, done
        ):
            done += update.num_minibatches
            losses.update(update.losses)
            if done in wanted or done == point.total:
                found[rank][done] = Kept(plan, executor, ResumePoint(done, point.total))

    each_in_a_thread(plan, work, barriers)
    return found, losses


def assert_equal(one, other):
    tensors, others = {}, {}
    assert pack(one, "kept", tensors) == pack(other, "kept", others)
    torch.testing.assert_close(tensors, others, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["1-1-1-1", "1-2-1", "2-2-3"])
def test_resuming_changes_nothing(name, kind):
    """The second part begins with new executors, and nothing but what the first ones had at the point."""
    plan = make_plan(name, 6, **KINDS[kind])
    every = resume_points_every(plan)
    total = 2 * every + 8  # long enough that versions differ, and the last round is short
    data = make_data(total, MICROBATCH * plan.num_microbatches, last=2)
    points = [every, total // every * every]
    whole, losses = train(plan, data, wanted=points)
    for done in points:
        kept = {rank: found[done] for rank, found in whole.items()}
        rest, later = train(plan, data, ResumePoint(done, total), kept, wanted=points)
        assert later == {m: loss for m, loss in losses.items() if m >= done * plan.num_microbatches}
        for rank in plan.ranks:
            for at in rest[rank]:
                a, b = whole[rank][at], rest[rank][at]
                assert a.num_minibatches == b.num_minibatches and a.versions.keys() == b.versions.keys()
                assert_equal(vars(a), vars(b))


def test_the_way_of_reducing_gradients_is_no_other_plan():
    """A start measures it; anything else of a plan changes what a checkpoint holds."""

    def plan(**options):
        return Plan((StageSpec(0, 2, 2, **options),), num_microbatches=4)

    found = SimpleNamespace(plan=plan(zero=1))
    assert is_exact(found, plan(zero=1, scatter=True)) and is_exact(found, plan(zero=1))
    assert not is_exact(found, plan(zero=2)) and not is_exact(found, plan())


@pytest.mark.parametrize("found", [3, [[1.0]], [[1, 2]], [(1.0, 2)], [[1.0, 2], "ab"], [[1.0, True]]])
def test_scales_of_a_loss_that_are_none_are_refused(found):
    with pytest.raises(UserError, match="stage0: loss_scales: must be pairs of a scale and a number"):
        _loss_scales(found, "stage0")
    assert [(each.value, each.updates) for each in _loss_scales([[2.0, 3]], "stage0")] == [(2.0, 3)]
