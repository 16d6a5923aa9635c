"""Replicas in one process: each updates its parts, and all have the weights of one that updates all."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.optim import gradient_sync
from hybridpipe.optim.combined import made_by
from hybridpipe.optim.fused import fused
from hybridpipe.optim.shares import ReplicaShares, take_over
from hybridpipe.optim.trial import needs_whole


class Copied:
    """An all-gather that copies the other replicas' shares once they have updated."""

    def __init__(self, weights, of_replicas):
        self.weights, self.of_replicas = weights, of_replicas

    def wait(self, on_slow=None):
        shares = [weights.chunk(len(self.of_replicas)) for weights in self.of_replicas]
        self.weights.copy_(torch.cat([shares[r][r] for r in range(len(shares))]))

    def is_complete(self):
        return True


class Replicas:
    """As many copies of a model, with the shares and the optimizer of each."""

    def __init__(self, model, factory, count=3, whole=False):
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [made_by(factory, [*net.parameters()]) for net in self.models]
        make = partial(made_by, factory)
        found = [needs_whole(make, [*net.parameters()]) if whole else () for net in self.models]
        self.shares = [
            ReplicaShares(net.parameters(), r, range(count), self.gather, whole=found[r])
            for r, net in enumerate(self.models)
        ]
        for shares, optimizer in zip(self.shares, self.optimizers, strict=True):
            take_over(optimizer, shares.parts, shares.ranges)

    def gather(self, weights):
        buckets = self.shares[0].buckets, self.shares[1].buckets, self.shares[2].buckets
        (i,) = {i for each in buckets for i, bucket in enumerate(each) if bucket.weights is weights}
        return Copied(weights, [each[i].weights.clone() for each in buckets])

    def step(self, gradients):
        for net, shares, optimizer in zip(self.models, self.shares, self.optimizers, strict=True):
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            shares.take()
            shares.adopt()
            with fused(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        for shares in self.shares:
            shares.gather()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", 600)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 31), nn.LayerNorm(31), nn.Linear(31, 5))


def by_dimensions(kind):
    """Two groups, told apart by what parts of parameters no longer have."""

    def factory(parameters):
        given = list(parameters)
        return kind(
            [{"params": [p for p in given if p.ndim > 1]}, {"params": [p for p in given if p.ndim < 2]}],
            lr=0.1,
        )

    return factory


def by_kind(parameters):
    """Muon for matrices and AdamW for the rest."""
    matrices, others = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def gradients(net, unused=()):
    return [None if i in unused else torch.randn_like(p) for i, p in enumerate(net.parameters())]


def trained_beside_one(factory, whole=False) -> Replicas:
    """Train replicas and one that updates everything, and compare to the bit."""
    one = model()
    optimizer, replicas = made_by(factory, [*one.parameters()]), Replicas(one, factory, whole=whole)
    for unused in [(), (1, 4), (0, 1, 2, 3, 4, 5), ()]:
        given = gradients(one, unused)
        for p, gradient in zip(one.parameters(), given, strict=True):
            p.grad = gradient
        with fused(optimizer):
            optimizer.step()
        replicas.step(given)
        for net in replicas.models:
            assert all(map(torch.equal, net.parameters(), one.parameters()))
    return replicas


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop]
)
def test_all_replicas_have_the_weights_of_one_that_updates_everything(kind):
    """To the bit: an element is rounded alike wherever it lies in a part."""
    trained_beside_one(by_dimensions(kind))


def test_muon_updates_each_matrix_whole_on_one_replica():
    """Its step looks at all elements of a matrix; AdamW's parameters are cut as ever."""
    replicas = trained_beside_one(by_kind, whole=True)
    matrices = [[p.shape for p in each.members[0].state if p.ndim == 2] for each in replicas.optimizers]
    assert sorted(shape for each in matrices for shape in each) == [(5, 31), (31, 7)]


def test_large_whole_matrices_are_dealt_to_all_replicas():
    """A bucket that one of them fills would leave all to the first replica, and pad the others' shares."""
    sizes = [(40, 40)] * 6 + [(40, 10)] * 6 + [(7, 5)] * 3
    given = [nn.Parameter(torch.zeros(size)) for size in sizes]
    shares = [ReplicaShares(copy.deepcopy(given), r, range(4), None) for r in range(4)]
    cut = sum(bucket.weights.numel() for bucket in shares[0].buckets)
    copies = [copy.deepcopy(given) for _ in range(4)]
    shares = [ReplicaShares(each, r, range(4), None, whole={*each}) for r, each in enumerate(copies)]
    held = [sum(len(part) for part in each.ranges.values()) for each in shares]
    assert sum(held) == sum(p.numel() for p in given) and max(held) <= 1.5 * sum(held) / 4
    assert sum(bucket.weights.numel() for bucket in shares[0].buckets) <= 1.4 * cut


