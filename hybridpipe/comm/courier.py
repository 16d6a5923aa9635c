"""Courier: carries messages of tensors between a rank's device and the transport.

Knows the device's lanes and memory, no stages. Invariant: MPI reads a message only when it is computed, and
memory is used again only when it was read.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpipe.comm.mailbox import NO_SLOT, NOTE_BYTES, Mailbox, ReadSlot, read_note, write_note
from hybridpipe.comm.messages import ProtocolError, Spec, pack, present, views, write_head
from hybridpipe.comm.transport import READ_TAG, Pending, Transport, parts_of
from hybridpipe.device import GpuLanes, Lanes, Point
from hybridpipe.planning.cost.memory import LOOK_AHEAD

# A message's tensors; None for one that is missing.
Content = Sequence[Tensor | None]
Header = Sequence[int]

HEADER_NAMES = ("kind", "step", "microbatch", "stage", "form")


class Arriving(NamedTuple):
    """A message on its way here, and what the plan expects there.

    Args:
        head: returns the message's head in the host's memory, once it has arrived.
        body: returns the whole message on the device; its head may be left out.
    """

    pending: Pending
    spec: Spec
    header: Header
    peer: int
    tag: int
    head: Callable[[], Tensor]
    body: Callable[[], Tensor]

    def check(self) -> None:
        """Raise ProtocolError unless the message, which has arrived, is the one that the plan expects."""
        self._present()

    def wait(self, on_slow: Callable[[], None] | None = None) -> Content:
        """Wait for the message, check it and return its tensors, in the types in which they are sent."""
        self.pending.wait(on_slow)
        there, tensors = self._present(), views(self.body(), self.spec)
        return [tensor if is_there else None for tensor, is_there in zip(tensors, there, strict=True)]

    def _present(self) -> list[bool]:
        try:
            return present(self.head(), self.spec, self.header, HEADER_NAMES)
        except ProtocolError as error:
            raise ProtocolError(f"from rank {self.peer}, tag {self.tag}: {error}") from None


class Courier:
    """The courier of a CPU, whose messages lie in the transport's buffers."""

    def __init__(self, transport: Transport, lanes: Lanes) -> None:
        self.transport, self.lanes = transport, lanes

    def send(self, spec: Spec, tensors: Content, header: Header, peers: Iterable[int], tag: int) -> None:
        """Start sending tensors, as they are now, to each of some ranks."""
        buffer = self._headed(spec, tensors, header)
        pack(buffer, spec, tensors)
        for peer in peers:
            self.transport.send(buffer, peer, tag)

    def receive(self, spec: Spec, header: Header, peer: int, tag: int) -> Arriving:
        """Post a receive."""
        buffer = self.transport.buffer(spec.num_bytes)
        pending = self.transport.receive(buffer, peer, tag)
        return Arriving(pending, spec, header, peer, tag, lambda: buffer, lambda: buffer)

    def close(self) -> None:
        """Let go of memory that is another rank's, or that another rank reads. Every message was received."""

    def _headed(self, spec: Spec, tensors: Content, header: Header, num_bytes: int | None = None) -> Tensor:
        """Return a buffer with a message's head and room for the rest."""
        buffer = self.transport.buffer(spec.num_bytes if num_bytes is None else num_bytes)
        write_head(buffer, spec, tensors, header)
        return buffer


class StagingCourier(Courier):
    """The courier of a GPU, by way of pinned memory; the GPU copies while it computes.

    A message is put together on the GPU, by the stream that computes. So it has the tensors' present values,
    and one copy moves all of it.
    """

    lanes: GpuLanes

    def send(self, spec: Spec, tensors: Content, header: Header, peers: Iterable[int], tag: int) -> None:
        """Start sending tensors, as they are now, once they are computed and copied to the host."""
        buffer, head_bytes = self._headed(spec, tensors, header), spec.head_bytes
        hosts, parts = parts_of(buffer), parts_of(_packed(self.lanes, spec, tensors))
        hosts[0], parts[0] = hosts[0][head_bytes:], parts[0][head_bytes:]
        copied = self.lanes.copy_out(hosts, parts)
        for peer in peers:
            self.transport.send(buffer, peer, tag, copied)

    def receive(self, spec: Spec, header: Header, peer: int, tag: int) -> Arriving:
        """Post a receive into pinned memory, from which each part is copied to the GPU once it is there."""
        buffer = self.transport.buffer(spec.num_bytes)
        pending, body = staged(self.transport.receive, self.lanes, buffer, peer, tag)
        return Arriving(pending, spec, header, peer, tag, lambda: buffer, body)


