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
    with FP32.context(CPU), FP32.recording():
        assert not torch.is_autocast_enabled("cpu")
    for dtype in (torch.float32, torch.float64):
        assert FP32.sent(torch.zeros(2, dtype=dtype, requires_grad=True)) == dtype
    assert not FP32.scales_loss


@pytest.mark.parametrize("name", LOW)
def test_float32_crosses_cuts_in_half_its_bytes_and_other_types_as_they_are(name):
    precision, value = Precision(name), torch.zeros(3, requires_grad=True)
    others = [torch.float64, torch.complex64, torch.float16, torch.bfloat16]
    assert precision.sent(value) == LOW[name]
    assert [precision.sent(torch.zeros(1, dtype=each, requires_grad=True)) for each in others] == others
    assert precision.sent_bytes([value, torch.zeros(2, dtype=torch.int64)]) == 3 * 2 + 2 * 8


@pytest.mark.parametrize("name", LOW)
def test_what_has_no_gradient_crosses_as_it_is(name):
    """Numbers of tokens in float32 lost their last digits, and a mask of the least number became infinite."""
    assert Precision(name).sent(torch.tensor([257.0, torch.finfo(torch.float32).min])) == torch.float32


def test_weights_that_autocast_would_cast_are_lowered():
    embedding, tied = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    tied.weight = embedding.weight
    norm = nn.LayerNorm([3, 4])
    layers = nn.Sequential(embedding, norm, nn.Linear(4, 4), nn.Conv1d(3, 3, 1), tied)
    assert Precision("bf16-params").lowered(layers) == {layers[2].weight, layers[3].weight}
    assert Precision("bf16").lowered(layers) == FP32.lowered(layers) == set()


def test_an_embedding_adds_up_many_equal_tokens():
    """Its copy in bfloat16 stopped at 256 of them."""
    layers = StageModule([nn.Embedding(2, 3), nn.Linear(3, 1)], precision=Precision("bf16-params"))
    stage = Stage(layers, CPU, loss=lambda outputs, _: outputs.sum())
    tokens = torch.zeros(1, 1024, dtype=torch.int64)
    stage.forward_loss(0, None, torch.zeros(1), 1.0, 0, inputs=tokens)
    stage.backward(0)
    weight = stage.module[1].weight.bfloat16().float()
    torch.testing.assert_close(stage.module[0].weight.grad[:1], 1024 * weight, rtol=1e-2, atol=0)


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
