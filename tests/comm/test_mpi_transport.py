"""The MPI transport of a world of one rank, which may send to itself."""

import gc
import threading
import time

import pytest
import torch

from hybridpipe.comm import mpi_transport
from hybridpipe.comm import transport as any_transport
from hybridpipe.comm.courier import staged
from hybridpipe.comm.messages import Buffers, ProtocolError
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MOST_ACTIVE, MpiTransport
from hybridpipe.comm.status import rank_status
from tests.late_cuda import LateLanes


@pytest.fixture(
    params=[{}, {"cores_to_spare": True}, {"progress_thread": False}], ids=["", "spinning", "no-thread"]
)
def transport(request):
    communicator = MPI.COMM_SELF.Dup()
    with MpiTransport(communicator, **request.param) as transport:
        yield transport
    communicator.Free()
    rank_status.wait = None  # of a process with one thread that waits; some tests here have more


def filled(num_bytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


@pytest.mark.parametrize("num_bytes", [64, 5000, 1 << 24])
@pytest.mark.parametrize("receive_first", [True, False])
def test_bytes_arrive(transport, num_bytes, receive_first):
    message, buffer = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8), filled(num_bytes)
    if receive_first:
        receiving = transport.receive(buffer, 0, tag=3)
    sending = transport.send(message, 0, tag=3)
    if not receive_first:
        receiving = transport.receive(buffer, 0, tag=3)
    receiving.wait()
    sending.wait()
    assert torch.equal(buffer, message)


@pytest.fixture
def short_parts(monkeypatch):
    """Parts of 1000 bytes; MPI's limit is 2 GiB."""
    monkeypatch.setattr(any_transport, "PART_BYTES", 1000)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("num_bytes", [0, 999, 1000, 1001, 3000, 123456])
@pytest.mark.parametrize("receive_first", [True, False])
def test_a_long_message_travels_in_parts(transport, num_bytes, receive_first):
    messages = [torch.randint(0, 256, (num_bytes + more,), dtype=torch.uint8) for more in (0, 1, 2)]
    buffers = [filled(len(message)) for message in messages]
    if receive_first:
        receiving = [transport.receive(buffer, 0, tag=3) for buffer in buffers]
    sending = [transport.send(message, 0, tag=3) for message in messages]
    if not receive_first:
        receiving = [transport.receive(buffer, 0, tag=3) for buffer in buffers]
    for pending in receiving + sending:
        pending.wait()
        assert pending.is_complete()
    assert all(map(torch.equal, buffers, messages))


@pytest.mark.usefixtures("short_parts")
def test_of_an_unexpected_long_message_the_beginning_is_told(transport):
    sizes = (64, 2500, 2000, 7)
    for i, num_bytes in enumerate(sizes):
        transport.send(filled(num_bytes, i), 0, tag=4)
    deadline = time.monotonic() + 10
    while len(found := transport.unexpected(0)) < len(sizes):
        assert time.monotonic() < deadline
        transport.receive(filled(1), 0, tag=5)  # it looks for messages only where it expects some
        transport.send(filled(1), 0, tag=5)
    assert [len(message) for _, message in found] == [64, 1000, 1000, 7]
    assert [int(message[0]) for _, message in found] == [0, 1, 2, 3]
    for i, num_bytes in enumerate(sizes):
        transport.receive(buffer := filled(num_bytes), 0, tag=4).wait()
        assert buffer.eq(i).all()


def test_order_for_each_tag(transport):
    buffers = {(tag, i): filled(1 << 16) for tag in (1, 2) for i in range(4)}
    receiving = [transport.receive(buffer, 0, tag) for (tag, _), buffer in buffers.items()]
    for i in range(4):
        for tag in (2, 1):
            transport.send(filled(1 << 16, 10 * tag + i), 0, tag)
    for pending in receiving:
        pending.wait()
    assert all(buffer.eq(10 * tag + i).all() for (tag, i), buffer in buffers.items())


