"""Replicas that normalise together compute what torch's BatchNorm does with all their samples at once."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpipe.errors import UserError
from hybridpipe.stage.sync_batchnorm import SyncBatchNorms


class Sums:
    """A replica's sums with others in threads: all hand in, then all take."""

    bytes_sent = 0

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, handed_in: list):
        self.rank, self.size, self.barrier, self.handed_in = rank, size, barrier, handed_in
        self.calls: list[str] = []

    def all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.handed_in[self.rank] = tensor
        self.barrier.wait()
        found = [each.clone() for each in self.handed_in]
        self.barrier.wait()
        return found

    def sum(self, tensor):
        self.calls.append("sum")
        return torch.stack(self.all(tensor)).sum(0)

    def from_first(self, tensor):
        self.calls.append("from first")
        return self.all(tensor)[0]


class Replica:
    """A stage of one replica, without its layers' other needs."""

    def __init__(self, model: nn.Module, sums: Sums, num_microbatches: int):
        self.model, self.sums, self.norms = model, sums, SyncBatchNorms(model, sums)
        self.norms.begin(num_microbatches)

    def run(self, microbatch: int, x: torch.Tensor | None, gradient: torch.Tensor | None = None):
        """Run a forward and, with a gradient, its backward; None: join those of others."""
        if x is None:
            self.norms.join()
            if gradient is not None:
                self.norms.join()
            return None
        with self.norms.forward(microbatch, again=False):
            made = self.model(x)
        with self.norms.backward(microbatch) if gradient is not None else nullcontext():
            if gradient is not None:
                made.backward(gradient)
        return made.detach()


def replicas(model: nn.Module, size: int, num_microbatches: int) -> list[Replica]:
    barrier, handed_in = threading.Barrier(size, timeout=20), [None] * size
    sums = [Sums(rank, size, barrier, handed_in) for rank in range(size)]
    return [Replica(copy.deepcopy(model), each, num_microbatches) for each in sums]


def together(each: list[Replica], *args: list) -> list:
    """Run all replicas, a thread each."""

    def run(replica: Replica, *given):
        try:
            return replica.run(*given)
        except threading.BrokenBarrierError:
            raise
        except Exception:
            replica.sums.barrier.abort()  # others need not wait
            raise

    with ThreadPoolExecutor(len(each)) as pool:
        futures = [pool.submit(run, *given) for given in zip(each, *args, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        told = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if told:
            raise told[0]
        return [future.result() for future in futures]


def batches(*sizes: int | None, shape=(3, 4, 4), dtype=torch.float64, mean: float = 0.0) -> list:
    numbers = torch.Generator().manual_seed(1)
    return [
        None if size is None else (mean + torch.randn(size, *shape, generator=numbers)).to(dtype)
        for size in sizes
    ]


def norms(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3, **options), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, **options))


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1, 2), (3, None), (2, 1, None, None)], ids=str)
@pytest.mark.parametrize("options", [{}, {"momentum": None, "eps": 0.1}, {"affine": False}], ids=str)
def test_outputs_gradients_and_statistics_are_those_of_one_batch(sizes, options):
    model = norms(**options).double()
    each, given = replicas(model, len(sizes), sum(size is not None for size in sizes)), batches(*sizes)
    inputs = [None if x is None else x.requires_grad_() for x in given]
    present = [x for x in inputs if x is not None]
    whole = torch.cat([x.detach() for x in present]).requires_grad_()
    factors = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parts = [*factors.split([len(x) for x in present]), *[factors[:0]] * (len(sizes) - len(present))]
    for _ in range(2):  # microbatches are those of the first round each time
        made = together(each, range(len(sizes)), inputs, parts)
        expected = model(whole)
        expected.backward(factors)
        torch.testing.assert_close(torch.cat([y for y in made if y is not None]), expected.detach())
    torch.testing.assert_close(torch.cat([x.grad for x in present]), whole.grad, rtol=1e-12, atol=1e-12)
    for replica in each:  # one without a microbatch as well
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(replica.model.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        grads = [replica.model.get_parameter(name).grad for replica in each]
        total = sum(grad for grad in grads if grad is not None)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-12, atol=1e-11)


