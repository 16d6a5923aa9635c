"""Buckets and hooks, with stand-ins for collectives that record their calls."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpipe.optim import gradient_sync
from hybridpipe.optim.gradient_sync import BucketSync, filled
from hybridpipe.planning.cost import formula
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import LayerProfile, ModelProfile


class Replicas:
    """A communicator of two replicas; the other one says the same."""

    ranks = (0, 1)

    def bcast(self, said):
        return said


class Started(NamedTuple):
    tensors: list
    name: str
    other: object

    def wait(self):
        for tensor, others in zip(self.tensors, self.other(self.tensors), strict=True):
            tensor.add_(others)
        return self.tensors


class Collectives:
    """Collectives whose other rank has the same gradients, or none, or uses every parameter."""

    def __init__(self, other=lambda tensors: [t.clone() for t in tensors], is_ordered=False):
        self.started, self.other, self.ended, self.is_ordered = [], other, False, is_ordered

    def all_reduce(self, tensors, name):
        self.started.append(Started(list(tensors), name, self.other))
        return self.started[-1]

    def close(self):
        self.ended = True

    @property
    def names(self):
        return [started.name for started in self.started]


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", 100)


def make(parameters, compression="none", sparse=(), late=(), **options) -> tuple[BucketSync, Collectives]:
    collectives = Collectives(**options)
    return BucketSync(parameters, Replicas(), collectives, compression, sparse, late), collectives


def sizes(buckets) -> list[list[int]]:
    return [[parameter.numel() for parameter in bucket] for bucket in buckets]


def parameters(*counts: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(count)) for count in counts]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    "counts, expected",
    [
        ((), []),
        ((1,), [[1]]),
        ((1, 2, 3), [[3, 2, 1]]),
        ((25,), [[25]]),
        ((1, 25), [[25], [1]]),  # 100 bytes are a bucket
        ((1, 24), [[24, 1]]),
        ((1, 25, 25), [[25], [25], [1]]),  # as is the next one
        ((1, 24, 1), [[1, 24], [1]]),
        ((1000, 1, 1000), [[1000], [1, 1000]]),
    ],
)
def test_buckets_are_filled_in_backward_order(counts, expected):
    assert sizes(filled(parameters(*counts))) == expected


def test_the_simulator_expects_the_same_buckets(monkeypatch):
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", 100)
    monkeypatch.setattr(formula, "BUCKET_BYTES", 100)
    counts = (3, 30, 10, 10, 10, 1, 25, 2)
    profile = ModelProfile(tuple(LayerProfile("", 1, 1, 4 * n, 0, 0) for n in counts), samples=1)
    (stage,) = formula.stage_costs(profile, Plan.data_parallel(len(counts), 2, 2))
    expected = [bucket.num_bytes for bucket in stage.buckets]
    assert [4 * sum(bucket) for bucket in sizes(filled(parameters(*counts)))] == expected


@pytest.mark.usefixtures("small_buckets")
def test_a_parameter_that_several_stages_use_waits_for_the_last_of_them():
    net = model()
    synced, collectives = make(net.parameters(), late=[net[2].weight])
    for _ in range(2):  # the last backwards of two stages on this rank
        synced.begin_final_backward()
        net[2].weight.sum().backward()
        synced.end_final_backward()
    assert "shared0" not in collectives.names
    synced.finish()
    assert collectives.names.count("shared0") == 1
    assert torch.equal(net[2].weight.grad, torch.full((3, 8), 4.0))  # two stages, two replicas


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(net: nn.Module) -> None:
    net(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("small_buckets")
def test_a_bucket_starts_in_the_last_backward_when_it_is_full():
    net = model()
    synced, collectives = make(net.parameters())
    order = []
    net[1].register_full_backward_hook(lambda *_: order.append(collectives.names))
    backward(net)
    assert collectives.names == [], "not the last backward"
    synced.begin_final_backward()
    backward(net)
    assert order[-1] == ["bucket0"], "the last layer's bucket is on its way before the first layer's backward"
    assert sorted(collectives.names) == ["bucket0", "bucket1"]
    expected = [2 * p.grad for p in net.parameters()]
    synced.finish()
    assert len(collectives.names) == 2
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip(net.parameters(), expected, strict=True))


@pytest.mark.usefixtures("small_buckets")
def test_every_minibatch_begins_anew():
    net = model()
    synced, collectives = make(net.parameters())
    for _ in range(3):
        synced.begin_final_backward()
        backward(net)
        synced.finish()
        net.zero_grad()
        assert len(collectives.names) == 2
        collectives.started.clear()


def test_a_replica_without_a_microbatch_adds_zeros():
    net = model()
    synced, collectives = make(net.parameters(), other=lambda tensors: [torch.ones_like(t) for t in tensors])
    synced.finish()
    assert collectives.names == ["bucket0"]
    assert all(p.grad.eq(1).all() and p.grad.shape == p.shape for p in net.parameters())


def test_what_no_replica_used_has_no_gradient():
    net = model()
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    synced, _ = make(net.parameters())
    synced.begin_final_backward()
    backward(net)
    synced.finish()
    assert net.unused.grad is None and net[0].weight.grad is not None


def test_frozen_parameters_are_left_out():
    net = model()
    net[0].requires_grad_(False)
    synced, collectives = make(net.parameters())
    synced.begin_final_backward()
    backward(net)
    synced.finish()
    assert [t.shape for t in collectives.started[0].tensors] == [(3,), (3, 8), (2,)]  # the last are the flags
    assert net[0].weight.grad is None


def test_bfloat16_is_reduced_as_float32():
    net = model().bfloat16()
    synced, collectives = make(net.parameters())
    synced.begin_final_backward()
    net(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    expected = [2 * p.grad for p in net.parameters()]
    synced.finish()
    assert {t.dtype for t in collectives.started[0].tensors} == {torch.float32}
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip(net.parameters(), expected, strict=True))


def test_bytes_are_counted():
    net = model()
    synced, _ = make(net.parameters())
    for _ in range(2):
        backward(net)
        synced.finish()
    assert synced.bytes_reduced == 2 * sum(p.nbytes for p in net.parameters())


def test_a_parameter_that_is_used_twice_is_ready_once():
    layer = nn.Linear(4, 4)
    net = nn.Sequential(layer, nn.Tanh(), layer)
    synced, collectives = make(net.parameters())
    synced.begin_final_backward()
    backward(net)
    assert collectives.names == ["bucket0"]
    expected = 2 * layer.weight.grad
    synced.finish()
    assert torch.equal(layer.weight.grad, expected)


def test_after_close_nothing_is_reduced():
    net = model()
    synced, collectives = make(net.parameters())
    synced.begin_final_backward()
    synced.close()
    backward(net)
    assert collectives.names == [] and collectives.ended


@pytest.mark.parametrize(
    "dtype, travels_as", [(torch.float32, torch.float16), (torch.float64, torch.float64)]
)
def test_compressed_gradients_travel_as_halves_and_arrive_as_they_were(dtype, travels_as):
    net = model().to(dtype)
    synced, collectives = make(net.parameters(), compression="fp16")
    net(torch.ones(2, 4, dtype=dtype)).sum().backward()
    expected = [2 * p.grad for p in net.parameters()]
    synced.finish()
    *tensors, _ = collectives.started[0].tensors
    assert {tensor.dtype for tensor in tensors} == {travels_as}
    assert synced.bytes_reduced == sum(p.numel() for p in net.parameters()) * travels_as.itemsize
    for parameter, wanted in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=2e-3, atol=1e-6)


class AtOnce(Collectives):
    """Collectives whose all-reduce is complete before the backward continues."""

    def __init__(self):
        super().__init__(other=lambda tensors: [torch.zeros_like(tensor) for tensor in tensors])

    def all_reduce(self, tensors, name):
        for tensor in tensors:
            tensor.mul_(2)
        return super().all_reduce(tensors, name)


class Position(nn.Module):
    """Adds a position; autograd gives both summands one gradient tensor."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3, 4))

    def forward(self, value):
        return value + self.position[None]


