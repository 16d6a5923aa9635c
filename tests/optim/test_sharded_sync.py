"""Buckets whose sums go to parts, with collectives whose other replica has the same gradients."""

import pytest
import torch
from torch import nn

from hybridpipe.optim import gradient_sync
from hybridpipe.optim.sharded_sync import MOST_IN_FLIGHT, ShardedSync
from hybridpipe.optim.shares import ReplicaShares


class Replicas:
    """A communicator of two replicas; the other one says the same."""

    ranks = (0, 1)

    def bcast(self, said):
        return said


class Work:
    def __init__(self, collectives, results):
        self.collectives, self.results = collectives, results

    def wait(self):
        self.collectives.under_way -= 1
        return self.results


class Collectives:
    """Doubles what it sums, and notes how many reductions are under way."""

    def __init__(self, rank, is_ordered):
        self.rank, self.names, self.under_way, self.most = rank, [], 0, 0
        self.is_ordered = is_ordered

    def all_reduce(self, tensors, name):
        return self.started(name, [tensor.mul_(2) for tensor in tensors])

    def reduce_scatter(self, rows, name):
        return self.started(name, [rows[self.rank : self.rank + 1] * 2])

    def started(self, name, results):
        self.names.append(name)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return Work(self, results)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", 100)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for _ in range(5) for each in (nn.Linear(9, 9), nn.Tanh())]
    return nn.Sequential(*layers)


def make(net, rank=0, scatters=True, frees=False, compression="none", is_ordered=False, **options):
    collectives, shares = (
        Collectives(rank, is_ordered),
        ReplicaShares(net.parameters(), rank, (0, 1), None, frees=frees),
    )
    given = list(net.parameters()), Replicas(), collectives, shares, scatters, frees
    return ShardedSync(*given, compression=compression, **options), shares, collectives


def backward(net, sync=None) -> None:
    if sync is not None:
        sync.begin_final_backward()
    net(torch.ones(2, 9, requires_grad=True)).sum().backward()
    if sync is not None:
        sync.end_final_backward()


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_gets_the_sum_of_its_elements(scatters, frees, rank):
    net, single = model(), model()
    sync, shares, _ = make(net, rank, scatters, frees)
    backward(single)
    backward(net, sync)
    sync.finish()
    shares.take()
    assert all(p.grad is None for p in net.parameters())
    for p, q in zip(net.parameters(), single.parameters(), strict=True):
        part, held = shares.ranges[p], shares.parts.get(p)
        assert (held is not None) == bool(part)
        if part:
            assert torch.equal(held.grad, 2 * q.grad.view(-1)[part.start : part.stop])


@pytest.mark.parametrize("scatters", [False, True])
def test_a_parameter_without_a_gradient_leaves_none(scatters):
    net = model()
    sync, shares, _ = make(net, scatters=scatters)
    for p in net[0].parameters():
        p.requires_grad = False
    sync.renew()
    p = net[2].weight
    p.grad = torch.ones_like(p)
    sync.finish()
    shares.take()
    with_gradient = [parameter for parameter, part in shares.parts.items() if part.grad is not None]
    assert with_gradient == [p]


@pytest.mark.parametrize("scatters", [False, True])
def test_gradients_are_freed_within_the_backward(scatters):
    net = model()
    sync, _, collectives = make(net, scatters=scatters, frees=True)
    most = []
    for layer in net:
        layer.register_full_backward_hook(
            lambda *_: most.append(sum(p.grad is not None for p in net.parameters()))
        )
    backward(net, sync)
    assert collectives.most == MOST_IN_FLIGHT + 1, "one fills the place of the oldest"
    assert max(most) <= 2 * (MOST_IN_FLIGHT + 2)
    sync.finish()
    assert collectives.under_way == 0 and len(collectives.names) == len(set(collectives.names))


def test_buckets_start_in_one_order_on_all_replicas():
    """A bucket that does not fill here, but on another replica, keeps later ones waiting for `finish`."""
    net = model()
    sync, _, collectives = make(net, frees=True)
    backward(net, sync)
    sync.finish()
    order, collectives.names = collectives.names, []
    sync.begin_final_backward()
    for p in [*net[6].parameters(), *net[0].parameters()]:  # the last layer has no gradient
        p.sum().backward()
    assert collectives.names == []
    sync.finish()
    assert collectives.names == order


def test_sums_that_are_needed_whole_wait_for_the_reduction_that_completes():
    net = model()
    shared, late = net[0].weight, net[2].weight
    sync, shares, collectives = make(net, frees=True, shared=[shared], late=[late])
    for completes in (False, True):
        backward(net, sync)
        sync.finish(completes)
        assert (shared.grad is not None) and (late.grad is not None)
    expected = model()
    backward(expected), backward(expected)
    assert torch.equal(shared.grad, 2 * expected[0].weight.grad)
    assert sum(name.startswith("bucket") for name in collectives.names) == 1
    shares.take()
    part = shares.ranges[shared]
    held = shares.parts[shared].grad
    assert torch.equal(held, 2 * expected[0].weight.grad.view(-1)[part.start : part.stop])


def test_a_sparse_gradient_that_nobody_expects_is_made_dense():
    """Of torch.nn.functional.embedding(sparse=True), which no module tells of."""
    net = model()
    sync, shares, _ = make(net)
    p = net[0].weight
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 9), (9, 9), check_invariants=True)
    sync.finish()
    part = shares.ranges[p]
    expected = torch.zeros(9, 9)
    expected[1] = 2
    assert torch.equal(shares.parts[p].grad, expected.view(-1)[part.start : part.stop])


@pytest.mark.parametrize(
    "dtype, compression, on_wire", [("bfloat16", "none", 4), ("float32", "fp16", 2), ("float64", "fp16", 8)]
)
def test_types_on_the_wire(dtype, compression, on_wire):
    """Horovod has no sum of bfloat16; float16 holds three digits."""
    net = model().to(getattr(torch, dtype))
    sync, shares, _ = make(net, compression=compression)
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.3)
    sync.finish()
    for part in shares.parts.values():
        assert part.grad.dtype == part.dtype
        torch.testing.assert_close(part.grad.float(), torch.full(part.shape, 0.6), rtol=1e-2, atol=0)
    rows = sum(bucket.weights.numel() + 2 * len(bucket.parameters) for bucket in shares.buckets)
    assert sync.bytes_reduced == on_wire * rows
