"""GradientSync: sums gradients over a stage's replicas while the last backward is still running.

Knows parameters and collectives over the replicas; no schedule.
Invariant: a loss counts by its samples, so the sum is the minibatch's mean, or its sums over its samples.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridpipe.collectives.protocol import Collectives, Handle
from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.status import rank_status
from hybridpipe.planning.checks import COMPRESSIONS, NO_COMPRESSION
from hybridpipe.planning.cost.formula import BUCKET_BYTES
from hybridpipe.torch_private import uses_of_storage

# Larger gradients are reduced in pieces of so many elements: Horovod 0.28.1 counts elements in 32 bits, and
# would reduce the first few of 2^32. So does MPI before its fourth version.
MOST_ELEMENTS = 2**30


class GradientSync(Protocol):
    """Sums the gradients over a stage's replicas."""

    bytes_reduced: int

    def renew(self) -> None:
        """Adopt the parameters' present requires_grad. Collective over the replicas, between two steps."""

    def begin_final_backward(self) -> None:
        """Announce the stage's last backward before the update: its gradients are final as they arrive."""

    def end_final_backward(self) -> None:
        """Announce the end of that backward."""

    def close(self) -> None:
        """Release hooks and communicators. Collective over the replicas."""

    def finish(self, completes: bool = True) -> None:
        """Wait until the sum over the replicas is where the update finds it.

        Args:
            completes: False where more backwards follow before the update.
        """


class Bucket:
    """Parameters whose gradients an all-reduce sums together.

    Args:
        name: the same on all replicas, and no other bucket's.
        sparse: parameters whose gradients may be sparse.
        halves: float32 gradients travel as float16.

    Attributes:
        missing: parameters whose last gradient has not arrived.
        handle: of the reduction under way.
        num_bytes: of gradients in the last reduction.
        is_reduced: the sum is there.
        waits: only the reduction that completes the gradients covers the bucket.
    """

    what = "all-reduce"

    def __init__(
        self, name: str, parameters: list[Tensor], sparse: Collection[Tensor] = (), halves: bool = False
    ) -> None:
        self.name, self.parameters = name, parameters
        self._sparse, self._halves = frozenset(sparse).intersection(parameters), halves
        self.tensors: list[Tensor] = []
        self.handle: Handle | None = None
        self.num_bytes = 0
        self.is_reduced = self.waits = False
        self.missing = set(parameters)

    @property
    def has_started(self) -> bool:
        """True from `start` to `reset`."""
        return self.handle is not None or self.is_reduced

    def reset(self) -> None:
        """Begin again, for the next reduction."""
        self.missing, self.is_reduced = set(self.parameters), False

    def start(self, collectives: Collectives) -> None:
        """Start the reduction of the present gradients. Collective over the replicas."""
        device = self.parameters[0].device  # a group of tensors is on one device
        present = torch.tensor([float(p.grad is not None) for p in self.parameters], device=device)
        rows = [_rows(p) for p in self.parameters if p in self._sparse]
        self.tensors = [*(_reducible(p, self._halves) for p in self.parameters), *rows]
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.tensors.append(present)
        pieces = [piece for tensor in self.tensors for piece in _pieces(tensor)]
        self.handle = collectives.all_reduce(pieces, self.name)

    def finish(self) -> None:
        """Wait for the sums, and put them where they belong."""
        assert self.handle is not None
        self.handle.wait()
        *tensors, present = self.tensors
        rows = iter(tensors[len(self.parameters) :])
        for parameter, tensor, count in zip(self.parameters, tensors, present.tolist()):
            rows_of = next(rows) if parameter in self._sparse else None
            if not count:
                parameter.grad = None
            elif rows_of is not None and not rows_of[-1]:
                parameter.grad = _sparse(tensor.to(parameter.dtype), rows_of[:-1])
            else:
                _put(parameter, tensor)
        self.tensors, self.handle, self.is_reduced = [], None, True


