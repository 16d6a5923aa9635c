"""Points where an executor looks for a fault: a microbatch of a minibatch, or the next update."""

from types import SimpleNamespace

import torch

from hybridpipe.data.stream import Minibatch, Stream
from hybridpipe.engine import faulty
from hybridpipe.engine.faulty import FaultyExecutor


def test_a_fault_is_looked_for_by_step_and_microbatch(monkeypatch):
    seen = []
    monkeypatch.setattr(faulty.faults, "at", lambda point, **where: seen.append((point, where)))
    stream = Stream([Minibatch((2, 2), lambda m: None, lambda m: None)] * 2, step=7)
    run = SimpleNamespace(stream=stream, covered=1)
    for point, m in (("forward", 0), ("backward", 3), ("step", -1)):
        FaultyExecutor._fault(None, run, point, m)
    assert seen == [
        ("forward", {"step": 7, "microbatch": 0}),
        ("backward", {"step": 8, "microbatch": 1}),
        ("step", {"step": 8}),
    ]


def test_only_what_can_hold_nan_becomes_it():
    spoilt = faulty._not_numbers(torch.ones(2, requires_grad=True))
    assert spoilt.isnan().all() and spoilt.requires_grad
    assert faulty._not_numbers(torch.arange(3)).tolist() == [0, 1, 2]