class DirectCourier(Courier):
    """The courier of a GPU whose memory MPI reads and writes itself."""

    lanes: GpuLanes

    def send(self, spec: Spec, tensors: Content, header: Header, peers: Iterable[int], tag: int) -> None:
        """Start sending tensors, as they are now, once they are computed."""
        head = self._headed(spec, tensors, header, spec.head_bytes)
        message = _packed(self.lanes, spec, tensors)
        message[: spec.head_bytes].copy_(head, non_blocking=True)
        computed = [self.lanes.computed(head)] * len(parts_of(message))
        for peer in peers:
            self.transport.send(message, peer, tag, computed)

    def receive(self, spec: Spec, header: Header, peer: int, tag: int) -> Arriving:
        """Post a receive into the GPU's memory."""
        room, head_bytes = self.lanes.room(spec.num_bytes), spec.head_bytes
        pending = self.transport.receive(room, peer, tag)
        head, body = lambda: self.lanes.head(room, head_bytes), lambda: self.lanes.used(room)
        return Arriving(pending, spec, header, peer, tag, head, body)


class IpcCourier(StagingCourier):
    """The courier of GPUs of one host that read each other's memory themselves (CUDA IPC).

    A message is put together in a slot by the stream that computes. A note of it goes over MPI at once, with
    the message's head. The reader's stream for copies waits for the slot's event, and a note goes back when
    the copy is given to the GPU. So no host waits for its GPU before it sends, and no message passes through
    the host. Where no slot is free, the note says so, and the message follows by way of pinned memory.

    Args:
        peers: the other ranks, as a trial has found them (`cuda_ipc`). Messages of further ranks are staged.
    """

    def __init__(self, transport: Transport, lanes: GpuLanes, peers: Iterable[int]) -> None:
        super().__init__(transport, lanes)
        self._out = {peer: _Outbox(transport, lanes, peer) for peer in peers}
        self._slots: dict[int, dict[int, ReadSlot]] = {peer: {} for peer in self._out}
        self._ahead: deque[Point] = deque()

    def send(self, spec: Spec, tensors: Content, header: Header, peers: Iterable[int], tag: int) -> None:
        """Start sending tensors, as they are now, to each of some ranks."""
        staged_peers = []
        for peer in peers:
            head = None if peer not in self._out else self._headed(spec, tensors, header, _noted_bytes(spec))
            if head is None or not self._out[peer].send(spec, tensors, head, tag):
                staged_peers.append(peer)
        if staged_peers:
            super().send(spec, tensors, header, staged_peers, tag)

    def receive(self, spec: Spec, header: Header, peer: int, tag: int) -> Arriving:
        """Post a receive of the note, where the peer reads and is read.

        The message before it with this tag has been waited for: it may follow its note.
        """
        if peer not in self._slots:
            return super().receive(spec, header, peer, tag)
        note = self.transport.buffer(_noted_bytes(spec))
        pending = self.transport.receive(note, peer, tag)

        def body() -> Tensor:
            number, handle = read_note(note[spec.head_bytes :])
            if number != NO_SLOT:
                return self._read(peer, number, handle, spec.num_bytes)
            arriving = super(IpcCourier, self).receive(spec, header, peer, tag)
            arriving.pending.wait()
            arriving.check()
            return arriving.body()

        return Arriving(pending, spec, header, peer, tag, lambda: note, body)

    def _read(self, peer: int, number: int, handle: bytes, num_bytes: int) -> Tensor:
        """Return a message that the GPU copies from a slot."""
        slots = self._slots[peer]
        slot = slots[number] = slots.get(number) or ReadSlot(self.lanes)
        room, copied = slot.read(handle, num_bytes)
        self._tell_read(peer, number, slot.handle)
        self._ahead.append(copied)
        if len(self._ahead) > LOOK_AHEAD:  # else hosts run ahead of all GPUs, with a room for each message
            self._ahead.popleft().event.synchronize()
        return self.lanes.copied_in(room, [copied])

    def _tell_read(self, peer: int, number: int, handle: bytes = b"") -> None:
        note = self.transport.buffer(NOTE_BYTES)
        write_note(note, number, handle)
        self.transport.send(note, peer, READ_TAG)

    def close(self) -> None:
        """Let go of other ranks' slots, then of this one's, once their readers have."""
        for peer, slots in self._slots.items():
            for slot in slots.values():
                slot.close()
            self._tell_read(peer, NO_SLOT)
        for outbox in self._out.values():
            outbox.close()


