"""Batched weight gradients equal autograd's; small, shared or watched weights are left to autograd."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpipe.model.stage_module import StageModule
from hybridpipe.stage import wgrad
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.wgrad import ENOUGH_ROWS, WeightGradients

SIZE = 512
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def batched_from_512_x_512_on(monkeypatch):
    """Smaller weights than in a training, so that tests are quick."""
    monkeypatch.setattr(wgrad, "LEAST_ELEMENTS", SIZE * SIZE)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(SIZE, SIZE, bias=bias, dtype=torch.float64)


class Twice(nn.Module):
    """Uses one layer twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, inputs):
        return self.layer(torch.tanh(self.layer(inputs)))


class Checkpointed(nn.Module):
    """Runs its layer under activation checkpointing, so again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, inputs):
        return checkpoint(self.layer, inputs, use_reentrant=False)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()
        self.other.weight = self.one.weight

    def forward(self, inputs):
        return self.other(torch.tanh(self.one(inputs)))


MODELS = {
    "two layers": lambda: nn.Sequential(linear(), nn.Tanh(), linear(bias=False)),
    "tokens": lambda: nn.Sequential(nn.Unflatten(0, (-1, 2)), linear(), nn.Flatten(0, 1)),
    "used twice": lambda: nn.Sequential(Twice()),
    "the same layer at two places": lambda: nn.Sequential(layer := linear(), nn.Tanh(), layer),
    "checkpointed": lambda: nn.Sequential(Checkpointed(), linear()),
    "tied": lambda: nn.Sequential(Tied()),
}


def train(
    module: nn.Module, sizes, before_last=lambda: None, is_flushed=True, arrived=None, **options
) -> Stage:
    """Train on one minibatch, each backward right after its forward, the last one final."""
    stage = Stage(StageModule(list(module)), CPU, loss=nn.functional.mse_loss, batches_wgrad=True, **options)
    for parameter in module.parameters() if arrived else ():
        parameter.register_post_accumulate_grad_hook(arrived)
    for m, size in enumerate(sizes):
        inputs = torch.randn(size, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(m))
        stage.forward_loss(m, inputs, inputs.flip(0), share=1 / len(sizes), step=0)
        is_last = m == len(sizes) - 1
        if is_last:
            before_last()
        stage.backward(m, is_final=is_last and is_flushed)
    return stage


def expected(module: nn.Module, sizes) -> list[torch.Tensor]:
    for m, size in enumerate(sizes):
        inputs = torch.randn(size, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(m))
        (nn.functional.mse_loss(module(inputs), inputs.flip(0)) / len(sizes)).backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", [[32] * 10, [6, 2], [300, 2, 20], [20, 300]])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograds_and_hooks_run_once_with_complete_ones(name, sizes, recompute):
    module = MODELS[name]()
    plain = copy.deepcopy(module)
    seen: dict[torch.Tensor, list[torch.Tensor]] = {parameter: [] for parameter in module.parameters()}
    armed = []

    def arrived(parameter):
        if armed:
            seen[parameter].append(parameter.grad.clone())

    train(module, sizes, before_last=lambda: armed.append(True), arrived=arrived, recompute=recompute)
    for parameter, gradient in zip(module.parameters(), expected(plain, sizes), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)
        (once,) = seen[parameter]
        torch.testing.assert_close(once, gradient, rtol=1e-12, atol=1e-15)


def test_a_microbatch_of_enough_rows_is_left_to_autograd(monkeypatch):
    """The weight's other microbatches are, too: a short one would leave rows behind in the final backward."""
    noted = []
    monkeypatch.setattr(WeightGradients, "add", lambda self, use, is_last: noted.append(use))
    train(nn.Sequential(linear()), [ENOUGH_ROWS, 2])
    assert not noted
    train(nn.Sequential(linear()), [ENOUGH_ROWS - 1])
    assert len(noted) == 1


