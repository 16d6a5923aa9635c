"""Buffers are reused, and never while a tensor uses their memory."""

import gc
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hybridpipe.comm.messages import Buffers
from tests.engine.inprocess import Mailboxes, QueueTransport


def test_memory_is_used_again_after_the_last_view():
    buffers = Buffers()
    buffer = buffers.take(256)
    address, view = buffer.data_ptr(), buffer[64:128].view(torch.float32)[3:]
    del buffer
    assert buffers.take(256).data_ptr() != address
    del view
    assert buffers.take(256).data_ptr() == address


def test_sizes_do_not_mix():
    buffers = Buffers()
    buffers.take(256)
    assert len(buffers.take(128)) == 128 and len(buffers.take(256)) == 256


def test_buffers_are_aligned():
    assert all(Buffers().take(size).data_ptr() % 64 == 0 for size in (64, 128, 4096, 1 << 20))


def test_a_gradient_that_is_a_view_of_a_buffer_keeps_it():
    """Autograd may make a received gradient a parameter's `.grad` without a copy."""
    buffers = Buffers()
    parameter = nn.Parameter(torch.zeros(16))
    received = buffers.take(64)
    received.view(torch.float32).fill_(1)
    parameter.grad = received.view(torch.float32)
    address = received.data_ptr()
    del received
    for _ in range(3):
        buffers.take(64).fill_(0)
    assert parameter.grad.eq(1).all()
    parameter.grad = None
    assert buffers.take(64).data_ptr() == address


def test_an_autograd_graph_keeps_its_input():
    buffers = Buffers()
    leaf = buffers.take(64).view(torch.float32)
    leaf.fill_(3).requires_grad_()
    weight = nn.Parameter(torch.ones(16))
    output = (weight * leaf.detach()).sum()
    del leaf
    for _ in range(3):
        buffers.take(64).fill_(0)
    output.backward()
    assert weight.grad.eq(3).all()


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "view", "drop"]), st.integers(0, 9), st.sampled_from([64, 128]))
    )
)
@settings(max_examples=200, deadline=None)
def test_what_is_alive_never_shares_memory(actions):
    buffers, alive, peak = Buffers(), [], {64: 0, 128: 0}
    seen: dict[int, set[int]] = {64: set(), 128: set()}
    for number, (action, index, size) in enumerate(actions):
        if action == "take":
            tensor = buffers.take(size).fill_(number % 256)
            alive.append((tensor, number % 256, size, tensor.data_ptr()))
            seen[size].add(tensor.data_ptr())
        elif alive and action == "view":
            tensor, mark, *rest = alive[index % len(alive)]
            alive.append((tensor[8:24], mark, *rest))
        elif alive:
            alive.pop(index % len(alive))
        tensor = None
        assert all(tensor.eq(mark).all() for tensor, mark, *_ in alive)
        for each in seen:
            peak[each] = max(peak[each], len({address for _, _, size, address in alive if size == each}))
    assert all(len(seen[size]) <= peak[size] + 1 for size in seen)  # no more memory than was ever needed


def test_buffers_may_come_back_from_another_thread():
    """The progress thread drops the last reference to a sent buffer."""
    buffers, handed, stop = Buffers(), [], threading.Event()

    def drop():
        while not stop.is_set() or handed:
            if handed:
                handed.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    kept = []
    for i in range(2000):
        buffer = buffers.take(64).fill_(i % 256)
        if i % 100 == 0:
            kept.append((buffer, i % 256))
        handed.append(buffer)
        del buffer
    stop.set()
    thread.join()
    assert all(buffer.eq(mark).all() for buffer, mark in kept)


def test_dropped_buffers_do_not_outlive_their_owner():
    buffers = Buffers()
    buffer = buffers.take(64).fill_(7)
    del buffers
    gc.collect()
    assert buffer.eq(7).all()


def test_messages_arrive_in_order_for_each_peer_and_tag():
    mailboxes = Mailboxes()
    transports = [QueueTransport(mailboxes, rank, timeout_seconds=1) for rank in range(3)]
    for sender in (0, 1):
        for tag in (5, 6):
            for i in range(3):
                transports[sender].send(
                    torch.tensor([100 * sender + 10 * tag + i], dtype=torch.uint8), 2, tag
                )
    for tag in (6, 5):
        for sender in (1, 0):
            for i in range(3):
                transports[2].receive(buffer := torch.zeros(1, dtype=torch.uint8), sender, tag).wait()
                assert buffer.item() == 100 * sender + 10 * tag + i
