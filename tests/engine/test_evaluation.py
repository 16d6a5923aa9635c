"""Forwards without a graph: under any plan they give the outputs of one process, and leave no trace."""

from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.data.stream import slice_minibatch
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.schedules.instructions import RankProgram
from tests.engine.helpers import each_in_a_thread, make_executors, make_plan
from tests.planning.helpers import forward_programs

RULE = UpdateRule(partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize(
    "name, schedule, chunks",
    [
        ("1", "1f1b", 1),
        ("1-1", "1f1b", 1),
        ("2-1", "gpipe", 1),
        ("1-2-1", "pipedream-2bw", 1),
        ("1-1", "interleaved-1f1b", 2),
    ],
)
def test_an_evaluation_gives_the_outputs_of_one_process(name, schedule, chunks):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    inputs, targets = torch.randn(10, 4, dtype=torch.float64), torch.arange(10)
    plan = make_plan(name, 4, 4, schedule=schedule, chunks=chunks)
    executors, barriers = make_executors(plan, model, nn.functional.mse_loss, RULE)
    minibatch = slice_minibatch(inputs, targets, 3)
    seen = {}

    def evaluate(rank):
        program = RankProgram(forward_programs(plan, len(minibatch.sizes))[rank])
        for number in range(2):

            def note(microbatch, outputs, of, number=number):
                assert not outputs.requires_grad
                seen[number, microbatch] = outputs, of

            executors[rank].infer(program, minibatch, note, number)

    each_in_a_thread(plan, evaluate, barriers)
    assert sorted(seen) == [(number, m) for number in range(2) for m in range(4)]
    for number in range(2):
        outputs, found = zip(*(seen[number, m] for m in range(4)))
        assert torch.cat(found).equal(targets)
        torch.testing.assert_close(torch.cat(outputs), model(inputs).detach())
    stages = [stage for executor in executors.values() for stage in executor.stages]
    assert all(stage.num_stashed == 0 for stage in stages)
    assert all(p.grad is None for stage in stages for p in stage.module.parameters())


def test_each_minibatch_of_an_evaluation_draws_other_numbers():
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    plan = make_plan("1", 2, 1)
    executors, _ = make_executors(plan, model, nn.functional.mse_loss, RULE)
    minibatch = slice_minibatch(torch.ones(2, 50), torch.ones(2, 50), 1)
    program = RankProgram(forward_programs(plan, 2)[0])

    def drawn(number):
        found = []
        executors[0].infer(program, minibatch, lambda m, outputs, targets: found.append(outputs), number)
        return torch.cat(found)

    first, second = drawn(0), drawn(1)
    assert torch.equal(first, drawn(0)) and not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
