import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridpipe.cli import sleeping
from hybridpipe.cli.sleeping import Pace, sleeping_loss
from hybridpipe.cli.sleeping import SleepingLayer as layer
from hybridpipe.model.stage_module import StageModule
from hybridpipe.planning.profile import LayerProfile
from hybridpipe.stage.stage import Stage

CPU = torch.device("cpu")


class Noted(Pace):
    """Notes what it was told instead of sleeping."""

    def __init__(self):
        super().__init__()
        self.told, self.went_on = [], []

    def sleep(self, seconds, uninterrupted=False):
        self.told.append(seconds)
        self.went_on.append(uninterrupted)


def profile(parameters=0, output=0, gradient=None) -> LayerProfile:
    return LayerProfile("layer", 1.0, 5.0, parameters, output, 0, gradient_bytes=gradient, weight_seconds=2.0)


def test_sleeps_are_as_long_in_total_as_they_were_to_be():
    pace, began = Pace(), time.perf_counter()
    for _ in range(200):
        pace.sleep(1e-4)
    assert time.perf_counter() - began >= 200 * 1e-4 - 4e-4  # what is owed is too short to sleep


def test_what_goes_by_between_two_sleeps_is_part_of_the_second(monkeypatch):
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now.append(now[-1] + seconds)

    clock = SimpleNamespace(perf_counter=lambda: now[-1], sleep=sleep)
    monkeypatch.setattr(sleeping, "time", clock)
    pace = Pace()
    pace.sleep(0.25)
    now.append(now[-1] + 0.5)
    pace.sleep(0.375, uninterrupted=True)
    assert slept == [0.25]
    pace.sleep(1.0)
    assert slept == [0.25, 0.875]  # 0.125 s were given too many


@pytest.mark.parametrize("split", [False, True])
def test_forward_then_each_half_of_the_backward(split):
    pace = Noted()
    layers = [  # the second has no weights: a backward in one piece
        layer(profile(4), pace, ends=False, split=split),
        layer(profile(0), pace, leads=False, split=split),
    ]
    stage = Stage(StageModule(layers), CPU, loss=sleeping_loss, split_backward=split)
    stage.forward_loss(0, torch.zeros(1, 1), torch.zeros(1, 1), 1.0, 0)
    assert pace.told == [1.0, 1.0]
    if split:
        stage.backward_input(0)
        assert pace.told[2:] == [5.0, 3.0]
        stage.backward_weight(0)
        assert pace.told[4:] == [2.0]
    else:
        stage.backward(0)
        assert pace.told[2:] == [5.0, 5.0]
    assert pace.went_on[:4] == [False, True, False, True]  # a stage's first forward and last backward waited


def test_only_what_is_sent_or_reduced_has_its_size():
    pace = Noted()
    inner, cut = layer(profile(800, 64), pace, reduced=True), layer(profile(800, 64, 40), pace, cut=True)
    assert (inner.weight.nbytes, cut.weight.nbytes) == (800, 4)
    assert inner(torch.zeros(1)).nbytes == 4
    with_gradient, without = cut(torch.zeros(1))
    assert (with_gradient.nbytes, without.nbytes) == (40, 24)
    assert (with_gradient.requires_grad, without.requires_grad) == (True, False)


def test_microbatches_share_memory():
    pace = Noted()
    stage = Stage(StageModule([layer(profile(400, 64), pace, reduced=True, cut=True)]), CPU)
    outputs = [stage.forward(m, torch.zeros(16, requires_grad=True), 0) for m in (0, 1)]
    assert len({output.data_ptr() for output in outputs}) == 1
    gradients = [stage.backward(m, [torch.zeros(16)])[0] for m in (1, 0)]
    assert [gradient.shape for gradient in gradients] == [(16,), (16,)]
    (weight,) = stage.module.parameters()
    assert weight.grad.data_ptr() == stage.module[0].gradient.data_ptr()


def test_there_is_nothing_to_save():
    assert nn.Sequential(layer(profile(400), Noted(), reduced=True)).state_dict() == {}
