"""Gradients of parameters that several stages hold, summed by ranks that are threads."""

import pytest
import torch
from torch import nn

from hybridpipe.comm.courier import Courier
from hybridpipe.comm.messages import ProtocolError
from hybridpipe.device import Lanes
from hybridpipe.optim.shared_gradients import SharedGradients
from hybridpipe.planning.plan import Place
from tests.engine.helpers import each_in_a_thread, make_plan
from tests.engine.inprocess import Mailboxes, QueueTransport

SHAPE = (2, 30)  # in 16 bits a shorter message, though messages are aligned


class Ranks:
    """The ranks of a plan; each stage holds the parameters that `groups` says, of shape SHAPE."""

    def __init__(self, name: str, *groups: tuple[int, ...], compression: str = "none") -> None:
        self.plan, mailboxes = make_plan(name, 6, 2), Mailboxes()
        self.parameters, self.shared = {}, {}
        for s, stage in enumerate(self.plan.stages):
            for r, rank in enumerate(stage.ranks):
                own = {i: nn.Parameter(torch.zeros(SHAPE)) for i, held in enumerate(groups) if s in held}
                lanes = Lanes(torch.device("cpu"))
                courier = Courier(QueueTransport(mailboxes, rank, timeout_seconds=2.0), lanes)
                held = {parameter: groups[i] for i, parameter in own.items()}
                self.parameters[s, r] = own
                self.shared[rank] = SharedGradients(self.plan, Place(s, r), held, courier, compression)

    def give(self, index: int, *gradients: torch.Tensor | None) -> None:
        """Give each stage's copies of a parameter a gradient, the same on all replicas."""
        for (s, _), own in self.parameters.items():
            if index in own:
                own[index].grad = None if gradients[s] is None else gradients[s].clone()

    def exchange(self) -> None:
        each_in_a_thread(self.plan, lambda rank: self.shared[rank].exchange(), barriers=())

    def gradients(self, index: int) -> list[torch.Tensor | None]:
        return [own[index].grad for own in self.parameters.values() if index in own]


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["1-1", "2-1", "1-2", "2-3", "3-2"])
def test_two_groups_of_any_size_hold_the_sum(name):
    ranks = Ranks(name, (0, 1))
    for update in range(3):
        ranks.give(0, noise(update), noise(9 + update))
        ranks.exchange()
        assert all(torch.equal(each, noise(update) + noise(9 + update)) for each in ranks.gradients(0))


def test_receives_are_posted_before_the_exchange_and_once():
    """What the last stage has sent long ago came only after the first stage's last backward."""
    ranks = Ranks("1-2", (0, 1))
    posted = {rank: [] for rank in ranks.shared}
    for rank, shared in ranks.shared.items():
        receive = shared._courier.transport.receive
        shared._courier.transport.receive = lambda *each, r=receive, p=posted[rank]: (p.append(1), r(*each))[
            1
        ]
    for update in range(2):
        for shared in ranks.shared.values():
            shared.begin()
            shared.begin()
        assert set(map(len, posted.values())) == {update + 1}
        ranks.give(0, noise(update), noise(9))
        ranks.exchange()
        assert all(torch.equal(each, noise(update) + noise(9)) for each in ranks.gradients(0))
    assert set(map(len, posted.values())) == {2}


def test_compressed_gradients_travel_and_add_up_rounded():
    """A holder that added its own gradient as it is would have another sum than the others."""
    ranks, plain = Ranks("2-1", (0, 1), compression="fp16"), Ranks("2-1", (0, 1))
    for each in (ranks, plain):
        each.give(0, noise(1), noise(2))
        each.exchange()
    expected = noise(1).half().float() + noise(2).half().float()
    assert all(torch.equal(each, expected) for each in ranks.gradients(0))
    assert not torch.equal(expected, noise(1) + noise(2))
    assert ranks.shared[0].bytes_sent < plain.shared[0].bytes_sent


def test_all_holders_add_in_one_order():
    """The sum of three floats depends on the order, and copies must not drift apart."""
    ranks = Ranks("1-2-1-1", (0, 1, 3), (0, 3), (1, 2))
    large, small = torch.full(SHAPE, 1e8), torch.ones(SHAPE)
    ranks.give(0, small, large, None, -large)
    ranks.give(1, small, None, None, large)
    ranks.give(2, None, large, small, None)
    ranks.exchange()
    assert all(torch.equal(each, (small + large) - large) for each in ranks.gradients(0))
    assert all(torch.equal(each, small + large) for each in (*ranks.gradients(1), *ranks.gradients(2)))


def test_a_holder_without_a_gradient_adds_nothing():
    ranks = Ranks("2-1-1", (0, 1, 2), (0, 2))
    ranks.give(0, None, noise(1), None)
    ranks.give(1, None, None, None)
    ranks.exchange()
    assert all(torch.equal(each, noise(1)) for each in ranks.gradients(0))
    assert ranks.gradients(1) == [None] * 3


def test_a_frozen_parameter_is_not_exchanged():
    ranks = Ranks("1-1", (0, 1), (0, 1))
    for own in ranks.parameters.values():
        own[0].requires_grad_(False)
    ranks.give(1, noise(0), noise(1))
    ranks.exchange()
    assert ranks.gradients(0) == [None, None] and torch.equal(ranks.gradients(1)[0], noise(0) + noise(1))
    head, flags, numbers = 64, 64, 256
    assert {shared.bytes_sent for shared in ranks.shared.values()} == {head + flags + numbers}


def test_a_gradient_that_turns_out_sparse_is_added_as_a_dense_one():
    ranks = Ranks("1-1", (0, 1))
    ranks.give(0, noise(0).to_sparse(), noise(1))
    ranks.exchange()
    assert all(torch.equal(each, noise(0) + noise(1)) for each in ranks.gradients(0))


def test_holders_at_different_updates_are_told():
    ranks = Ranks("1-1", (0, 1))
    ranks.give(0, noise(0), noise(1))
    ranks.exchange()
    ranks.shared[0]._num_exchanges += 1
    with pytest.raises(ProtocolError, match=r"step 1 instead of 2|step 2 instead of 1"):
        ranks.exchange()
