"""Two ranks in one thread, over queues that hold messages until the receiver asks for them."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch

from hybridpipe import Plan, StageSpec
from hybridpipe.comm.courier import Courier
from hybridpipe.comm.messages import SPEC_BYTES, ProtocolError
from hybridpipe.comm.p2p import ACTIVATION, GRADIENT, KINDS, LOOK_AHEAD, SPEC, PointToPoint
from hybridpipe.comm.transport import READ_TAG, SHARED_TAG, Pending
from hybridpipe.device import Lanes
from hybridpipe.engine.faulty import Spoiling
from hybridpipe.planning.schedules.generators import programs
from tests.engine.inprocess import Mailboxes, QueueTransport
from tests.planning.helpers import forward_programs

CPU = torch.device("cpu")
STRAIGHT = Plan((StageSpec(0, 1), StageSpec(1, 2)), schedule="gpipe", num_microbatches=4)


class Counted(NamedTuple):
    transport: "Watched"
    pending: Pending

    def wait(self, on_slow=None):
        self.transport.posted -= 1
        self.pending.wait(on_slow)

    def is_complete(self):
        return self.pending.is_complete()


class Watched(QueueTransport):
    """A transport that counts messages sent, and receives posted but not yet waited for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent, self.tags, self.posted, self.peak = Counter(), [], 0, 0

    def send(self, buffer, peer, tag, ready=None):
        self.sent[tag % 3] += 1
        self.tags.append(tag)
        return super().send(buffer, peer, tag, ready)

    def receive(self, buffer, peer, tag):
        self.posted += 1
        self.peak = max(self.peak, self.posted)
        return Counted(self, super().receive(buffer, peer, tag))


class FaultyQueue(Spoiling, Watched):
    pass


class Pair:
    """Both ends of the cut in a straight plan with two stages."""

    def __init__(self):
        mailboxes = Mailboxes()
        self.transports = [FaultyQueue(mailboxes, rank, 0.1) for rank in (0, 1)]
        self.transports[0].next_tag = KINDS * STRAIGHT.num_stages
        self.before, self.behind = (
            PointToPoint(STRAIGHT, rank, Courier(self.transports[rank], Lanes(CPU))) for rank in (0, 1)
        )

    def begin(self, *sizes, step=0, training=True):
        make = programs if training else forward_programs
        for rank, side in enumerate((self.before, self.behind)):
            side.begin(make(STRAIGHT, len(sizes))[rank], sizes.__getitem__, step, training)

    def forward(self, microbatch, value):
        self.before.send_activation(microbatch, value)
        return self.behind.receive_activation(microbatch)

    def spoil(self, fault, microbatch):
        self.transports[0].fault = fault
        self.before.send_activation(microbatch, torch.randn(2, 3))
        self.transports[0].fault = None

    def backward(self, microbatch, gradients):
        self.behind.send_gradient(microbatch, gradients)
        return self.before.receive_gradient(microbatch)


def test_a_tensor_stays_a_tensor_and_a_tuple_a_tuple():
    tensor = torch.randn(2, 3)
    for value in (tensor, (tensor,), (tensor, torch.arange(2))):
        pair = Pair()
        pair.begin(2)
        arrived = pair.forward(0, value)
        assert type(arrived) is type(value)


def test_only_what_requires_grad_is_a_leaf_that_does():
    pair = Pair()
    pair.begin(2)
    arrived = pair.forward(0, (torch.randn(2, requires_grad=True) * 2, torch.arange(2), torch.randn(2)))
    assert [tensor.requires_grad for tensor in arrived] == [True, False, False]
    assert all(tensor.is_leaf for tensor in arrived)
    gradients = pair.backward(0, [torch.ones(2), None, None])
    assert gradients[0].eq(1).all() and gradients[1:] == [None, None]


def test_nothing_that_requires_grad():
    pair = Pair()
    pair.begin(2)
    pair.forward(0, torch.randn(2))
    assert pair.backward(0, [None]) == [None]


def test_an_empty_tuple():
    pair = Pair()
    pair.begin(2)
    assert pair.forward(0, ()) == ()
    assert pair.backward(0, []) == []


def test_sizes_are_negotiated_once():
    pair = Pair()
    for step in range(3):
        pair.begin(4, 4, 4, 1, step=step)
        for m, size in enumerate((4, 4, 4, 1)):
            value = torch.randn(size, 3, requires_grad=True) * 2
            assert torch.equal(pair.forward(m, value), value)
        for m, size in enumerate((4, 4, 4, 1)):
            pair.backward(m, [torch.ones(size, 3)])
    assert pair.transports[0].sent == {SPEC: 2, ACTIVATION: 12}  # one for four samples, one for one
    assert pair.transports[1].sent == {GRADIENT: 12}


def test_evaluation_and_training_may_have_other_shapes():
    pair = Pair()
    for width, training in [(3, True), (5, False), (3, True), (5, False)]:
        pair.begin(2, training=training)
        with torch.set_grad_enabled(training):
            value = torch.randn(2, width, requires_grad=training) * 2
        arrived = pair.forward(0, value)
        assert arrived.shape == (2, width) and arrived.requires_grad == training
        if training:
            pair.backward(0, [torch.ones(2, 3)])


