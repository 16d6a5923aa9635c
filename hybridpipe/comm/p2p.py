"""PointToPoint: one rank's exchange of activations and gradients with the stages before and behind it.

Between transport (bytes) and executor (values). The first time a pair of ranks exchanges a microbatch of
some size the sender describes it (`Spec`); from then on both know it, receives are posted ahead into
reused buffers, and a sender whose tensors have changed shape says so instead of sending.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpipe.comm.messages import (
    SPEC_BYTES,
    ProtocolError,
    Spec,
    check_header,
    decode_spec,
    encode_spec,
    header_of,
    pack,
    spec_of,
    views,
)
from hybridpipe.comm.transport import Pending, Transport
from hybridpipe.model.tensors import TensorTree, tensors_of
from hybridpipe.planning.cost.memory import LOOK_AHEAD
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.instructions import Program, ReceiveActivation, ReceiveGradient
from hybridpipe.stage.stage import received

LARGEST_MESSAGE_BYTES = 2**31 - 1  # MPI counts in 32 bits
LARGEST_TAG = 2**15 - 1  # that every MPI allows

KINDS = 3
ACTIVATION, GRADIENT, SPEC = range(KINDS)
HEADER_NAMES = ("kind", "step", "microbatch", "stage")


class _Size(NamedTuple):
    """What shapes depend on: the cut, the peer, the microbatch's samples, training or not."""

    cut: int
    peer: int
    samples: int
    training: bool


class _Posted(NamedTuple):
    pending: Pending
    buffer: Tensor
    spec: Spec
    header: tuple[int, ...]
    peer: int
    tag: int

    def check(self) -> None:
        """Raises ProtocolError unless what has come is what the plan expects."""
        try:
            check_header(self.buffer, self.spec, self.header, HEADER_NAMES)
        except ProtocolError as error:
            raise ProtocolError(f"from rank {self.peer}, tag {self.tag}: {error}") from None


