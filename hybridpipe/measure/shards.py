"""Shards, measured: the sums of one shard that computes alone, which send nothing and are counted.

Knows tensors; no ranks and no modules. Invariant: a sum has the shape that it has among shards, and this rank
is as busy with it, but for the messages.
"""

import torch
from torch import Tensor


class CountedSums:
    """Takes the place of `comm.sums.TensorSums` for a shard whose others are not there.

    Args:
        size: number of shards; this is the first.
    """

    index = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self._count = self._num_bytes = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        if tensor.dtype.itemsize < 4:  # joined, and added up in float32
            return self._joined(tensor).sum(0, dtype=torch.float32).to(tensor.dtype).to(tensor.device)
        self._note(tensor.nbytes)
        total = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return total.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return copies, one after the other along the last dimension."""
        return torch.cat(list(self._joined(tensor)), -1).to(tensor.device)

    def _joined(self, tensor: Tensor) -> Tensor:
        self._note(tensor.nbytes * self.size // 2)
        own = tensor.detach().cpu()
        return torch.stack([own] * self.size)

    def _note(self, num_bytes: int) -> None:
        self._count += 1
        self._num_bytes += num_bytes

    def taken(self) -> tuple[int, int]:
        """Return the number of sums since the last call, and their bytes as in `SumsProfile`."""
        found = self._count, self._num_bytes
        self._count = self._num_bytes = 0
        return found