def test_state_is_divided_and_groups_are_kept():
    replicas = Replicas(model(), by_dimensions(torch.optim.Adam))
    replicas.step(gradients(replicas.models[0]))
    held = [
        sum(v.numel() for state in each.state.values() for v in state.values() if v.ndim)
        for each in replicas.optimizers
    ]
    assert sum(held) == 2 * sum(p.numel() for p in model().parameters())
    assert [len(each.param_groups) for each in replicas.optimizers] == [2, 2, 2]


def test_state_that_an_optimizer_makes_at_once_is_cut():
    replicas = Replicas(model(), torch.optim.Adagrad)
    for shares, optimizer in zip(replicas.shares, replicas.optimizers, strict=True):
        assert optimizer.state.keys() == set(shares.parts.values())
        for part, state in optimizer.state.items():
            assert state["sum"].shape == part.shape
            assert state["sum"].untyped_storage().nbytes() == part.nbytes


def test_parameters_stay_what_they_are():
    net = model()
    before, given = [p.clone() for p in net.parameters()], list(net.parameters())
    ReplicaShares(net.parameters(), 0, (0, 1), None)
    assert all(map(torch.equal, net.parameters(), before))
    assert all(a is b and a.is_contiguous() for a, b in zip(net.parameters(), given, strict=True))


def test_what_cannot_be_cut_stays_whole():
    both = torch.randn(20)
    apart, overlapping, other = nn.Parameter(torch.randn(40)), nn.Parameter(both[:12]), nn.Parameter(both[8:])
    strided = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    sparse, empty = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.empty(0))
    number = nn.Parameter(torch.tensor(1.0))  # whose state has the shape of its count of steps
    given = [apart, overlapping, other, strided, sparse, empty, number]
    shares = ReplicaShares(given, 1, (0, 1), None, sparse={sparse})
    assert list(shares.ranges) == [apart]
    assert {p for p, part in shares.parts.items() if part is p} == set(given[1:])
    assert overlapping.data_ptr() + 8 * 4 == other.data_ptr()


def test_frozen_parameters_are_in_buckets_of_their_own():
    """They take no part in the all-gather, and the share of what is trained is equal."""
    net = model()
    net[2].requires_grad_(False)
    started = []

    def gather(weights):
        started.append(weights)
        return Copied(weights, [weights.clone()] * 2)

    shares = ReplicaShares(net.parameters(), 0, (0, 1), gather)
    for bucket in shares.buckets:
        assert len({p.requires_grad for p in bucket.parameters}) == 1
    shares.gather()
    assert shares.bytes_gathered == 4 * sum(len(weights) for weights in started)
    assert len(started) == sum(bucket.parameters[0].requires_grad for bucket in shares.buckets)
    assert len(started) < len(shares.buckets)
    net[2].requires_grad_(True)
    shares.renew()
    assert all(shares.parts[p].requires_grad for p in net[2].parameters() if p in shares.parts)


def test_a_parameter_that_moved_is_adopted_again():
    """As a new version of the weights moves it, while older ones keep the memory before."""
    net = model()
    shares = ReplicaShares(net.parameters(), 0, (0, 1), None)
    weight = net[0].weight
    old, part = weight.data, shares.parts[weight]
    weight.data = weight.data.clone()
    weight.data += 1
    shares.adopt()
    assert torch.equal(part, weight.detach().view(-1)[: len(part)])
    part.data.zero_()
    assert not weight.view(-1)[: len(part)].any() and old.all()


def test_gradients_add_up_and_free_the_whole():
    net = model()
    shares = ReplicaShares(net.parameters(), 0, (0, 1), None, frees=True)
    p = net[0].weight
    for _ in range(2):
        p.grad = torch.ones_like(p)
        shares.take([p])
        assert p.grad is None
    part = shares.parts[p]
    assert torch.equal(part.grad, torch.full_like(part, 2.0))
    assert part.grad.untyped_storage().nbytes() == part.nbytes < p.nbytes