class PointToPoint:
    """The messages of one rank at `stage`. Call `begin` before each program.

    Where the rank holds several stages each has one of its own, over the same transport.
    """

    def __init__(self, plan: Plan, stage: int, transport: Transport, device: torch.device) -> None:
        self._stage, self._transport, self._device = stage, transport, device
        self._chunk = stage // plan.num_groups
        self._num_stages = plan.num_stages
        self._num_tags = LARGEST_TAG // (KINDS * plan.num_stages)
        self._rank_of = lru_cache(maxsize=1024)(plan.rank_of)
        self._specs: dict[_Size, Spec] = {}
        self.bytes_sent = 0

    def forget(self) -> None:
        """Drop what is known of messages. Call it on both sides of a cut, with nothing under way."""
        self._specs.clear()

    def begin(self, program: Program, sizes: Sequence[int], step: int, training: bool) -> None:
        """Get ready for a program over microbatches of these sizes."""
        self._sizes, self._step, self._training = sizes, step, training
        self._receives = [
            i
            for i in program
            if isinstance(i, ReceiveActivation | ReceiveGradient) and i.chunk == self._chunk
        ]
        self._posted: dict[ReceiveActivation | ReceiveGradient, _Posted] = {}
        self._num_posted = self._num_consumed = 0

    def send_activation(self, microbatch: int, value: TensorTree) -> None:
        """Start sending a stage's output to the stage behind."""
        tensors = tensors_of(value)
        spec = spec_of(tensors, single=isinstance(value, Tensor))
        size = self._size(microbatch, self._stage + 1)
        known = self._specs.setdefault(size, spec)
        if known is spec:
            self._transport.send(encode_spec(spec), size.peer, self._tag(SPEC, microbatch, self._stage))
        elif known != spec:
            raise ProtocolError(
                f"the output of stage {self._stage} changed for microbatches of {size.samples} samples: "
                f"{_describe(known)} before, {_describe(spec)} now; hybridpipe needs shapes and types that "
                "depend on the number of samples only"
            )
        self._send(ACTIVATION, microbatch, self._stage, size.peer, spec, tensors)

    def send_gradient(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Start sending the gradients of a stage's input to the stage before.

        Args:
            gradients: one for each tensor of the input; None where it requires none, or nothing has used it.
        """
        size = self._size(microbatch, self._stage - 1)
        spec = self._specs[size]
        wanted = [g for g, tensor in zip(gradients, spec.tensors, strict=True) if tensor.requires_grad]
        present = torch.tensor([gradient is not None for gradient in wanted], dtype=torch.uint8)
        tensors = [present, *wanted]
        self._send(GRADIENT, microbatch, self._stage - 1, size.peer, spec.gradients, tensors)

    def receive_activation(self, microbatch: int) -> TensorTree:
        """Wait for a stage's input: leaves of this stage's graph."""
        size = self._size(microbatch, self._stage - 1)
        if size not in self._specs:
            buffer = torch.empty(SPEC_BYTES, dtype=torch.uint8)
            tag = self._tag(SPEC, microbatch, self._stage - 1)
            self._transport.receive(buffer, size.peer, tag).wait(partial(self._check_peer, size.peer))
            self._specs[size] = decode_spec(buffer)
        spec = self._specs[size]
        tensors = self._receive(ReceiveActivation(microbatch, self._chunk))
        return received(tensors[0] if spec.single else tensors, [t.requires_grad for t in spec.tensors])

    def receive_gradient(self, microbatch: int) -> list[Tensor | None]:
        """Wait for the gradients of a stage's output: one for each tensor, None where there is none.

        None stays None across the cut, so that the optimizer passes by what nothing has used.
        """
        spec = self._specs[self._size(microbatch, self._stage + 1)]
        present, *sent = self._receive(ReceiveGradient(microbatch, self._chunk))
        gradients = iter([g if there else None for g, there in zip(sent, present.tolist(), strict=True)])
        return [next(gradients) if tensor.requires_grad else None for tensor in spec.tensors]

    def _send(
        self,
        kind: int,
        microbatch: int,
        cut: int,
        peer: int,
        spec: Spec,
        tensors: Sequence[Tensor | None],
    ) -> None:
        if spec.num_bytes > LARGEST_MESSAGE_BYTES:
            raise ValueError(
                f"the message of microbatch {microbatch} weighs {spec.num_bytes} bytes, MPI takes at most "
                f"{LARGEST_MESSAGE_BYTES}; use smaller microbatches"
            )
        buffer = self._transport.buffer(spec.num_bytes)
        pack(buffer, spec, tensors, (kind, self._step, microbatch, cut))
        self.bytes_sent += spec.num_bytes
        self._transport.send(buffer, peer, self._tag(kind, microbatch, cut))

    def _receive(self, instruction: ReceiveActivation | ReceiveGradient) -> tuple[Tensor, ...]:
        self._num_consumed += 1
        self._post_until(self._num_consumed + LOOK_AHEAD)
        posted = self._posted.pop(instruction)
        posted.pending.wait(partial(self._check_peer, posted.peer))
        posted.check()
        return tuple(tensor.to(self._device) for tensor in views(posted.buffer, posted.spec))

    def _post_until(self, count: int) -> None:
        """Post the program's next receives, as far as their sizes are known."""
        while self._num_posted < min(count, len(self._receives)):
            instruction = self._receives[self._num_posted]
            forward = isinstance(instruction, ReceiveActivation)
            m = instruction.microbatch
            size = self._size(m, self._stage - 1 if forward else self._stage + 1)
            known = self._specs.get(size)
            if known is None:
                return
            spec = known if forward else known.gradients
            kind, cut = (ACTIVATION, self._stage - 1) if forward else (GRADIENT, self._stage)
            buffer = self._transport.buffer(spec.num_bytes)
            tag = self._tag(kind, m, cut)
            pending = self._transport.receive(buffer, size.peer, tag)
            header = (kind, self._step, m, cut)
            self._posted[instruction] = _Posted(pending, buffer, spec, header, size.peer, tag)
            self._num_posted += 1

    def _check_peer(self, peer: int) -> None:
        """A wait takes long: raises ProtocolError if the peer has sent what nobody will ever ask for."""
        for posted in self._posted.values():
            if posted.pending.is_complete():
                posted.pending.wait()  # one of another size has filled no buffer, and says so here
                posted.check()
        for tag, message in self._transport.unexpected(peer):
            if tag % KINDS == SPEC:
                continue
            found = dict(zip(HEADER_NAMES, header_of(message, len(HEADER_NAMES)), strict=True))
            expected = self._tag(found["kind"], found["microbatch"], found["stage"])
            if tag != expected:
                raise ProtocolError(
                    f"from rank {peer} came a message with tag {tag} where the plan expects {expected}: "
                    f"{', '.join(f'{name} {value}' for name, value in found.items())}"
                )

    def _size(self, microbatch: int, stage: int) -> _Size:
        cut, peer = min(stage, self._stage), self._rank_of(stage, microbatch)
        return _Size(cut, peer, self._sizes[microbatch], self._training)

    def _tag(self, kind: int, microbatch: int, cut: int) -> int:
        """Tags come round again; messages of one tag arrive in the order in which they were sent."""
        return kind + KINDS * (cut + self._num_stages * (microbatch % self._num_tags))


def _describe(spec: Spec) -> str:
    tensors = ", ".join(
        f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}{' with gradient' * t.requires_grad}"
        for t in spec.tensors
    )
    return tensors if spec.single else f"a tuple of {tensors or 'nothing'}"