class BucketSync:
    """All-reduces of buckets of gradients over the stage's replicas.

    Parameters fill fixed named buckets in backward order. A bucket's all-reduce starts when its last gradient
    has arrived, and those of the buckets before it have started where collectives are ordered. A replica
    without a gradient for a parameter adds zeros. Where no replica had one, `.grad` is None afterwards, so
    the optimizer skips the parameter as it does in one process.

    Args:
        parameters: all parameters of the stage, frozen ones included.
        replicas: communicator of the stage's replicas.
        collectives: over the same ranks; closed by `close`.
        compression: "fp16" sends and adds float32 gradients as float16, as Horovod's `Compression.fp16`.
        sparse: parameters whose gradients may be sparse. They travel as dense tensors with a count for each
            row and become sparse again, so the optimizer skips the same rows as in one process.
        late: parameters that several of the rank's stages use: no single backward completes their gradients.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        replicas: WatchedComm,
        collectives: Collectives,
        compression: str = NO_COMPRESSION,
        sparse: Collection[Tensor] = (),
        late: Collection[Tensor] = (),
    ) -> None:
        self._parameters, self._replicas, self._sparse = list(parameters), replicas, frozenset(sparse)
        self._collectives, self._late = collectives, frozenset(late)
        self._halves = COMPRESSIONS[compression] == 0.5
        self._armed = False
        self.overlaps = True  # False reduces nothing before `finish`, to measure the gain of overlapping
        self.bytes_reduced = 0
        self._hooks: list[Any] = []
        self.renew()

    def renew(self) -> None:
        """Build the buckets again from the parameters that require grad now. Collective over the replicas."""
        self._unhook()
        trained = [p for p in self._parameters if p.requires_grad]
        self._buckets = self._make_buckets(trained)
        self._filled_in_turn: list[Bucket] | None = [] if self._collectives.is_ordered else None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
            if parameter not in self._late and not bucket.waits  # `finish` reduces these
        ]

    def _make_buckets(self, trained: Sequence[Tensor]) -> list[Bucket]:
        early = [p for p in trained if p not in self._late]
        return self._filled(early) + self._filled([p for p in trained if p in self._late], "shared")

    def _filled(self, parameters: Sequence[Tensor], name: str = "bucket") -> list[Bucket]:
        buckets = enumerate(filled(parameters))
        return [Bucket(f"{name}{i}", members, self._sparse, self._halves) for i, members in buckets]

    def begin_final_backward(self) -> None:
        """Start reducing each bucket as soon as it is full."""
        self._armed = self.overlaps

    def end_final_backward(self) -> None:
        """Stop reducing buckets as they fill."""
        self._armed = False

    def finish(self, completes: bool = True) -> None:
        """Reduce the buckets that no backward has filled, and wait for all buckets."""
        due = [bucket for bucket in self._buckets if completes or not bucket.waits]
        for bucket in due:
            if not bucket.has_started:
                self._start(bucket)
        for bucket in due:
            if bucket.handle is not None:
                self._finish(bucket)
            bucket.reset()
        if completes and self._filled_in_turn is not None:
            self._order_buckets(self._filled_in_turn)
            self._filled_in_turn = None

    def _order_buckets(self, filled_in_turn: Sequence[Bucket]) -> None:
        """Put the buckets in the order in which the first replica's backward has filled them. Collective.

        Else one whose parameters get their gradients last, or none, would hold up all behind it.
        """
        names = self._replicas.bcast([bucket.name for bucket in filled_in_turn])
        turns = {name: turn for turn, name in enumerate(names)}
        self._buckets.sort(key=lambda bucket: turns.get(bucket.name, len(turns)))

    def close(self) -> None:
        """Remove the parameters' hooks and close the collectives. Collective over the replicas."""
        self._unhook()
        self._collectives.close()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: Bucket) -> Any:
        def arrived(parameter: Tensor) -> None:
            if not self._armed:
                return
            if bucket.has_started:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one backward, "
                    "after the all-reduce of the first had started; re-entrant activation checkpoints that "
                    "share a parameter do this: checkpoint with use_reentrant=False"
                )
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._full(bucket)

        return arrived

    def _full(self, bucket: Bucket) -> None:
        """Start a bucket that a backward has filled, or where order matters those whose turn it is."""
        if self._filled_in_turn is not None:
            self._filled_in_turn.append(bucket)
        for each in self._in_turn() if self._collectives.is_ordered else [bucket]:
            self._start(each)

    def _in_turn(self) -> Iterator[Bucket]:
        """Yield the full buckets that have not started, up to the first that is not full."""
        for each in self._buckets:
            if each.missing and not each.has_started:
                break
            if not each.has_started:
                yield each

    def _start(self, bucket: Bucket) -> None:
        bucket.start(self._collectives)
        self.bytes_reduced += bucket.num_bytes

    def _finish(self, bucket: Bucket) -> None:
        at = f"{self._buckets.index(bucket) + 1} of {len(self._buckets)}"
        with rank_status.waiting(
            f"{bucket.what} of {bucket.name} ({at}), {bucket.num_bytes} bytes", self._replicas.ranks
        ):
            bucket.finish()


