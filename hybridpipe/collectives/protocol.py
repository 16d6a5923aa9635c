"""Collectives: the protocol by which a stage's replicas sum gradients and gather weights.

Knows no parameters, MPI or Horovod. Invariant: replicas start the collectives of `is_ordered` ones in one
order; those of others they match by name.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Handle(Protocol):
    """A collective in progress."""

    def wait(self) -> Sequence[Tensor]:
        """Return the results once they are there; raise what went wrong."""


class Collectives(Protocol):
    """The collectives of a group of ranks. Each is started by all of them, with tensors of one shape.

    Args:
        is_ordered: all ranks must start collectives in the same order.
    """

    is_ordered: bool

    def all_reduce(self, tensors: Sequence[Tensor], name: str) -> Handle:
        """Start to sum each tensor in place over the ranks.

        Args:
            tensors: floating-point, of at most MOST_ELEMENTS elements each; of a CPU or this rank's device.
            name: the same on all ranks; of no other collective in progress.
        """

    def reduce_scatter(self, rows: Tensor, name: str) -> Handle:
        """Start to sum rows, one for each rank, over the ranks; the one result is this rank's, as a matrix.

        Args:
            rows: a contiguous floating-point matrix, which may be overwritten.
            name: as for `all_reduce`.
        """

    def all_gather(self, weights: Tensor) -> Handle:
        """Start to fill a tensor of one equal share for each rank, of which this rank's is there.

        Args:
            weights: contiguous, of one dimension; a share has a multiple of 8 bytes.
        """

    def close(self) -> None:
        """Release threads and connections. Collective."""
