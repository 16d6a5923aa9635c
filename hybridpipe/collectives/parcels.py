"""Parcels: small tensors are summed together in one buffer, large ones where they are.

Not known here: how they are summed. Invariant: ranks with tensors of the same shapes make the same parcels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Of a large tensor. To copy one in and out of a buffer takes about as long as to sum it within a host, and to
# sum a small one takes about as long as to start.
LARGE_BYTES = 2**18


class Parcel(NamedTuple):
    """Tensors of one type that are summed as one, and their numbers one after the other."""

    tensors: Sequence[Tensor]
    content: Tensor

    def unpack(self, content: Tensor) -> None:
        """Put numbers in the order of `content` where the tensors have theirs."""
        at = 0
        for tensor in self.tensors:
            part = content[at : at + tensor.numel()].view(tensor.shape)
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part)
            at += tensor.numel()


def parcels_of(tensors: Sequence[Tensor]) -> list[Parcel]:
    """Return a parcel for each large tensor and one for all small ones of a type.

    That of a large tensor has its memory if it is contiguous.
    """
    plain = [tensor.detach() for tensor in tensors if tensor.numel()]
    large = [tensor for tensor in plain if tensor.nbytes >= LARGE_BYTES]
    small = [tensor for tensor in plain if tensor.nbytes < LARGE_BYTES]
    types = dict.fromkeys(tensor.dtype for tensor in small)
    of_types = ([tensor for tensor in small if tensor.dtype == dtype] for dtype in types)
    alone = [Parcel([tensor], tensor.contiguous().view(-1)) for tensor in large]
    return alone + [Parcel(each, torch.cat([tensor.reshape(-1) for tensor in each])) for each in of_types]