@pytest.mark.parametrize("is_final", [False, True])
def test_without_a_final_backward_the_gradients_are_completed_on_demand(is_final):
    module = nn.Sequential(linear(), linear())
    plain = copy.deepcopy(module)
    stage = train(module, [4, 4], is_flushed=is_final)
    assert (module[0].weight.grad is None) is not is_final
    stage.complete_gradients()
    for parameter, gradient in zip(module.parameters(), expected(plain, [4, 4]), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


def test_the_last_rows_wait_though_there_are_enough():
    """The last of eight microbatches of 32 rows once delayed its input's gradient by the product."""
    module = nn.Sequential(linear())
    stage = train(module, [32] * (ENOUGH_ROWS // 32), is_flushed=False)
    assert module[0].weight.grad is None and stage.has_deferred_wgrad
    train_on = torch.zeros(32, SIZE, dtype=torch.float64)
    stage.forward_loss(99, train_on, train_on, share=1.0, step=0)
    stage.backward(99)
    assert module[0].weight.grad is not None, "there are more than enough with this one"


class Routed(nn.Module):
    """Gives its second layer an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, inputs):
        return self.one(inputs) + self.other(inputs[:0]).sum()


def test_a_layer_may_get_no_rows():
    module = nn.Sequential(Routed())
    stage = train(module, [4, 4])
    assert stage.max_batched == ENOUGH_ROWS // 4
    assert torch.equal(module[0].other.weight.grad, torch.zeros(SIZE, SIZE, dtype=torch.float64))


def test_a_weight_s_rows_of_a_microbatch_count_together():
    stage = train(nn.Sequential(Twice()), [16, 16])
    assert stage.max_batched == ENOUGH_ROWS // 32


def test_no_more_than_enough_rows_and_one_microbatch_are_kept(monkeypatch):
    made = []
    monkeypatch.setattr(
        "hybridpipe.stage.stage.WeightGradients",
        lambda *args: made.append(WeightGradients(*args)) or made[-1],
    )
    train(nn.Sequential(linear()), [24] * 40)
    row_bytes = 2 * SIZE * 8
    rows = -(-ENOUGH_ROWS // 24) * 24
    assert made[0].most_bytes == rows * row_bytes
    assert not made[0]._kept


@pytest.mark.parametrize(
    "module",
    [nn.Linear(SIZE, SIZE - 1), nn.Conv1d(SIZE, SIZE, 1), nn.utils.parametrizations.weight_norm(linear())],
)
def test_what_is_small_or_no_plain_linear_layer_is_left_to_autograd(module):
    assert WeightGradients(nn.Sequential(module)).is_empty


def test_a_weight_whose_gradient_is_watched_is_left_to_autograd():
    module, seen = nn.Sequential(linear()), []
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    train(module, [2, 2])
    assert seen == [(SIZE, SIZE)] * 2


def test_a_weight_with_hooks_of_its_owner_is_left_to_autograd():
    """The owner's hooks are there before the stage; Horovod adds its hooks after it."""
    layer, seen = linear(), []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad is not None))
    train(nn.Sequential(layer), [2, 2])
    assert seen == [True, True]


def test_frozen_weights_stay_without_a_gradient():
    module = nn.Sequential(linear(), linear())
    module[0].weight.requires_grad_(False)
    train(module, [2, 2])
    assert module[0].weight.grad is None
    assert module[0].bias.grad is not None and module[1].weight.grad is not None


class Skipping(nn.Module):
    """Drops its layer in every other forward, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_forwards = linear(), 0

    def forward(self, inputs):
        self.num_forwards += 1
        return self.layer(inputs) if self.num_forwards % 2 else inputs


def test_a_final_backward_that_reaches_no_weight_leaves_no_row_behind():
    """The rows of the first microbatch were once added to the next minibatch's gradient."""
    stage = Stage(StageModule([Skipping()]), CPU, batches_wgrad=True)
    inputs = torch.ones(2, SIZE, dtype=torch.float64)
    for m in range(2):
        outputs = stage.forward(m, inputs, step=0)
        stage.backward(m, [torch.ones_like(outputs)], is_final=m == 1)
    assert stage.module[0].layer.weight.grad.sum() == 2 * SIZE * SIZE


class Counting(nn.Module):
    """Feeds its layer a buffer that each forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("rows", torch.zeros(2, SIZE, dtype=torch.float64))

    def forward(self, inputs):
        self.rows.add_(1)
        return inputs + self.layer(self.rows)


def test_kept_rows_do_not_follow_a_buffer():
    stage = Stage(StageModule([Counting()]), CPU, batches_wgrad=True)
    for m in range(3):
        outputs = stage.forward(m, torch.ones(2, SIZE, dtype=torch.float64), step=0)
        stage.backward(m, [torch.ones_like(outputs)], is_final=m == 2)
    assert stage.module[0].layer.weight.grad.sum() == 2 * SIZE * SIZE * (1 + 2 + 3)


@pytest.mark.parametrize("rows, copied", [(3, False), (4, False), (5, True), (100, True)])
def test_a_view_does_not_keep_its_base_alive(rows, copied):
    """A view of less than half of its base is copied; otherwise a copy would save nothing."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, inputs):
            return self.layer(inputs[:2])

    stage = Stage(StageModule([First()]), CPU, batches_wgrad=True)
    outputs = stage.forward(0, torch.ones(rows, SIZE, dtype=torch.float64), step=0)
    stage.backward(0, [torch.ones_like(outputs)])
    ((use,),) = stage._wgrad._kept.values()
    assert use.inputs.untyped_storage().nbytes() == use.inputs.nbytes * (1 if copied else rows / 2)


def test_a_hook_that_comes_later_sees_gradients():
    module, seen = nn.Sequential(linear()), []
    stage = Stage(StageModule(list(module)), CPU, loss=nn.functional.mse_loss, batches_wgrad=True)
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    inputs = torch.ones(2, SIZE, dtype=torch.float64)
    stage.forward_loss(0, inputs, inputs, share=1.0, step=0)
    stage.backward(0, is_final=True)
    assert seen == [(SIZE, SIZE)]


def test_under_autocast_products_of_halves_add_up_in_the_weights_precision():
    module = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
    stage = Stage(StageModule(list(module)), CPU, batches_wgrad=True)
    inputs = torch.randn(2, SIZE)
    for m in range(2):  # the second adds to what the first has made
        with torch.autocast("cpu", torch.bfloat16):
            outputs = stage.forward(m, inputs, step=0)
        stage.backward(m, [torch.ones_like(outputs)], is_final=True)
    assert module[0].weight.grad.dtype == torch.float32
    expected = 2 * torch.ones(SIZE, 2).bfloat16() @ inputs.bfloat16()
    torch.testing.assert_close(module[0].weight.grad, expected.float(), rtol=2e-2, atol=2e-2)


def test_what_is_kept_back_is_counted_until_it_is_forgotten():
    stage = Stage(StageModule([linear()]), CPU, batches_wgrad=True)
    for m, rows in enumerate((3, 5)):
        outputs = stage.forward(m, torch.ones(rows, SIZE, dtype=torch.float64), step=0)
        stage.backward(m, [torch.ones_like(outputs)])
    assert stage.max_deferred_bytes == 8 * 2 * SIZE * 8  # what came in and what came back
    assert stage.max_batched == 86  # 256 rows of 3 each, the last product in part
    stage.complete_gradients()
    assert stage.max_deferred_bytes > 0 and not stage.has_deferred_wgrad
    stage.reset_wgrad_peaks()
    assert stage.max_deferred_bytes == stage.max_batched == 0
