"""The host waits for a device once an update: while a microbatch runs it reads nothing that is computed.

Each such read on a GPU is a pause in which the GPU gets no work.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpipe.engine.executor import ProgramRun
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.schedules.instructions import AllGather, AllReduce, ReduceScatter, Step
from tests.engine.helpers import in_threads, make_plan
from tests.engine.test_executor import branches, minibatches, mlp
from tests.late_cuda import LateLanes

READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, Tensor.is_nonzero, Tensor.equal),
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, torch.equal, torch.nonzero, torch.allclose),
}
OF_AN_UPDATE = AllReduce | ReduceScatter | Step | AllGather
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Reads(TorchFunctionMode):
    """Notes the calls that read a tensor's numbers."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self.found.append(function.__name__)
        return function(*args, **kwargs or {})


class CountingLanes(LateLanes):
    """Late lanes that count how often the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def seconds(self, marks):
        self.num_waits += bool(marks)
        return super().seconds(marks)

    def synchronize(self):
        self.num_waits += 1
        super().synchronize()


@pytest.fixture
def reads(monkeypatch):
    """Reads of numbers in a microbatch's instructions, and in an update's."""
    found: dict[bool, list[str]] = {False: [], True: []}
    handle = ProgramRun.handle

    def noting(self, instruction):
        with Reads(found[isinstance(instruction, OF_AN_UPDATE)]):
            handle(self, instruction)

    monkeypatch.setattr(ProgramRun, "handle", noting)
    return found


@pytest.mark.parametrize("schedule, count", [("pipedream", 1), ("pipedream-2bw", 4)])
def test_nor_does_it_read_to_predict_weights(reads, schedule, count):
    torch.manual_seed(0)
    net = mlp()
    plan = make_plan("1-1", len(net), count, schedule, prediction="xpipe")
    lanes = {rank: CountingLanes() for rank in plan.ranks}
    rule = UpdateRule(partial(torch.optim.Adam, lr=0.1), on_nonfinite="stop")
    in_threads(plan, net, minibatches(8, 8), 2, nn.functional.cross_entropy, rule=rule, lanes=lanes)
    assert reads[False] == [] and set(reads[True]) == {"__bool__"}


@pytest.mark.parametrize("model", [mlp, branches])
@pytest.mark.parametrize(
    "name, schedule", [("1", "1f1b"), ("1-1", "1f1b"), ("1-1-1", "zero-bubble"), ("1-1", "gpipe")]
)
def test_the_host_reads_nothing_while_microbatches_run_and_waits_once_an_update(reads, name, schedule, model):
    torch.manual_seed(0)
    net = model()
    plan = make_plan(name, len(net), 4, schedule)
    lanes = {rank: CountingLanes() for rank in plan.ranks}
    rule = UpdateRule(momentum, on_nonfinite="stop")
    in_threads(plan, net, minibatches(8, 8), 2, nn.functional.cross_entropy, rule=rule, lanes=lanes)
    assert reads[False] == []
    assert reads[True] == ["__bool__"] * 2 * plan.num_ranks  # whether gradients are finite
    assert {each.num_waits for each in lanes.values()} == {2}
