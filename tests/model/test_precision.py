"""The types of a precision; what plans make of them is in tests/mpi/test_precision.py."""

import pytest
import torch
from torch import nn

from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.stage_module import StageModule
from hybridpipe.stage.stage import Stage

CPU = torch.device("cpu")
LOW = {"bf16": torch.bfloat16, "bf16-params": torch.bfloat16, "fp16": torch.float16}


def test_fp32_changes_nothing():
    with FP32.forward(CPU), FP32.recording():
        assert not torch.is_autocast_enabled("cpu")
    assert [FP32.sent(dtype) for dtype in (torch.float32, torch.float64)] == [torch.float32, torch.float64]
    assert not FP32.scales_loss


@pytest.mark.parametrize("name", LOW)
def test_float32_crosses_cuts_in_half_its_bytes_and_other_types_as_they_are(name):
    precision, low = Precision(name), LOW[name]
    kept = [torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16]
    assert precision.sent(torch.float32) == low and [precision.sent(each) for each in kept] == kept
    assert precision.sent_bytes([torch.zeros(3), torch.zeros(2, dtype=torch.int64)]) == 3 * 2 + 2 * 8


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_run_under_autocast_and_the_loss_in_float32(name, recompute):
    seen = []

    class Sees(nn.Linear):
        def forward(self, x):
            value = super().forward(x)
            seen.append((value.dtype, torch.is_autocast_enabled("cpu")))
            return value

    def loss(outputs, targets):
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return nn.functional.mse_loss(outputs, targets)

    layers = StageModule([nn.Linear(3, 4), Sees(4, 2)], precision=Precision(name))
    stage = Stage(layers, CPU, loss=loss, recompute=recompute)
    stage.forward_loss(0, None, torch.zeros(5, 2), 1.0, 0, inputs=torch.ones(5, 3))
    stage.backward(0)
    assert seen == [(LOW[name], True), (torch.float32, False)] * (1 + recompute)
    assert {parameter.grad.dtype for parameter in stage.module.parameters()} == {torch.float32}
    assert stage.infer(0, None, 0, torch.ones(5, 3)).dtype == torch.float32


def test_gradients_are_larger_by_the_scale_of_the_loss():
    def gradient(scale):
        torch.manual_seed(0)
        stage = Stage(StageModule([nn.Linear(3, 2)]), CPU, loss=nn.functional.mse_loss)
        stage.forward_loss(0, None, torch.zeros(5, 2), 1.0, 0, inputs=torch.ones(5, 3), scale=scale)
        stage.backward(0)
        return stage.module[0].weight.grad

    assert torch.equal(gradient(1024.0), gradient(1.0) * 1024)


def test_another_name_is_refused():
    with pytest.raises(ValueError, match=r"precision must be .*fp32, bf16.*got 'bfloat16'"):
        Precision("bfloat16")
