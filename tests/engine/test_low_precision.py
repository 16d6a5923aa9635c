"""Precisions in threads: every schedule trains what one process does with the same autocast.

Values at the cuts are 16 bits wide, as between linear layers, so all plans round in the same places: they
agree to float32's last bits, until one of these decides about a rounding.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.optim.loss_scale import INITIAL
from hybridpipe.optim.update import UpdateRule
from tests.engine import asynchronous_reference
from tests.engine.asynchronous_reference import backward
from tests.engine.helpers import in_threads, make_plan
from tests.thinned import rare, thinned

PLANS = ["1-1", "2", "2-1", "1-2-1"]
SYNCHRONOUS = ["gpipe", "1f1b", "zero-bubble"]
ASYNCHRONOUS = {"pipedream": "pipedream", "pipedream, vertical sync": "vertical", "pipedream-2bw": "2bw"}
SCHEDULES = [*SYNCHRONOUS, *ASYNCHRONOUS]
INTERLEAVED = ["interleaved-1f1b", "zb-v", "v-half", "v-min"]
CASES = [
    *thinned(PLANS, SCHEDULES, ["bf16", "fp16"]),
    ("1-1", "interleaved-1f1b", "bf16"),
    rare("1-1", "interleaved-1f1b", "fp16"),
    *(("1-2-1", schedule, "bf16-params") for schedule in SCHEDULES),
    ("1-1", "zb-v", "fp16"),
    ("2-2", "v-half", "bf16"),
    ("1-1-1", "v-min", "bf16-params"),
]
LOW = {"bf16": torch.bfloat16, "bf16-params": torch.bfloat16, "fp16": torch.float16}
DIGITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding, relative
LAST_BITS, RATE, SIZE, UPDATES = 2e-6, 0.1, 2, 20
SGD = partial(torch.optim.SGD, lr=RATE)
cross_entropy = nn.functional.cross_entropy


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [module for _ in range(3) for module in (nn.Linear(12, 12), nn.Tanh())]
    return nn.Sequential(*inner, nn.LayerNorm(12), nn.Linear(12, 5))


def make_data(count: int):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SIZE * count, 12, generator=generator),
            torch.randint(0, 5, (SIZE * count,), generator=generator),
        )
        for _ in range(UPDATES)
    ]


def in_microbatches(data):
    return [list(zip(x.split(SIZE), y.split(SIZE), strict=True)) for x, y in data]


def one_process(data, low: torch.dtype, scale: float) -> list[float]:
    """Return the losses of a plain loop with gradient accumulation and a constant scale."""
    model, losses = copy.deepcopy(make_model()), []
    optimizer = SGD(model.parameters())
    for microbatches in in_microbatches(data):
        losses.append(backward([model], microbatches, cross_entropy, 0, 0, scale, low))
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name, schedule, precision", CASES)
def test_losses_are_those_of_one_process(name, schedule, precision):
    chunks, rule = 1 + (schedule in INTERLEAVED), ASYNCHRONOUS.get(schedule)
    low, model = LOW[precision], make_model()
    data = make_data(1 if rule in ("pipedream", "vertical") else 4)
    given = {"chunks": chunks, "vertical_sync": rule == "vertical", "recompute": name == "1-2-1"}
    plan = make_plan(name, len(model), len(data[0][0]) // SIZE, schedule.partition(",")[0], **given)
    scale = INITIAL if precision == "fp16" else 1.0
    if rule is None:
        expected = one_process(data, low, scale)
    else:
        edges = [0, *(stage.stop for stage in plan.stages)]
        reference = model, edges, plan.replicas, in_microbatches(data), cross_entropy, SGD, rule
        _, expected = asynchronous_reference.train(*reference, scale=scale, low=low)
    rule_of_ours = UpdateRule(SGD, precision=precision)
    result = in_threads(plan, model, data, SIZE, cross_entropy, rule=rule_of_ours)
    gaps = [abs(a - b) / abs(b) for a, b in zip(result.losses, expected, strict=True)]
    assert max(gaps[:10]) <= LAST_BITS, gaps
    assert max(gaps) <= DIGITS[low], gaps
    assert result.losses[-1] != result.losses[0]
    assert {parameter.dtype for parameter in result.parameters} == {torch.float32}
    if rule is None:  # where a loss has few samples, the first scale overflows
        assert not any(executor.num_skipped for executor in result.executors.values())
