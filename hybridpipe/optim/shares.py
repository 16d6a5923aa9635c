"""Replica shares: the part of a stage's parameters that this replica updates, in flat buffers of weights.

Knows parameters and an all-gather over the stage's replicas; no schedule. Source: ZeRO (Rajbhandari et al.,
SC 2020). Invariant: parameters and parts are views of their bucket's buffer, and replicas have the same
numbers except between an update and `gather`.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hybridpipe.collectives.all_gather import Gather
from hybridpipe.collectives.protocol import Handle
from hybridpipe.comm.status import rank_status
from hybridpipe.model.held_part import axis_of
from hybridpipe.optim.gradient_sync import filled
from hybridpipe.optim.layout import ShardLayout
from hybridpipe.optim.named import with_parameters
from hybridpipe.stage.parts import Piece, join

MOST_UNDER_WAY = 8  # all-gathers; every poll looks at each


class FlatBucket:
    """The weights of a bucket of parameters of one type, one after the other in memory.

    Args:
        parameters: contiguous ones.
        replica: this rank's, in the order of the all-gather.
        held: elements of others that each replica has; if they are given, no parameter is cut.

    Attributes:
        layout: their places in the buffer.
        ranges: the elements of each that this replica updates, perhaps none.
        parts: tensors that stand for these elements, where there are any (`part_of`).
    """

    def __init__(
        self, parameters: Sequence[Tensor], replica: int, replicas: int, held: Sequence[int] | None = None
    ) -> None:
        self.parameters = tuple(parameters)
        self.layout = ShardLayout([p.numel() for p in parameters], replicas, held)
        self.ranges = {p: self.layout.part(i, replica) for i, p in enumerate(parameters)}
        self.weights = parameters[0].detach()[:0]
        self.parts = {
            p: nn.Parameter(part_of(p.detach(), part), p.requires_grad)
            for p, part in self.ranges.items()
            if part
        }
        self.adopt()

    def adopt(self) -> None:
        """Move the parameters' present values into one buffer, unless they are in it.

        A new version of the weights (`stage.weights`) leaves some outside.
        """
        places = list(zip(self.parameters, self.layout.offsets, strict=True))
        begin, size = self.weights.data_ptr(), self.weights.element_size()
        if len(self.weights) and all(p.data_ptr() == begin + at * size for p, at in places):
            return
        first = self.parameters[0]
        weights = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        for p, at in places:
            within = weights[at : at + p.numel()]
            within.copy_(p.detach().view(-1))
            p.data = within.view(p.shape)
            if p in self.parts:
                self.parts[p].data = part_of(p.data, self.ranges[p])
        self.weights = weights


class ReplicaShares:
    """A replica's share of its stage's parameters: the elements that it updates, as many as each other does.

    Parameters with sparse gradients stay whole, and so do those that are not contiguous, that overlap others
    in memory, that are empty or a number without dimensions: each replica updates them. Of a parameter that
    the replicas hold in parts each updates its own.

    Args:
        parameters: of all stages that the rank holds.
        replica: this rank's, in the order of the all-gather.
        ranks: of all replicas, in the world.
        sparse: parameters whose gradients may be sparse.
        whole: parameters that one replica updates, since their optimizer looks at all elements of each.
        frees: gradients of other replicas' elements shall not stay in memory until the update.

    Attributes:
        parts: the tensor that this replica updates for each parameter of which it updates anything; a whole
            parameter stands for itself.
        ranges: the elements of each sharded parameter that this replica updates, perhaps none.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        replica: int,
        ranks: Sequence[int],
        gather: Gather,
        sparse: Collection[Tensor] = (),
        whole: Collection[Tensor] = (),
        frees: bool = False,
    ) -> None:
        given, self._ranks, self._gather, self._frees = list(parameters), ranks, gather, frees
        kinds = defaultdict[object, list[Tensor]](list)
        overlapping = _overlapping(given)
        for p in given:
            is_array = p.is_contiguous() and p.ndim and p.numel()
            if is_array and p not in sparse and p not in overlapping and axis_of(p) != "replica":
                kinds[p.dtype, p.device, p.requires_grad, p in whole].append(p)
        self.buckets = [
            bucket for alike in kinds.values() for bucket in _buckets(alike, replica, len(ranks), whole)
        ]
        self.ranges = {p: part for bucket in self.buckets for p, part in bucket.ranges.items()}
        self.parts = {p: p for p in given if p not in self.ranges}
        for bucket in self.buckets:
            self.parts |= bucket.parts
        self.bytes_gathered = 0

    @property
    def cut(self) -> dict[Tensor, range]:
        """The `ranges` that are not all of a parameter."""
        return {p: part for p, part in self.ranges.items() if not is_all(part, p)}

    def renew(self) -> None:
        """Adopt the parameters' present requires_grad."""
        for parameter, part in self.parts.items():
            part.requires_grad_(parameter.requires_grad)

    def take(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Move summed gradients from parameters to this replica's parts, to what these have already.

        Args:
            parameters: by default all that are sharded.
        """
        for p in self.ranges if parameters is None else parameters:
            if p.grad is not None and p in self.ranges:
                part = self.ranges[p]
                self.add(p, p.grad.detach().reshape(-1)[part.start : part.stop], copies=self._frees)
                p.grad = None

    def add(self, parameter: Tensor, gradient: Tensor, copies: bool = False) -> None:
        """Add the summed gradient of this replica's elements of a parameter to its part's.

        Args:
            copies: the part must not keep the gradient's memory.
        """
        part = self.parts.get(parameter)
        if part is None:
            return
        gradient = gradient.view(part.shape)
        if part.grad is None:
            part.grad = gradient.clone() if copies else gradient
        else:
            part.grad += gradient

    def adopt(self) -> None:
        """Prepare an update: the parts are views of the parameters' present memory."""
        for bucket in self.buckets:
            bucket.adopt()

    def gather(self) -> None:
        """Give each replica the weights that the others have updated. Collective over them."""
        under_way = deque[tuple[FlatBucket, Handle]]()
        for bucket in self.buckets:
            if any(p.requires_grad for p in bucket.parameters):
                under_way.append((bucket, self._gather(bucket.weights)))
            if len(under_way) > MOST_UNDER_WAY:
                self._finish(*under_way.popleft())
        for each in under_way:
            self._finish(*each)

    def _finish(self, bucket: FlatBucket, gathering: Handle) -> None:
        with rank_status.waiting("all-gather of weights", self._ranks):
            gathering.wait()
        self.bytes_gathered += bucket.weights.nbytes
        for parameter in bucket.parameters:  # autograd shall detect a graph of the weights before
            torch.autograd.graph.increment_version(parameter)


def is_all(part: range, parameter: Tensor) -> bool:
    """Return True if a part has all elements of a parameter."""
    return len(part) == parameter.numel()


def part_of(parameter: Tensor, part: range) -> Tensor:
    """Return a view of some elements of a parameter, in its shape if they are all, else of one dimension."""
    return parameter if is_all(part, parameter) else parameter.view(-1)[part.start : part.stop]


def axes_of(parameter: Tensor, shares: ReplicaShares | None) -> set[str]:
    """Return the axes of `Place` along which ranks update different elements of a parameter."""
    axis = axis_of(parameter)
    is_sharded = shares is not None and parameter in shares.ranges
    return {*([] if axis is None else [axis]), *(["replica"] if is_sharded else [])}


def take_over(
    optimizer: torch.optim.Optimizer, parts: Mapping[Tensor, Tensor], ranges: Mapping[Tensor, range]
) -> None:
    """Let an optimizer update parts of parameters only; what it keeps of the parameters is cut.

    Args:
        parts, ranges: as in `ReplicaShares`.
    """
    for group in optimizer.param_groups:
        mine = [p for p in group["params"] if p in parts or p not in ranges]
        group.update(with_parameters(group, mine, parts))
    for p in [p for p in optimizer.state if p in ranges]:
        state = optimizer.state.pop(p)
        if p in parts:
            part = None if is_all(ranges[p], p) else ranges[p]
            optimizer.state[parts[p]] = join([Piece(state)], p.shape, part, copies=True)


def _buckets(
    alike: Sequence[Tensor], replica: int, replicas: int, whole: Collection[Tensor]
) -> Iterator[FlatBucket]:
    """Yield the buckets of parameters of one kind.

    Of whole ones those of a size lie together, as many for each replica, so that shares are about equal.
    """
    if alike[0] not in whole:
        yield from (FlatBucket(each, replica, replicas) for each in filled(alike))
        return
    held = [0] * replicas
    for each in filled(sorted(alike, key=Tensor.numel), multiple=replicas):  # from the last on: the largest
        yield (bucket := FlatBucket(each, replica, replicas, held))
        held = [count + bucket.layout.held(r) for r, count in enumerate(held)]


def _overlapping(parameters: Sequence[Tensor]) -> set[Tensor]:
    """Return the contiguous parameters that share memory with another."""
    spans = ((p.data_ptr(), p.data_ptr() + p.nbytes, p) for p in parameters if p.numel())
    found, last = set[Tensor](), None
    for span in sorted(spans, key=lambda span: span[0]):
        if last is not None and span[0] < last[1]:
            found |= {last[2], span[2]}
        last = span if last is None or span[1] > last[1] else last
    return found
