"""GradientSync: gradients summed over a stage's replicas while the last backward is still running.

Each microbatch's loss is weighted by its share of the minibatch's samples, so the sum over microbatches
and replicas is the mean over the minibatch, however unevenly they are spread. Parameters are gathered
into fixed named buckets in backward order; a bucket's all-reduce starts when its last gradient is there,
and Horovod's tensor fusion joins the bucket's tensors. A stage with one replica loads no Horovod.
"""

import os
import time
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hybridpipe.comm.status import rank_status
from hybridpipe.errors import UserError
from hybridpipe.planning.cluster import COMPRESSIONS, NO_COMPRESSION
from hybridpipe.planning.cost.formula import BUCKET_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

# Between two looks at an all-reduce. Horovod's own wait yields and looks again at once: with four ranks on
# two cores up to 15 % of a core a rank, taken from those that still computed and from Horovod's own threads.
POLL_SECONDS = 200e-6

CYCLE_TIME = "HOROVOD_CYCLE_TIME"  # milliseconds between two looks of Horovod's thread for something to do
FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"  # bytes


class GradientSync(Protocol):
    """Sums the gradients over a stage's replicas."""

    bytes_reduced: int

    @property
    def owned(self) -> Sequence[Tensor]:
        """The parameters whose gradients this rank has, and whose update it makes, after `finish`."""

    def renew(self) -> None:
        """Take up which parameters are trained now. Collective over the replicas, with nothing under way."""

    def begin_final_backward(self) -> None:
        """The next backward is the last of its stage: its gradients are final as they arrive."""

    def end_final_backward(self) -> None:
        """That backward is done."""

    def close(self) -> None:
        """Give back what summing takes. Collective over the replicas."""

    def finish(self) -> None:
        """Return once the `.grad` of every owned parameter holds the sum over the replicas."""


class _Bucket:
    """Parameters that are reduced together, with a flag each: did this replica have a gradient?"""

    def __init__(self, name: str, parameters: list[Tensor]) -> None:
        self.name, self.parameters = name, parameters
        self.missing = set(parameters)
        self.tensors: list[Tensor] = []
        self.handle: Any = None


class HorovodSync:
    """Horovod's ring all-reduce over the stage's communicator.

    A replica that had no gradient for a parameter adds zeros, as one that got no microbatch does; where no
    replica had one, `.grad` is None afterwards, as in one process, so that the optimizer passes it by.
    Horovod starts with the first parameter that is trained.

    Args:
        parameters: of the stage, those that are not trained, too.
        sparse: those whose gradients may be sparse. They travel as dense tensors with a count for each row,
            and are sparse again afterwards: the optimizer passes by the same rows as in one process.
        compression: "fp16": float32 gradients travel, and are added up, as float16, as with Horovod's
            `Compression.fp16`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        replicas: "MPI.Comm",
        compression: str = NO_COMPRESSION,
        sparse: Collection[Tensor] = (),
    ) -> None:
        self._parameters, self._replicas, self._sparse = list(parameters), replicas, frozenset(sparse)
        self._ranks = getattr(replicas, "ranks", ())  # in the world, for reports
        self._halves = COMPRESSIONS[compression] == 0.5
        self._armed = False
        self.overlaps = True  # False: nothing is reduced before `finish`, to see what overlapping gives
        self.bytes_reduced = 0
        self._hvd: Any = None
        self._hooks: list[Any] = []
        self.renew()

    @property
    def owned(self) -> Sequence[Tensor]:
        """All of the stage's parameters: an all-reduce leaves the whole sum on each replica."""
        return self._parameters

    def renew(self) -> None:
        """Fill buckets again, with the parameters that require grad now."""
        self._unhook()
        self._buckets = _buckets([p for p in self._parameters if p.requires_grad])
        if self._buckets and self._hvd is None:
            with rank_status.waiting("Horovod's start", self._ranks):
                self._hvd = horovod(self._replicas)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def begin_final_backward(self) -> None:
        """From now on a bucket is reduced as soon as it is full."""
        self._armed = self.overlaps

    def end_final_backward(self) -> None:
        """Until further notice no gradient is final."""
        self._armed = False

    def finish(self) -> None:
        """Reduce what no backward has filled, and wait for all."""
        for bucket in self._buckets:
            if bucket.handle is None:
                self._start(bucket)
        for i, bucket in enumerate(self._buckets, start=1):
            num_bytes = sum(tensor.nbytes for tensor in bucket.tensors)
            what = f"all-reduce of {bucket.name} ({i} of {len(self._buckets)}), {num_bytes} bytes"
            with rank_status.waiting(what, self._ranks):
                self._finish(bucket)

    def close(self) -> None:
        """Take the hooks off the parameters and end the stage's Horovod world. Collective over its ranks."""
        self._unhook()
        if self._hvd is not None:
            self._hvd.shutdown()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: _Bucket) -> Any:
        def arrived(parameter: Tensor) -> None:
            if not self._armed:
                return
            if bucket.handle is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one backward, "
                    "when replicas had begun to sum the first, as where re-entrant checkpoints share it: "
                    "checkpoint with use_reentrant=False"
                )
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._start(bucket)

        return arrived

    def _start(self, bucket: _Bucket) -> None:
        present = torch.tensor([float(p.grad is not None) for p in bucket.parameters])
        rows = [_rows(p) for p in bucket.parameters if p in self._sparse]
        bucket.tensors = [*(_reducible(p, self._halves) for p in bucket.parameters), *rows]
        self.bytes_reduced += sum(tensor.nbytes for tensor in bucket.tensors)
        bucket.tensors.append(present)
        bucket.handle = self._hvd.grouped_allreduce_async_(bucket.tensors, name=bucket.name, op=self._hvd.Sum)

    def _finish(self, bucket: _Bucket) -> None:
        wait_for(self._hvd, bucket.handle)
        *tensors, present = bucket.tensors
        rows = iter(tensors[len(bucket.parameters) :])
        for parameter, tensor, count in zip(bucket.parameters, tensors, present.tolist()):
            rows_of = next(rows) if parameter in self._sparse else None
            if not count:
                parameter.grad = None
            elif rows_of is not None and not rows_of[-1]:
                parameter.grad = _sparse(tensor.to(parameter.dtype), rows_of[:-1])
            else:
                _put(parameter, tensor)
        bucket.missing, bucket.tensors, bucket.handle = set(bucket.parameters), [], None