class _Outbox:
    """The way of one rank's messages to another one's GPU."""

    def __init__(self, transport: Transport, lanes: GpuLanes, peer: int) -> None:
        self._transport, self._peer, self._mailbox = transport, peer, Mailbox(lanes)
        self._unread: deque[tuple[Pending, Tensor]] = deque()  # notes to come, in order
        self._keeps_order = False

    def send(self, spec: Spec, tensors: Content, note: Tensor, tag: int) -> bool:
        """Send a note, and write the message; False if no slot is free, and the message is to follow.

        A message that follows is sent when it is computed. So from then on notes wait for what was sent
        before them.
        """
        while self._unread and self._unread[0][0].is_complete():
            self._take()
        number, handle = self._mailbox.free_slot(spec.num_bytes), b""
        if number != NO_SLOT:
            slot = self._mailbox.slots[number]
            slot.write(spec, tensors)
            handle = slot.handle
            self._expect()
        write_note(note[spec.head_bytes :], number, handle)
        self._keeps_order |= number == NO_SLOT
        ready = [_Now()] * len(parts_of(note)) if self._keeps_order else None
        self._transport.send(note, self._peer, tag, ready)
        return number != NO_SLOT

    def _expect(self) -> None:
        note = self._transport.buffer(NOTE_BYTES)
        self._unread.append((self._transport.receive(note, self._peer, READ_TAG), note))

    def _take(self) -> None:
        pending, note = self._unread.popleft()
        pending.wait()
        number, handle = read_note(note)
        if number != NO_SLOT:
            self._mailbox.slots[number].free(handle)

    def close(self) -> None:
        """Wait until the reader has let go of the slots, and let go of them."""
        self._expect()
        while self._unread:
            self._take()
        self._mailbox.slots.clear()


class _Now:
    """A completion that is there already."""

    def query(self) -> bool:
        return True


def _noted_bytes(spec: Spec) -> int:
    """Return the bytes of a message's head and the note of its slot."""
    return spec.head_bytes + NOTE_BYTES


def staged(
    receive: Callable[..., Pending], lanes: GpuLanes, buffer: Tensor, peer: int, tag: int
) -> tuple[Pending, Callable[[], Tensor]]:
    """Post a receive into pinned memory, from which each part is copied to the GPU once it is there.

    Args:
        receive: of the transport.

    Returns:
        the receive, and what returns the message on the GPU after it.
    """
    with torch.inference_mode(False):  # else another thread could not copy into it
        room = lanes.room(len(buffer))
        hosts, parts = parts_of(buffer), parts_of(room)
    copied: list[Point] = []
    pending = receive(buffer, peer, tag, lambda i: copied.append(lanes.start_copy_in(parts[i], hosts[i])))
    return pending, lambda: lanes.copied_in(room, copied)


def _packed(lanes: GpuLanes, spec: Spec, tensors: Content) -> Tensor:
    """Return a message's tensors, put together on the GPU; its head is left open."""
    message = lanes.empty(spec.num_bytes)
    pack(message, spec, tensors)
    return message


def courier_of(
    transport: Transport, lanes: Lanes, direct: bool = False, readers: Collection[int] = ()
) -> Courier:
    """Return the courier between a device and a transport.

    Args:
        direct: MPI reads and writes the GPU's memory itself (`cuda_aware`).
        readers: the ranks whose GPUs and this one's read each other's memory (`cuda_ipc`).
    """
    if not isinstance(lanes, GpuLanes):
        return Courier(transport, lanes)
    if readers:
        return IpcCourier(transport, lanes, readers)
    return (DirectCourier if direct else StagingCourier)(transport, lanes)
