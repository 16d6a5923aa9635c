"""SharedGradients: sums the gradients of parameters that several stages hold, such as tied embeddings.

Knows parameters, the groups of ranks that hold them and a courier; no schedule and no model.
Invariant: every holder adds the same numbers in the same order, so copies stay equal bit for bit.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridpipe.comm.courier import Arriving, Courier
from hybridpipe.comm.messages import Spec, TensorSpec
from hybridpipe.comm.p2p import KINDS
from hybridpipe.comm.transport import SHARED_TAG
from hybridpipe.planning.checks import COMPRESSIONS, NO_COMPRESSION
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.shared_parameters import peers_of


class SharedGradients:
    """The parameters of one rank that other groups of ranks hold as well.

    Each rank sends its gradients, already summed over its replicas, to the other holders, and adds what it
    receives in the order of the groups.

    Args:
        place: the rank's place; its stage is the number of its group.
        groups: the groups that hold each parameter, this rank's among them. The order of the groups and of
            the parameters is the same on all ranks.
        compression: "fp16" sends and adds float32 gradients rounded to float16, as between replicas.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        groups: Mapping[Tensor, Sequence[int]],
        courier: Courier,
        compression: str = NO_COMPRESSION,
    ) -> None:
        self._own, self._groups, self._courier = place.stage, dict(groups), courier
        self._halves = COMPRESSIONS[compression] == 0.5
        others = sorted({group for each in groups.values() for group in each} - {place.stage})
        self._peers = {group: peers_of(plan, place, group) for group in others}
        self._arriving: dict[int, Arriving] = {}  # by group, between `begin` and the end of `exchange`
        self._num_exchanges = 0
        self.bytes_sent = 0

    def begin(self) -> None:
        """Post the receives, so that gradients arrive while this rank's last backward runs."""
        if self._arriving:
            return
        shared = {
            group: [p for p, groups in self._groups.items() if group in groups and p.requires_grad]
            for group in self._peers
        }
        self._shared = {group: parameters for group, parameters in shared.items() if parameters}
        self._arriving = {group: self._receive(group, each) for group, each in self._shared.items()}

    def exchange(self) -> None:
        """Sum the gradients over their holders. Collective over the holders.

        A holder without a gradient adds nothing. Where no holder has one, `.grad` stays None.

        Raises:
            ProtocolError: another holder is not at the same update.
        """
        self.begin()
        own = {p: self._sendable(p) for p in self._groups if p.requires_grad}
        for group, parameters in self._shared.items():
            self._send(group, parameters, [own[p] for p in parameters])
        found = {group: iter(arriving.wait()) for group, arriving in self._arriving.items()}
        for parameter, gradient in own.items():
            each = [gradient if g == self._own else next(found[g]) for g in self._groups[parameter]]
            parameter.grad = _sum([gradient for gradient in each if gradient is not None], parameter)
        self._arriving = {}
        self._num_exchanges += 1

    def _receive(self, group: int, parameters: Sequence[Tensor]) -> Arriving:
        """Post the receives of a group's gradients."""
        header, peer = self._header(group), self._peers[group].source
        return self._courier.receive(self._spec(parameters), header, peer, SHARED_TAG)

    def _send(self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Start sending this rank's gradients to a group."""
        targets = self._peers[group].targets
        if not targets:
            return
        spec = self._spec(parameters)
        self.bytes_sent += spec.num_bytes * len(targets)
        self._courier.send(spec, gradients, self._header(self._own), targets, SHARED_TAG)

    def _header(self, group: int) -> tuple[int, ...]:
        return KINDS, self._num_exchanges, 0, group, 0

    def _spec(self, parameters: Sequence[Tensor]) -> Spec:
        """Return the spec of a message with the parameters' gradients."""
        gradients = (TensorSpec(tuple(p.shape), p.dtype, False, self._sent(p)) for p in parameters)
        return Spec(tuple(gradients), optional=True)

    def _sent(self, parameter: Tensor) -> torch.dtype:
        """Return the type in which a parameter's gradients travel."""
        return torch.float16 if self._halves and parameter.dtype == torch.float32 else parameter.dtype

    def _sendable(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient as it travels, which is also what this rank adds."""
        return None if parameter.grad is None else _dense(parameter.grad).to(self._sent(parameter))


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _sum(gradients: Sequence[Tensor], parameter: Tensor) -> Tensor | None:
    """Return the sum in the given order; None of nothing."""
    if not gradients:
        return None
    total, *others = (gradient.to(parameter.device, parameter.dtype) for gradient in gradients)
    for other in others:
        total = total + other  # not in place: a gradient may share its memory with another
    return total