def _reducible(parameter: Tensor, halve: bool) -> Tensor:
    """Return a parameter's gradient in the form that is reduced in place.

    It is dense and shares no memory with other tensors. Complex numbers become pairs, bf16 becomes fp32, and
    a missing gradient becomes zeros.
    """
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if halve and gradient.dtype == torch.float32:
        return gradient.half()
    if gradient.dtype == torch.bfloat16:
        return gradient.float()
    if gradient.numel() > MOST_ELEMENTS:
        gradient = gradient.contiguous()  # so that its pieces are views
    if gradient is parameter.grad and _shares_memory(gradient):
        gradient = parameter.grad = gradient.clone()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return what is reduced in place: the tensor, or views of it of at most MOST_ELEMENTS elements."""
    return [tensor] if tensor.numel() <= MOST_ELEMENTS else torch.split(tensor.view(-1), MOST_ELEMENTS)


def _put(parameter: Tensor, reduced: Tensor) -> None:
    """Write the reduced form of `_reducible` back into a parameter's gradient."""
    if parameter.is_complex():
        reduced = torch.view_as_complex(reduced)
    if parameter.grad is None or parameter.grad.layout != torch.strided:
        parameter.grad = reduced.to(parameter.dtype)
    elif reduced is not parameter.grad:
        parameter.grad.copy_(reduced)


def _rows(parameter: Tensor) -> Tensor:
    """Return 1 for each row that a sparse gradient has; the last element is 1 for a dense gradient."""
    counts = torch.zeros(len(parameter) + 1, device=parameter.device)
    if parameter.grad is not None and parameter.grad.is_sparse:
        counts[parameter.grad.coalesce().indices()[0]] = 1
    elif parameter.grad is not None:
        counts[-1] = 1
    return counts


def _sparse(dense: Tensor, counts: Tensor) -> Tensor:
    """Return the rows with a positive count as a sparse tensor."""
    rows = counts.nonzero().t()
    return torch.sparse_coo_tensor(
        rows, dense[rows[0]], dense.shape, is_coalesced=True, check_invariants=False
    )


def _shares_memory(gradient: Tensor) -> bool:
    """Return True if another tensor uses the gradient's storage and may still be read.

    For `x + position[None]` autograd makes both gradients from one tensor. An in-place sum for the parameter
    would then change the gradient that the rest of the backward reads. Torch has no public API for this; its
    CUDA graph trees use the same private call.
    """
    storage = gradient.untyped_storage()  # this object counts as one use more
    return uses_of_storage(storage) > 2


def filled(parameters: Sequence[Tensor], multiple: int = 1) -> list[list[Tensor]]:
    """Fill buckets in the reverse order of the parameters, which is about the order of the backward.

    Args:
        multiple: each bucket but the last has a multiple of as many parameters.
    """
    buckets, filling, size = [], list[Tensor](), 0
    for parameter in reversed(parameters):
        filling.append(parameter)
        size += parameter.nbytes
        if size >= BUCKET_BYTES and len(filling) % multiple == 0:
            buckets.append(filling)
            filling, size = [], 0
    return [*buckets, filling] if filling else buckets
