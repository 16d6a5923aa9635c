"""A stopwatch for measurements that are the same on any machine."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridpipe.measure.stopwatch import Took

MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm_.default,
}


class CountingStopwatch(TorchDispatchMode):
    """A stopwatch that counts operations, so that a figure is the same on any machine under any load.

    A matrix product counts its multiplications, a view nothing, and any other operation the elements of its
    result, or of its arguments where it has no result, as a fused optimizer's step.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.count = 0
        self.__enter__()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            leaves = tree_leaves(args if result is None else result)
            elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.count += elements * (len(args[-1]) if operation in MATRIX_PRODUCTS else 1)
        return result

    def now(self) -> Took:
        return Took(self.count)

    def since(self, began: Took) -> Took:
        return Took(self.count - began.seconds)

    def read(self, laps):
        return laps

    def close(self) -> None:
        self.__exit__(None, None, None)
