"""Courier: carries messages of tensors between a rank's device and the transport.

Knows the device's lanes and memory, no stages. Invariant: MPI reads a message only when it is computed, and
memory is used again only when it was read.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from hybridpipe.comm.messages import ProtocolError, Spec, pack, present, views, write_head
from hybridpipe.comm.transport import Pending, Transport, parts_of
from hybridpipe.device import GpuLanes, Lanes, Point

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


def staged(
    receive: Callable[..., Pending], lanes: GpuLanes, buffer: Tensor, peer: int, tag: int
) -> tuple[Pending, Callable[[], Tensor]]:
    """Post a receive into pinned memory, from which each part is copied to the GPU once it is there.

    Args:
        receive: of the transport.

    Returns:
        the receive, and what returns the message on the GPU after it.
    """
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


def courier_of(transport: Transport, lanes: Lanes, direct: bool = False) -> Courier:
    """Return the courier between a device and a transport.

    Args:
        direct: MPI reads and writes the GPU's memory itself (`cuda_aware`).
    """
    if not isinstance(lanes, GpuLanes):
        return Courier(transport, lanes)
    return (DirectCourier if direct else StagingCourier)(transport, lanes)