@pytest.mark.parametrize(
    "other, told",
    [
        (torch.randn(2, 4), r"\(2, 3\) float32 before, \(2, 4\) float32 now"),
        (torch.randn(2, 3, dtype=torch.float64), r"\(2, 3\) float32 before, \(2, 3\) float64 now"),
        (
            torch.randn(2, 3, requires_grad=True),
            r"\(2, 3\) float32 before, \(2, 3\) float32 with gradient now",
        ),
        ((torch.randn(2, 3),), r"\(2, 3\) float32 before, a tuple of \(2, 3\) float32 now"),
        ((), r"\(2, 3\) float32 before, a tuple of nothing now"),
    ],
)
def test_what_changes_is_refused(other, told):
    pair = Pair()
    pair.begin(2, 2)
    pair.forward(0, torch.randn(2, 3))
    with pytest.raises(
        ProtocolError, match=f"output of stage 0 changed for microbatches that look alike: {told}"
    ):
        pair.before.send_activation(1, other)


def test_a_message_of_another_step_is_refused():
    pair = Pair()
    pair.begin(2)
    pair.forward(0, torch.randn(2, 3))
    for side, step in ((pair.before, 3), (pair.behind, 4)):
        side.begin(programs(STRAIGHT, 1)[1 if step == 4 else 0], (2,).__getitem__, step, training=True)
    with pytest.raises(ProtocolError, match="step 3 instead of 4"):
        pair.forward(0, torch.randn(2, 3))


def test_receives_are_posted_ahead_but_not_far():
    pair = Pair()
    sizes = [2] * 8
    for step in range(2):
        pair.begin(*sizes, step=step)
        for m in range(8):
            pair.before.send_activation(m, torch.randn(2, 3, requires_grad=True) * 2)
        for m in range(8):
            pair.behind.receive_activation(m)
            assert pair.transports[1].posted <= LOOK_AHEAD
        assert pair.transports[1].posted == 0
        for m in range(8):
            pair.backward(m, [torch.ones(2, 3)])
    assert pair.transports[1].peak == 1 + LOOK_AHEAD


def test_a_receive_is_posted_before_it_is_asked_for():
    pair = Pair()
    pair.begin(2, 2, 2)
    pair.forward(0, torch.randn(2, 3))
    assert pair.transports[1].posted == LOOK_AHEAD  # of microbatches 1 and 2, which are not sent yet


def test_bytes_are_counted_with_header_and_padding():
    pair = Pair()
    pair.begin(2)
    pair.forward(0, torch.randn(2, 3))
    assert pair.before.bytes_sent == 64 + 64
    assert SPEC_BYTES not in (pair.before.bytes_sent, pair.behind.bytes_sent)


def test_buffers_are_used_again():
    pair = Pair()
    addresses = set()
    for step in range(5):
        pair.begin(2, 2, step=step)
        for m in range(2):
            addresses.add(pair.forward(m, torch.randn(2, 3)).data_ptr())
            pair.backward(m, [None])
    assert len(addresses) <= 1 + LOOK_AHEAD


@pytest.mark.parametrize(
    "fault, told",
    [
        ("badsize", r"256 bytes came where the plan expects 128"),
        (
            "badtag",
            r"tag 12 where the plan expects 6: kind 0, step 0, microbatch 1, stage 0",
        ),
    ],
)
def test_a_message_that_does_not_match_the_plan_is_not_consumed(fault, told):
    pair = Pair()
    pair.begin(2, 2)
    pair.forward(0, torch.randn(2, 3))
    pair.spoil(fault, 1)
    with pytest.raises(ProtocolError, match=told):
        pair.behind.receive_activation(1)


def test_a_wrong_size_posted_ahead_is_told_in_an_earlier_messages_wait():
    """The header must not be checked: the buffer was not filled and may hold an older message."""
    pair = Pair()
    pair.begin(2, 2, 2)
    pair.forward(0, torch.randn(2, 3))
    pair.spoil("badsize", 2)
    with pytest.raises(ProtocolError, match=r"256 bytes came where the plan expects 128"):
        pair.behind.receive_activation(1)


def test_a_message_under_the_next_ones_tag_is_found_where_that_was_posted_ahead():
    pair = Pair()
    pair.begin(2, 2, 2)
    pair.forward(0, torch.randn(2, 3))
    pair.spoil("badtag", 1)
    pair.before.send_activation(2, torch.randn(2, 3))
    with pytest.raises(ProtocolError, match=r"from rank 0, tag 12: .* expects: microbatch 1 instead of 2"):
        pair.behind.receive_activation(1)


def test_tags_come_round_before_the_largest_that_every_mpi_allows():
    pair = Pair()
    pair.begin(*[2] * 7000)
    tags = {}
    for m in (0, 5460, 5461, 6552, 6999):
        pair.before.send_activation(m, torch.zeros(2, 3))
        tags[m] = pair.transports[0].tags[-1]
    assert max(pair.transports[0].tags) < READ_TAG < SHARED_TAG < 2**15
    assert tags[5460] > tags[6999] > tags[0] == tags[5461]