def test_a_buffer_is_free_once_it_is_sent_and_dropped(transport):
    buffers, addresses = Buffers(), set()
    gc.disable()  # reference counts alone must free the buffer
    try:
        for _ in range(20):
            receiving = transport.receive(incoming := buffers.take(1 << 20), 0, tag=0)
            sending = transport.send(outgoing := buffers.take(1 << 20), 0, tag=0)
            addresses |= {incoming.data_ptr(), outgoing.data_ptr()}
            receiving.wait()
            sending.wait()
            del incoming, outgoing
    finally:
        gc.enable()
    assert len(addresses) <= 4


def test_many_threads_may_send(transport):
    buffers = [[filled(4096) for _ in range(50)] for _ in range(4)]
    receiving = [transport.receive(buffer, 0, tag) for tag, row in enumerate(buffers) for buffer in row]

    def send(tag):
        for i in range(50):
            transport.send(filled(4096, i), 0, tag).wait()

    threads = [threading.Thread(target=send, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for pending in receiving:
        pending.wait()
    for thread in threads:
        thread.join()
    assert all(buffer.eq(i).all() for row in buffers for i, buffer in enumerate(row))


def test_a_collective_may_be_watched(transport):
    numbers = torch.tensor([3.0]).numpy()
    transport.watch(MPI.COMM_SELF.Iallreduce(MPI.IN_PLACE, numbers), numbers).wait()
    assert numbers.tolist() == [3.0]


@pytest.mark.parametrize("progress_thread", [True, False])
def test_close_waits_for_what_is_under_way(progress_thread):
    communicator = MPI.COMM_SELF.Dup()
    transport = MpiTransport(communicator, progress_thread=progress_thread)
    buffer = filled(1 << 22)
    receiving = transport.receive(buffer, 0, tag=0)
    transport.send(filled(1 << 22, 9), 0, tag=0)
    transport.close()
    receiving.wait()
    assert buffer.eq(9).all()
    assert not transport.thread.is_alive() if progress_thread else transport.thread is None
    communicator.Free()


def test_an_idle_transport_sleeps(transport):
    transport.send(filled(64), 0, tag=0)
    transport.receive(filled(64), 0, tag=0).wait()
    time.sleep(0.05)
    began, spent = time.perf_counter(), time.process_time()
    time.sleep(0.2)
    spent = time.process_time() - spent
    assert spent < 0.25 * (time.perf_counter() - began)


def test_pauses_grow_while_nothing_comes():
    pauses = [1e-3]
    while len(pauses) < 40:
        pauses.append(mpi_transport._longer(pauses[-1], large=False, only_expected=True))
    assert pauses[:4] == pytest.approx([1e-3, 2e-3, 4e-3, 4.25e-3])
    assert pauses == sorted(pauses) and pauses[-1] == 20e-3
    assert mpi_transport._longer(20e-3, large=False, only_expected=False) == 4e-3


@pytest.mark.parametrize("num_bytes, longest", [(64, "IDLE_PAUSE_SECONDS"), (5000, "PAUSE_SECONDS")])
def test_the_thread_looks_often_while_a_large_message_is_under_way(num_bytes, longest):
    """Each look lets some MB pass: with pauses of 4 ms, 64 MiB over TCP took 73 instead of 40 ms."""
    pauses = [1e-4]
    with MpiTransport(MPI.COMM_SELF, progress_thread=False) as transport:
        request = transport.send(filled(num_bytes), 0, tag=3)
        for _ in range(9):
            pauses.append(mpi_transport._longer(pauses[-1], large=request.large, only_expected=False))
        transport.receive(filled(num_bytes), 0, tag=3).wait()
    assert pauses[-1] == getattr(mpi_transport, longest)


@pytest.mark.parametrize("transport", [{}, {"cores_to_spare": True}], indirect=True)
@pytest.mark.parametrize("what", ["send", "receive"])
def test_something_new_ends_a_long_pause(transport, what):
    """The progress thread polls only every 20 ms after a posted receive has waited for long."""
    awaited = transport.receive(filled(8), 0, 1)
    deadline = time.monotonic() + 10
    while transport._resting <= 10e-3:
        assert time.monotonic() < deadline, "its pauses do not grow"
        time.sleep(5e-3)
    if what == "send":
        transport.send(filled(1 << 20), 0, 2)
    other = transport.receive(filled(1 << 20), 0, 2)
    assert transport._pause <= 10e-3  # otherwise it would be longer than the present pause
    if what == "receive":
        transport.send(filled(1 << 20), 0, 2)
    transport.send(filled(8), 0, 1)
    awaited.wait()
    other.wait()


def test_a_rank_that_waits_for_long_sleeps_with_and_without_a_core(transport):
    """The thread's processor time is measured, since it does not depend on other processes."""
    pending = transport.receive(filled(64), 0, tag=0)
    sender = threading.Timer(0.5, lambda: transport.send(filled(64, 5), 0, tag=0).wait())
    sender.start()
    began, spent = time.perf_counter(), time.thread_time()
    pending.wait()
    spent = time.thread_time() - spent
    assert spent < 0.5 * (time.perf_counter() - began)
    sender.join()


def test_sends_that_nobody_waits_for_are_let_go(transport):
    """A rank whose waits always succeed at once must still complete its sends once there are many."""
    for _ in range(200):
        receiving = transport.receive(filled(64), 0, tag=0)
        transport.send(filled(64), 0, tag=0)
        receiving.wait()
    assert len(transport._active) <= MOST_ACTIVE + 1


@pytest.mark.parametrize("transport", [{"progress_thread": False}], indirect=True)
def test_without_a_progress_thread_sending_frees_buffers(transport):
    """Under gpipe the first stage sends all microbatches without a wait, and would hold all buffers."""
    receiving = [transport.receive(filled(1 << 16), 0, tag=0) for _ in range(50)]
    most = 0
    for _ in range(50):
        transport.send(filled(1 << 16), 0, tag=0)
        most = max(most, len(transport._active))
    assert most < 10
    for each in receiving:
        each.wait()


@pytest.mark.parametrize("sent, expected", [(128, 64), (64, 128), (1 << 21, 1 << 12), (1 << 12, 1 << 21)])
@pytest.mark.parametrize("receive_first", [True, False])
def test_a_message_of_another_size_is_not_taken(transport, sent, expected, receive_first):
    """Open MPI would write a longer one past the buffer's end (MB: a crash), and accept a shorter one."""
    surroundings = filled(expected + 128, 7)
    buffer = surroundings[64:-64]
    if receive_first:
        receiving = transport.receive(buffer, 0, tag=3)
    transport.send(filled(sent, 1), 0, tag=3)
    if not receive_first:
        receiving = transport.receive(buffer, 0, tag=3)
    with pytest.raises(ProtocolError, match=rf"rank 0 sent {sent} bytes with tag 3 .* expects {expected};"):
        receiving.wait()
    assert surroundings.eq(7).all()
    transport.receive(filled(sent), 0, tag=3).wait()  # it is still there


def test_a_slow_wait_can_look_at_unexpected_messages(transport):
    transport.send(filled(64, 5), 0, tag=4)
    transport.send(filled(1 << 16, 6), 0, tag=4)

    def on_slow():
        assert [(tag, len(message)) for tag, message in transport.unexpected(0)] == [(4, 64), (4, 1 << 16)]
        raise ProtocolError("told")

    receiving = transport.receive(filled(64), 0, tag=3)
    with pytest.raises(ProtocolError, match="told"):
        receiving.wait(on_slow)
    for size, value in [(64, 5), (1 << 16, 6)]:  # they can still be received
        transport.receive(buffer := filled(size), 0, tag=4).wait()
        assert buffer.eq(value).all()
    transport.send(filled(64), 0, tag=3)  # so that the transport can be closed
    receiving.wait()


class Computed:
    """An event that comes when it is told, and counts how often it is looked at."""

    def __init__(self) -> None:
        self.is_reached, self.looks = False, 0

    def query(self) -> bool:
        self.looks += 1
        return self.is_reached


def looked_at(event: Computed, times: int) -> None:
    deadline, before = time.monotonic() + 10, event.looks
    while event.looks < before + times:
        assert time.monotonic() < deadline, "nobody looks"
        time.sleep(1e-3)


@pytest.mark.parametrize("transport", [{}, {"cores_to_spare": True}], indirect=True)
def test_what_is_not_computed_is_not_sent(transport):
    """The progress thread looks while this one does other things."""
    event, message, buffer = Computed(), filled(1 << 16), filled(1 << 16)
    receiving = transport.receive(buffer, 0, tag=3)
    sending = transport.send(message, 0, tag=3, ready=[event])
    looked_at(event, 3)
    assert not sending.is_complete() and not receiving.is_complete()
    message.fill_(7)  # computed now
    event.is_reached = True
    receiving.wait()
    sending.wait()
    assert buffer.eq(7).all()


def test_a_rank_that_waits_sends_what_is_computed_meanwhile(transport):
    event, buffers = Computed(), [filled(64), filled(1 << 16)]
    receiving = [transport.receive(buffer, 0, tag=3) for buffer in buffers]
    for i, buffer in enumerate(buffers):
        transport.send(filled(len(buffer), i + 1), 0, tag=3, ready=[event])

    def on_slow():
        event.is_reached = True

    for pending in receiving:
        pending.wait(on_slow)
    assert [int(buffer[-1]) for buffer in buffers] == [1, 2]


def test_a_late_message_holds_up_no_message_of_the_host(transport):
    event, late, quick = Computed(), filled(8), filled(8)
    waiting = transport.receive(late, 0, tag=3)
    transport.send(filled(8, 1), 0, tag=3, ready=[event])
    transport.receive(quick, 0, tag=4)
    transport.send(filled(8, 2), 0, tag=4).wait()
    assert not waiting.is_complete()
    event.is_reached = True
    waiting.wait()
    assert late.eq(1).all()


@pytest.mark.usefixtures("short_parts")
def test_each_part_is_sent_once_it_is_computed_and_told_once_it_has_arrived(transport):
    events, message, buffer = [Computed() for _ in range(3)], filled(2500), filled(2500)
    arrived: list[int] = []
    receiving = transport.receive(buffer, 0, 3, arrived.append)
    sending = transport.send(message, 0, 3, events)
    for part, event in enumerate(events):
        assert not receiving.is_complete() and part not in arrived
        message[1000 * part :].fill_(part + 1)
        event.is_reached = True
        receiving.pending[part].wait()
        assert part in arrived
    sending.wait()
    assert sorted(arrived) == [0, 1, 2] and receiving.is_complete()
    assert [int(buffer[i]) for i in (0, 1000, 2000)] == [1, 2, 3]


@pytest.mark.usefixtures("short_parts")
def test_a_part_of_another_size_is_not_told(transport):
    arrived: list[int] = []
    receiving = transport.receive(filled(100), 0, 3, arrived.append)
    transport.send(filled(200), 0, 3)
    with pytest.raises(ProtocolError):
        receiving.wait()
    assert arrived == []
    transport.receive(filled(200), 0, tag=3).wait()


@pytest.mark.parametrize("num_bytes", [64, 5000])
def test_what_a_callback_raises_is_raised_where_the_message_is_waited_for(transport, num_bytes):
    """In the progress thread it ended the thread, and the wait for the message never ended."""

    def fails(part: int) -> None:
        raise RuntimeError("out of memory")

    receiving = transport.receive(filled(num_bytes), 0, 3, fails)
    transport.send(filled(num_bytes, 1), 0, tag=3)
    with pytest.raises(RuntimeError, match="out of memory"):
        receiving.wait()
    buffer = filled(8)
    receiving = transport.receive(buffer, 0, tag=4)
    transport.send(filled(8, 2), 0, tag=4)
    receiving.wait()
    assert torch.equal(buffer, filled(8, 2))


def test_a_message_staged_in_inference_mode_may_be_copied_by_another_thread():
    """An evaluation may run in inference mode, which holds for one thread: it never ended."""
    lanes = LateLanes()
    with MpiTransport(MPI.COMM_SELF.Dup()) as transport:
        with torch.inference_mode(), lanes.cuda:
            receiving, _ = staged(transport.receive, lanes, filled(5000), 0, 3)
        transport.send(filled(5000, 7), 0, tag=3)
        while not receiving.is_complete():  # the progress thread copies
            time.sleep(1e-3)
        receiving.wait()