def test_an_in_place_sum_does_not_change_gradients_that_the_backward_reads(monkeypatch):
    """With one sample the input's gradient was once the sum over the replicas of the position's gradient."""
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", 1)
    net = nn.Sequential(nn.Linear(4, 4), Position(), nn.Linear(4, 2))
    inputs = torch.randn(1, 3, 4)
    net(inputs).square().sum().backward()
    expected = [2 * parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    reducer = BucketSync(net.parameters(), Replicas(), AtOnce())
    reducer.begin_final_backward()
    net(inputs).square().sum().backward()
    reducer.end_final_backward()
    reducer.finish()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Shared(nn.Module):
    """Runs one layer in two activation checkpoints, which autograd repeats one after the other."""

    def __init__(self, **options):
        super().__init__()
        self.layer, self.options = nn.Linear(4, 4), options

    def forward(self, value):
        for _ in range(2):
            value = checkpoint(self.layer, value, **self.options)
        return value


def test_a_gradient_that_comes_when_the_sum_has_begun_is_refused():
    """It would be lost, or added to the tensor that is summed; torch's DDP refuses it, too."""
    net = Shared(use_reentrant=True)
    reducer, _ = make(net.parameters())
    reducer.begin_final_backward()
    with pytest.raises(
        RuntimeError, match=r"shape \(4.* second gradient in one backward.*use_reentrant=False"
    ):
        net(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_a_layer_that_other_checkpoints_share_is_summed_once():
    net = Shared(use_reentrant=False)
    reducer, collectives = make(net.parameters())
    reducer.begin_final_backward()
    net(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert collectives.names == ["bucket0"]


def rows(*indices: int, value: float = 1.0) -> torch.Tensor:
    """A sparse gradient of an embedding of four rows of two."""
    return torch.sparse_coo_tensor([list(indices)], torch.full((len(indices), 2), value), (4, 2))


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_sparse_gradient_has_the_rows_of_all_replicas(compression):
    """The other replica has looked up rows 1 and 3; row 1 comes twice here, which a gradient may."""
    weight = nn.Parameter(torch.zeros(4, 2))

    def of_other(tensors):
        gradient, counts, present = tensors
        assert counts.tolist() == [0, 1, 1, 0, 0] and present.tolist() == [1]
        assert gradient.dtype == (torch.float32 if compression == "none" else torch.float16)
        own = rows(1, 3, value=4.0).to_dense().to(gradient.dtype)
        return [own, torch.tensor([0.0, 1, 0, 1, 0]), torch.ones(1)]

    synced, _ = make([weight], compression, sparse=[weight], other=of_other)
    weight.grad = rows(1, 2, 1)
    synced.finish()
    assert weight.grad.is_sparse and weight.grad.dtype == torch.float32
    assert weight.grad.indices().tolist() == [[1, 2, 3]]
    assert weight.grad.values().tolist() == [[6, 6], [1, 1], [4, 4]]


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_a_gradient_that_one_replica_has_dense_is_dense_on_all():
    """A weight that is an embedding's and another layer's, which only some replicas have used."""
    weight, bias = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(1))

    def of_other(tensors):
        return [torch.zeros(1), torch.ones(4, 2), torch.tensor([0.0, 0, 0, 0, 1]), torch.ones(2)]

    synced, collectives = make([weight, bias], sparse=[weight], other=of_other)
    weight.grad = rows(2)
    synced.finish()
    assert weight.grad.layout == torch.strided
    assert weight.grad.tolist() == [[1, 1], [1, 1], [2, 2], [1, 1]]
    assert [t.shape for t in collectives.started[0].tensors] == [(1,), (4, 2), (5,), (2,)]
    weight.grad = torch.ones(4, 2)
    assert gradient_sync._rows(weight).tolist() == [0, 0, 0, 0, 1]
    weight.grad = None
    assert gradient_sync._rows(weight).tolist() == [0, 0, 0, 0, 0]


def test_complex_gradients_travel_as_pairs():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    synced, collectives = make([weight])
    weight.grad = torch.tensor([1 + 2j, 3 - 1j])
    synced.finish()
    assert collectives.started[0].tensors[0].shape == (2, 2)
    assert weight.grad.tolist() == [2 + 4j, 6 - 2j]


@pytest.mark.parametrize("of", ["rows", "columns", "complex"])
def test_a_gradient_of_more_elements_than_mpi_counts_is_summed_in_pieces(monkeypatch, of):
    monkeypatch.setattr(gradient_sync, "MOST_ELEMENTS", 8)
    dtype = torch.complex64 if of == "complex" else torch.float32
    small, weight = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4, 6, dtype=dtype))
    synced, collectives = make([small, weight])
    numbers = torch.arange(24.0).reshape(4, 6).to(dtype)
    weight.grad = numbers.t().contiguous().t() if of == "columns" else numbers.clone()
    small.grad = torch.ones(2)
    synced.finish()
    assert max(tensor.numel() for tensor in collectives.started[0].tensors) == 8
    assert torch.equal(weight.grad, 2 * numbers)
    assert small.grad.tolist() == [2, 2]


