"""Trainers in low precision beside PyTorch's own loop with autocast and GradScaler."""

from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe import NotFinite, Plan, StageSpec
from hybridpipe.errors import UserError
from hybridpipe.measure.layers import measure
from hybridpipe.model.precision import Precision
from hybridpipe.optim.loss_scale import INITIAL
from tests.training.helpers import seeded_mlp

pytestmark = pytest.mark.usefixtures("quick")

LOW = {"bf16": torch.bfloat16, "bf16-params": torch.bfloat16, "fp16": torch.float16}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def weighed(outputs, targets):
    classes, weights = targets
    return (nn.functional.cross_entropy(outputs, classes, reduction="none") * weights).mean()


def minibatches(huge: int = -1):
    """Eight minibatches; the loss of one of them is a million times larger."""
    generator, width = torch.Generator().manual_seed(3), seeded_mlp()[0].in_features
    for i in range(8):
        classes = torch.randint(0, 2, (8,), generator=generator)
        weights = torch.full((8,), 1e6 if i == huge else 1.0)
        yield torch.randn(8, width, generator=generator), (classes, weights)


@pytest.fixture
def make(make_trainer):
    def trainer(precision, schedule="1f1b", **options):
        model, count = seeded_mlp().float(), 1 if schedule == "pipedream" else 2
        plan = Plan((StageSpec(0, len(model)),), schedule, num_microbatches=count)
        given = {"loss": weighed, "optimizer": SGD, "plan": plan, "minibatch_size": 8}
        return make_trainer(model, precision=precision, **(given | options))

    return trainer


def in_plain_pytorch(precision, huge, num_parts=2):
    """Two microbatches a minibatch, as PyTorch's recipe for gradient accumulation says."""
    model = seeded_mlp().float()
    optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for inputs, (classes, weights) in minibatches(huge):
        for part in torch.arange(8).chunk(num_parts):
            with torch.autocast("cpu", LOW[precision]):
                outputs = model(inputs[part])
            scaler.scale(weighed(outputs.float(), (classes[part], weights[part])) / num_parts).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler.get_scale()


CASES = [("bf16", -1, 1), ("bf16-params", -1, 1), ("fp16", -1, INITIAL), ("fp16", 3, INITIAL / 2)]


@pytest.mark.parametrize("precision, huge, scale", CASES)
def test_it_trains_what_pytorchs_own_loop_does(precision, huge, scale, make):
    trainer = make(precision)
    for inputs, targets in minibatches(huge):
        trainer.train_step(inputs, targets)
    model, told = in_plain_pytorch(precision, huge)
    assert trainer.worker.executor.update.loss_scale.value == told == scale
    assert trainer.worker.executor.num_skipped == (huge >= 0)
    for own, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)  # SGD's steps are fused here


@pytest.mark.parametrize("precision", LOW)
def test_a_resumed_training_goes_on_bit_for_bit_with_its_scale(precision, make, tmp_path):
    trainer, losses = make(precision), {}
    for i, (inputs, targets) in enumerate(minibatches(huge=2)):
        losses[i] = trainer.train_step(inputs, targets)
        if i == 4:
            trainer.save(tmp_path)
    resumed = make(precision)
    resumed.resume(tmp_path)
    assert resumed.step == 5
    for i, (inputs, targets) in enumerate(minibatches()):
        if i > 4:
            assert resumed.train_step(inputs, targets) == losses[i]
    update, of_resumed = trainer.worker.executor.update, resumed.worker.executor.update
    assert of_resumed.loss_scale == update.loss_scale
    for own, other in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("precision", ["fp32", *LOW])
def test_the_profile_counts_the_bytes_that_a_training_holds(precision, make):
    """Master weights, gradients and optimizer state in float32; copies of weights where there are any."""
    trainer = make(precision, on_nonfinite="ignore")
    for inputs, targets in minibatches():
        trainer.train_step(inputs, targets)
    with trainer.no_sync():  # leaves gradients
        trainer.train_step(*next(minibatches()))
    executor = trainer.worker.executor
    tensors = [value for p in trainer.model.parameters() for value in (p, p.grad)]
    tensors += [each["momentum_buffer"] for each in executor.update.optimizer.state.values()]
    held = sum(tensor.nbytes for tensor in tensors) + executor.stages[0].copied_bytes
    given = {"optimizer": SGD, "precision": Precision(precision)}
    profile = measure(seeded_mlp().float(), *next(minibatches()), weighed, **given)
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    assert held == round(parameters * (2 + profile.state_factor + profile.copied_factor))
    assert (executor.stages[0].copied_bytes > 0) == (precision == "bf16-params")


def test_another_precision_is_a_changed_setting(make, tmp_path):
    trainer = make("fp16")
    trainer.train_step(*next(minibatches()))
    trainer.save(tmp_path)
    with pytest.raises(UserError, match=r"precision.*'bf16'.*'fp16'"):
        make("bf16").resume(tmp_path)
    other = make("bf16")
    assert any("precision" in line for line in other.resume(tmp_path, allow_changed=True))
    assert other.worker.executor.update.loss_scale.value == 1


def test_the_scale_is_the_checkpoints_with_other_options_too(make, tmp_path):
    """Ranks whose own options were unchanged had another scale than the others."""
    trainer = make("fp16")
    for inputs, targets in minibatches(huge=0):
        trainer.train_step(inputs, targets)
    trainer.save(tmp_path)
    other = make("fp16", optimizer=partial(torch.optim.SGD, lr=0.2, momentum=0.9))
    other.resume(tmp_path, allow_changed=True)
    assert other.worker.executor.update.loss_scale.value == INITIAL / 2


def test_under_ignore_only_what_a_smaller_scale_may_mend_is_left_out(make):
    trainer = make("fp16", on_nonfinite="ignore")
    inputs, (classes, weights) = next(minibatches())
    trainer.train_step(inputs, (classes, weights * 1e6))
    assert trainer.worker.executor.num_skipped == 1


def test_a_loss_that_is_not_finite_is_no_overflow(make):
    trainer = make("fp16")
    inputs, (classes, weights) = next(minibatches())
    with pytest.raises(NotFinite, match=r"the loss of step 0.*is not finite"):
        trainer.train_step(inputs, (classes, weights * torch.inf))


def test_one_stage_under_pipedream_scales_as_gradscaler_does(make):
    """Nothing is in flight behind the one stage, so the next minibatch has the new scale."""
    trainer = make("fp16", "pipedream")
    samples = [
        each
        for inputs, (classes, weights) in minibatches(huge=3)
        for each in zip(inputs, zip(classes, weights))
    ]
    trainer.fit(samples, shuffle=False)
    model, told = in_plain_pytorch("fp16", huge=3, num_parts=1)
    assert trainer.worker.executor.scales.window()[-1].value == told == INITIAL / 2
    assert trainer.worker.executor.num_skipped == 1
    for own, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_than_float32_are_refused_since_autocast_leaves_them(dtype, make_trainer):
    told = r"precision='bf16' needs trained parameters in float32, got 0\.weight in (float64|bfloat16): call"
    with pytest.raises(ValueError, match=told):
        make_trainer(seeded_mlp().to(dtype), loss=weighed, optimizer=SGD, minibatch_size=8, precision="bf16")


def test_an_unknown_precision_is_refused(make):
    with pytest.raises(ValueError, match=r"precision must be .*got 'half'"):
        make("half")