def test_a_large_mean_costs_no_more_than_the_last_bit_of_inputs():
    """Sums of squares in float32 would leave no digit of the variance."""
    given = batches(64, 64, dtype=torch.float32, mean=3000.0)
    made = torch.cat(together(replicas(nn.BatchNorm2d(3), 2, 2), [0, 1], given))
    expected = nn.BatchNorm2d(3).double()(torch.cat(given).double()).detach().float()
    torch.testing.assert_close(made, expected, rtol=0, atol=2.0**-12)  # of numbers beyond 2048


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [True, False])
def test_half_precision_comes_back_as_such(dtype, affine):
    inputs = [x.requires_grad_() for x in batches(4, 4, dtype=dtype)]
    gradients = [x.detach().sin() for x in inputs]
    made = together(replicas(nn.BatchNorm2d(3, affine=affine), 2, 2), [0, 1], inputs, gradients)
    whole = torch.cat([x.detach() for x in inputs]).float().requires_grad_()
    expected = nn.BatchNorm2d(3)(whole)
    expected.backward(torch.cat(gradients).float())
    assert {each.dtype for each in (*made, *(x.grad for x in inputs))} == {dtype}
    torch.testing.assert_close(torch.cat(made).float(), expected.detach(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(torch.cat([x.grad for x in inputs]).float(), whole.grad, rtol=0.02, atol=0.004)


def test_full_rounds_take_one_sum_a_norm_forward_and_one_backward():
    each = replicas(norms().double(), 2, 4)
    inputs = [x.requires_grad_() for x in batches(2, 2)]
    gradients = [torch.ones_like(x) for x in inputs]
    together(each, [0, 1], inputs, gradients)
    each[0].sums.calls.clear()
    together(each, [2, 3], inputs, gradients)
    assert each[0].sums.calls == ["sum"] * 4


def test_inputs_without_gradient_are_not_summed_backward():
    each = replicas(norms().double(), 2, 4)
    given = batches(2, 2)
    together(each, [0, 1], given, [torch.ones_like(x) for x in given])
    assert [call for call in each[0].sums.calls if call == "sum"] == ["sum"] * 3


def test_a_single_value_is_refused_in_torchs_own_words():
    with pytest.raises(ValueError) as expected:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    for sizes in ((1, None), (1,)):
        with pytest.raises(ValueError) as raised:
            together(
                replicas(nn.BatchNorm1d(3), len(sizes), 1), range(len(sizes)), batches(*sizes, shape=(3,))
            )
        assert str(raised.value) == str(expected.value)
    together(replicas(nn.BatchNorm1d(3).double(), 2, 2), [0, 1], batches(1, 1, shape=(3,)))


def test_evaluation_is_not_summed():
    each = replicas(norms().double().eval(), 2, 4)
    for first in (0, 2):
        together(each, [first, first + 1], batches(2, 2))
    assert each[0].sums.calls == ["from first"]  # that the first forward has ended


class Skipping(nn.Module):
    """Skips a norm where the inputs say so."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.second(x if x.sum() > 0 else self.first(x))


ORDER = "with sync_batchnorm all microbatches must call the BatchNorm layers of a stage in one order: "


def test_a_norm_that_some_microbatches_skip_is_refused():
    [replica] = replicas(Skipping(), 1, 9)
    replica.run(0, -torch.ones(2, 3, 2, 2))
    with pytest.raises(UserError) as raised:
        replica.run(1, torch.ones(2, 3, 2, 2))
    assert str(raised.value) == f"{ORDER}one calls second where another calls first"
    assert "forward" not in vars(replica.model.second)


class SkippingTheLast(Skipping):
    def forward(self, x):
        made = self.first(x)
        return self.second(made) if x.sum() > 0 else made


@pytest.mark.parametrize("model", [Skipping, SkippingTheLast])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sign", [1, -1])
def test_replicas_whose_first_microbatches_call_others_do_not_wait(model, size, sign):
    """Where one called fewer norms it once went on to its backward, and the others waited for it."""
    x = sign * torch.ones(2, 3, 2, 2)
    given = [x, -x, *[None] * (size - 2)]
    with pytest.raises(UserError, match=ORDER):
        together(replicas(model(), size, 2), range(size), given, [torch.ones_like(x)] * size)


class Halves(nn.BatchNorm2d):
    """Normalises twice in one call."""

    def forward(self, x):
        return super().forward(x) + super().forward(x.sin())


@pytest.mark.parametrize("sizes", [(2, 2), (2, None)], ids=str)
def test_a_norm_that_normalises_twice_in_a_call_is_joined_in_both(sizes):
    given = [x if x is None else x.requires_grad_() for x in batches(*sizes)]
    present = [x for x in given if x is not None]
    each = replicas(nn.Sequential(Halves(3)).double(), 2, len(present))
    gradients = [torch.ones(0) if x is None else x.detach().cos() for x in given]
    made = together(each, [0, 1], given, gradients)
    whole = torch.cat([x.detach() for x in present]).requires_grad_()
    expected = Halves(3).double()(whole)
    expected.backward(whole.detach().cos())
    torch.testing.assert_close(torch.cat([y for y in made if y is not None]), expected.detach())
    torch.testing.assert_close(torch.cat([x.grad for x in present]), whole.grad)
    states = [replica.model.state_dict() for replica in each]
    torch.testing.assert_close(states[0]["0.running_var"], states[1]["0.running_var"])


class Function(nn.Module):
    """Normalises by one layer, and once more without any."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return nn.functional.batch_norm(self.norm(x), None, None, training=True)


def test_what_is_normalised_outside_of_a_layer_is_refused():
    """It was normalised by its own microbatch, without a word."""
    [replica] = replicas(Function(), 1, 1)
    with pytest.raises(UserError) as raised:
        replica.run(0, torch.randn(2, 3, 2, 2))
    assert str(raised.value) == (
        "the model calls batch_norm outside of a BatchNorm layer, where replicas cannot normalise together: "
        "make it a layer, such as nn.BatchNorm2d, or set sync_batchnorm = 1"
    )
    [replica] = replicas(nn.BatchNorm2d(3, track_running_stats=False).eval(), 1, 1)
    replica.run(0, torch.randn(2, 3, 2, 2))  # a layer in evaluation normalises as it likes


def test_an_activation_checkpoint_around_a_norm_is_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return checkpoint(self.norm, x, use_reentrant=False)

    [replica] = replicas(Checkpointed(), 1, 1)
    x = torch.randn(2, 3, 2, 2).requires_grad_()
    with pytest.raises(UserError) as raised:
        replica.run(0, x, torch.ones_like(x))
    assert str(raised.value) == (
        "the BatchNorm norm is called outside of its stage's forward, as an activation checkpoint does: let "
        "the stage recompute (recompute = true) in its place"
    )


def test_a_norm_that_normalises_by_itself_is_refused():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return (x - x.mean()) / x.std()

    [replica] = replicas(nn.Sequential(Own(3)), 1, 1)
    with pytest.raises(UserError) as raised:
        replica.run(0, torch.randn(2, 3, 2, 2))
    assert str(raised.value) == (
        "the BatchNorm 0 (Own) does not call torch's batch_norm, so replicas cannot normalise together: set "
        "sync_batchnorm = 1"
    )


def test_a_forward_of_the_module_itself_is_kept():
    """As a library sets it, to log or to trace."""
    [replica] = replicas(nn.Sequential(nn.BatchNorm2d(3)), 1, 1)
    norm, called = replica.model[0], []
    norm.forward = own = lambda x: called.append(len(x)) or type(norm).forward(norm, x)
    replica.run(0, torch.randn(2, 3, 2, 2))
    assert called == [2] and vars(norm)["forward"] is own