def _reducible(parameter: Tensor, halve: bool) -> Tensor:
    """The gradient as Horovod takes it.

    In memory of its own, dense, complex numbers as pairs, fp32 for bf16, zeros where there is none.
    """
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if halve and gradient.dtype == torch.float32:
        return gradient.half()
    if gradient.dtype == torch.bfloat16:
        return gradient.float()
    if gradient is parameter.grad and _shares_memory(gradient):
        gradient = parameter.grad = gradient.clone()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _put(parameter: Tensor, reduced: Tensor) -> None:
    """Let a parameter's gradient be what `_reducible` has become."""
    if parameter.is_complex():
        reduced = torch.view_as_complex(reduced)
    if parameter.grad is None or parameter.grad.layout != torch.strided:
        parameter.grad = reduced.to(parameter.dtype)
    elif reduced is not parameter.grad:
        parameter.grad.copy_(reduced)


def _rows(parameter: Tensor) -> Tensor:
    """A count for each row that a sparse gradient has; the last is of gradients that are dense."""
    counts = torch.zeros(len(parameter) + 1)
    if parameter.grad is not None and parameter.grad.is_sparse:
        counts[parameter.grad.coalesce().indices()[0]] = 1
    elif parameter.grad is not None:
        counts[-1] = 1
    return counts


def _sparse(dense: Tensor, counts: Tensor) -> Tensor:
    """The rows of a tensor that have a count."""
    rows = counts.nonzero().t().to(dense.device)
    return torch.sparse_coo_tensor(
        rows, dense[rows[0]], dense.shape, is_coalesced=True, check_invariants=False
    )


def _shares_memory(gradient: Tensor) -> bool:
    """Whether another tensor has the same memory, and may still be read.

    Of `x + position[None]` autograd makes both gradients from one tensor: summed in place for the parameter,
    what the backward goes on with would be the sum of all replicas. Torch has no public way to ask; its CUDA
    graph trees ask in this one.
    """
    storage = gradient.untyped_storage()  # which is one use more
    return torch._C._storage_Use_Count(storage._cdata) > 2


def _buckets(parameters: list[Tensor]) -> list[_Bucket]:
    """Backward order is about the reverse of the forward order."""
    buckets, filling, filled = [], [], 0
    for parameter in reversed(parameters):
        filling.append(parameter)
        filled += parameter.nbytes
        if filled >= BUCKET_BYTES:
            buckets.append(filling)
            filling, filled = [], 0
    if filling:
        buckets.append(filling)
    return [_Bucket(f"bucket{i}", members) for i, members in enumerate(buckets)]


def wait_for(hvd: Any, handle: int) -> None:
    """The end of an all-reduce, asleep between looks, as others can use what Horovod's wait burns."""
    while not hvd.poll(handle):
        time.sleep(POLL_SECONDS)
    hvd.synchronize(handle)


def horovod(communicator: "MPI.Comm") -> Any:
    """`horovod.torch`, its world being `communicator`. Collective over it.

    A world of its own for every stage: with Horovod's process sets all stages share one negotiation loop,
    and a stall in one stalls all (measured: 2.5 s against 0.1 s).
    """
    from hybridpipe.health import failure

    try:
        import horovod.torch as hvd
    except ImportError as error:
        why = f"Horovod, which is missing ({str(error).splitlines()[0]})"
        raise UserError(f"replicated stages need {why}: hybridpipe setup") from error
    if hvd.is_initialized():
        hvd.shutdown()
    # A tensor that is larger than this is reduced where it lies. By default Horovod joins up to 128 MiB and
    # copies all of it in and out: two ranks took 64 ms for three weights of 16 MiB, and 22 ms without that.
    # But Horovod 0.28.1 crashes when it is started for the second time with both this and a cycle time set.
    if CYCLE_TIME not in os.environ:
        os.environ.setdefault(FUSION_THRESHOLD, str(BUCKET_BYTES))
    elif FUSION_THRESHOLD not in os.environ:
        _start_once(hvd)
    hvd.init(comm=communicator)
    failure.look_first_at_exit()
    return hvd


@cache
def _start_once(hvd: Any) -> None:
    """So that whatever follows is not this process's first start.

    With a cycle time set, Horovod 0.28.1 joins up to 128 MiB when first started, and 1 MiB from then on:
    its `ParameterManager` outlives `shutdown`, and writes the default of 1 ms into the wrong place. Each rank
    joins what its cache knows by itself; so ranks of which only some had been in the probe of the first host
    reduced different numbers of bytes, and waited forever or wrote past the end.
    """
    from hybridpipe.comm.mpi import MPI

    hvd.init(comm=MPI.COMM_SELF)
    hvd.shutdown()