def test_a_gradient_that_nobody_shares_is_summed_where_it_lies():
    weight, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    synced, collectives = make([weight, other])
    weight.grad, shared = torch.ones(3), torch.ones(3)
    other.grad = shared.view(3)
    address = weight.grad.data_ptr()
    synced.finish()
    assert collectives.started[0].tensors[1].data_ptr() == weight.grad.data_ptr() == address
    assert shared.tolist() == [1, 1, 1] and other.grad.tolist() == [2, 2, 2]


class Crossed(nn.Module):
    """Its registration order is not the order of use: the backward reaches the last registered layer last."""

    def __init__(self):
        super().__init__()
        self.unused, self.head, self.body, self.first = (nn.Linear(5, 5, bias=False) for _ in range(4))

    def forward(self, value):
        return self.head(self.body(self.first(value)))


@pytest.mark.usefixtures("small_buckets")
def test_where_order_matters_a_bucket_waits_for_those_before_it():
    """Replicas that start collectives in different orders would wait for each other for ever."""
    net = Crossed()
    synced, collectives = make(net.parameters(), is_ordered=True)
    synced.begin_final_backward()
    net(torch.ones(2, 5, requires_grad=True)).sum().backward()
    assert collectives.names == ["bucket0", "bucket1", "bucket2"], "in their order, though the first is last"
    synced.finish()
    assert collectives.names == ["bucket0", "bucket1", "bucket2", "bucket3"]


@pytest.mark.usefixtures("small_buckets")
def test_the_first_backward_orders_the_buckets():
    """Else a parameter that gets no gradient, such as BERT's pooler, would hold up all that follows it."""
    net = Crossed()
    synced, collectives = make(net.parameters(), is_ordered=True)
    seen = []
    net.body.register_full_backward_hook(lambda *_: seen.append(list(collectives.names)))
    for _ in range(2):
        collectives.started.clear()
        synced.begin_final_backward()
        net(torch.ones(2, 5, requires_grad=True)).sum().backward()
        synced.end_final_backward()
        synced.finish()
    assert seen[0] == [], "the unused layer and the first one hold up the head"
    assert seen[1][:1] == ["bucket2"], "the head's bucket is on its way"
    assert collectives.names == ["bucket2", "bucket1", "bucket0", "bucket3"]
