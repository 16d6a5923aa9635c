"""PointToPoint: one rank's exchange of activations and gradients with the stages before and after its own.

Stands between the transport, which moves bytes, and the executor, which knows values.
Invariant: shapes and types of a message are those of the first with the same `_SpecKey`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpipe.comm.courier import HEADER_NAMES, Arriving, Content, Courier
from hybridpipe.comm.messages import (
    SPEC_BYTES,
    ProtocolError,
    Spec,
    as_it_is,
    decode_spec,
    encode_spec,
    header_of,
    spec_of,
)
from hybridpipe.comm.transport import READ_TAG, SHARED_TAG
from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.tensors import TensorTree, received, tensors_of
from hybridpipe.planning.cost.memory import LOOK_AHEAD
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.routes import source_of, targets_of
from hybridpipe.planning.schedules.instructions import Program, ReceiveActivation, ReceiveGradient

KINDS = 3
ACTIVATION, GRADIENT, SPEC = range(KINDS)


class _SpecKey(NamedTuple):
    """The key of a spec: shapes depend on the cut, the peer, the microbatch's form, and training.

    Args:
        peer: the rank that this one receives from; it also stands for those that this one sends to.
    """

    cut: int
    peer: int
    form: int
    training: bool


class PointToPoint:
    """The messages of one rank at `stage`. Call `begin` before each program.

    Before a pair of ranks exchanges its first microbatch of some form, the sender sends a `Spec`. Later
    receives of that form are posted ahead into reused memory. A rank that holds several stages has one
    object a stage, with one courier.
    """

    def __init__(
        self, plan: Plan, stage: int, courier: Courier, precision: Precision = FP32, shard: int = 0
    ) -> None:
        self._stage, self._courier = stage, courier
        self._sent = as_it_is if precision.low is None else precision.sent
        self._transport = courier.transport
        self._chunk = plan.chunk_of(stage)
        self._num_stages = plan.num_stages
        self._num_tags = READ_TAG // (KINDS * plan.num_stages)
        self._source_of = lru_cache(maxsize=1024)(partial(source_of, plan, shard=shard))
        count = plan.stages[stage].tensor
        self._targets_of = lru_cache(maxsize=1024)(partial(targets_of, plan, shard=shard, count=count))
        self._specs: dict[_SpecKey, Spec] = {}
        self.bytes_sent = 0

    def forget_specs(self) -> None:
        """Forget the specs. Call it on both sides of a cut while no message is under way."""
        self._specs.clear()

    def begin(self, program: Program, form: Callable[[int], int], step: int, training: bool) -> None:
        """Prepare for a program.

        Args:
            form: maps a microbatch to a number; microbatches of one form have messages of the same shapes and
                types. It is sent in every header, so that ranks that disagree notice.
            step: number of minibatches before the program's first one; sent in every header.
        """
        self._form, self._step, self._training = form, step, training
        self._receives = [
            i
            for i in program
            if isinstance(i, ReceiveActivation | ReceiveGradient) and i.chunk == self._chunk
        ]
        self._posted: dict[ReceiveActivation | ReceiveGradient, Arriving] = {}
        self._num_posted = self._num_consumed = 0

    def end(self) -> None:
        """End a program: forget its microbatches."""
        del self._form

    def send_activation(self, microbatch: int, value: TensorTree) -> None:
        """Start sending a stage's output to the next stage.

        Raises:
            ProtocolError: shapes or types differ from those of earlier microbatches of the same form.
        """
        tensors = tensors_of(value)
        spec = spec_of(tensors, isinstance(value, Tensor), self._sent)
        key = self._key(microbatch, self._stage + 1)
        known = self._specs.setdefault(key, spec)
        targets = self._targets_of(self._stage + 1, microbatch)
        if known is spec:
            for peer in targets:
                self._transport.send(encode_spec(spec), peer, self._tag(SPEC, microbatch, self._stage))
        elif known != spec:
            raise ProtocolError(
                f"the output of stage {self._stage} changed for microbatches that look alike: "
                f"{_describe(known)} before, {_describe(spec)} now; shapes and types must follow from those "
                "of the inputs, and a data set whose samples differ in shape needs a collate_fn"
            )
        self._send(ACTIVATION, microbatch, self._stage, targets, known, tensors)

    def send_gradient(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Start sending the gradients of a stage's input to the stage before.

        Args:
            gradients: one for each tensor of the input; None if it requires none or was not used.
        """
        key = self._key(microbatch, self._stage - 1)
        spec = self._specs[key]
        wanted = [g for g, tensor in zip(gradients, spec.tensors, strict=True) if tensor.requires_grad]
        targets = self._targets_of(self._stage - 1, microbatch)
        self._send(GRADIENT, microbatch, self._stage - 1, targets, spec.gradients, wanted)

    def receive_activation(self, microbatch: int) -> TensorTree:
        """Wait for a stage's input and return it as leaves of this stage's graph.

        Raises:
            ProtocolError: the message is not the one that the plan expects.
        """
        key = self._key(microbatch, self._stage - 1)
        if key not in self._specs:
            buffer = torch.empty(SPEC_BYTES, dtype=torch.uint8)
            tag = self._tag(SPEC, microbatch, self._stage - 1)
            self._transport.receive(buffer, key.peer, tag).wait(partial(self._check_peer, key.peer))
            self._specs[key] = decode_spec(buffer)
        spec = self._specs[key]
        content = self._received(ReceiveActivation(microbatch, self._chunk))
        tensors = tuple(tensor for tensor in content if tensor is not None)  # none is missing
        return received(tensors[0] if spec.single else tensors, [t.requires_grad for t in spec.tensors])

    def receive_gradient(self, microbatch: int) -> list[Tensor | None]:
        """Wait for the gradients of a stage's output and return one for each tensor, or None.

        None stays None across the cut, so that the optimizer skips unused parameters.

        Raises:
            ProtocolError: the message is not the one that the plan expects.
        """
        spec = self._specs[self._key(microbatch, self._stage + 1)]
        gradients = iter(self._received(ReceiveGradient(microbatch, self._chunk)))
        return [next(gradients) if tensor.requires_grad else None for tensor in spec.tensors]

    def _send(
        self, kind: int, microbatch: int, cut: int, peers: list[int], spec: Spec, tensors: Content
    ) -> None:
        if not peers:  # other shards send
            return
        header = kind, self._step, microbatch, cut, self._form(microbatch)
        self.bytes_sent += spec.num_bytes * len(peers)
        self._courier.send(spec, tensors, header, peers, self._tag(kind, microbatch, cut))

    def _received(self, instruction: ReceiveActivation | ReceiveGradient) -> Content:
        """Wait for a message and return its tensors in their own types."""
        self._num_consumed += 1
        self._post_until(self._num_consumed + LOOK_AHEAD)
        posted = self._posted.pop(instruction)
        sent = zip(posted.wait(partial(self._check_peer, posted.peer)), posted.spec.tensors, strict=True)
        return [None if tensor is None else tensor.to(spec.dtype) for tensor, spec in sent]

    def _post_until(self, count: int) -> None:
        """Post the program's next receives, as far as their sizes are known."""
        while self._num_posted < min(count, len(self._receives)):
            instruction = self._receives[self._num_posted]
            forward = isinstance(instruction, ReceiveActivation)
            m = instruction.microbatch
            key = self._key(m, self._stage - 1 if forward else self._stage + 1)
            known = self._specs.get(key)
            if known is None:
                return
            spec = known if forward else known.gradients
            kind, cut = (ACTIVATION, self._stage - 1) if forward else (GRADIENT, self._stage)
            header = kind, self._step, m, cut, key.form
            tag = self._tag(kind, m, cut)
            self._posted[instruction] = self._courier.receive(spec, header, key.peer, tag)
            self._num_posted += 1

    def _check_peer(self, peer: int) -> None:
        """Raise ProtocolError if the peer has sent a message that the plan does not expect.

        Called when a wait takes long.
        """
        for posted in self._posted.values():
            if posted.pending.is_complete():
                posted.pending.wait()  # raises for a message of another size, which has filled no buffer
                posted.check()
        for tag, message in self._transport.unexpected(peer):
            if tag % KINDS == SPEC or tag in (SHARED_TAG, READ_TAG):
                continue
            found = dict(zip(HEADER_NAMES, header_of(message, len(HEADER_NAMES)), strict=True))
            expected = self._tag(found["kind"], found["microbatch"], found["stage"])
            told = ", ".join(f"{name} {value}" for name, value in found.items())
            if tag != expected:
                raise ProtocolError(
                    f"rank {peer} sent a message with tag {tag} where the plan expects {expected}: {told}"
                )
            if found["form"] != (form := self._form(found["microbatch"])):  # the ranks' models took two paths
                raise ProtocolError(
                    f"rank {peer} sent a microbatch of another form than {form}: {told}; inputs, and lengths "
                    "to which a collate_fn pads, must be the same on all ranks"
                )

    def _key(self, microbatch: int, stage: int) -> _SpecKey:
        cut, peer = min(stage, self._stage), self._source_of(stage, microbatch)
        return _SpecKey(cut, peer, self._form(microbatch), self._training)

    def _tag(self, kind: int, microbatch: int, cut: int) -> int:
        """Return a message's tag. Tags repeat; messages with one tag arrive in the order of sending."""
        return kind + KINDS * (cut + self._num_stages * (microbatch % self._num_tags))


def _describe(spec: Spec) -> str:
    tensors = ", ".join(
        f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}{' with gradient' * t.requires_grad}"
        for t in spec.tensors
    )
    return tensors if spec.single else f"a tuple of {tensors or 'nothing'}"
