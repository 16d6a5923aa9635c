"""Reads: which tensors of a forward a loss looks at.

Knows tensors by identity only.
Invariant: a loss under it computes what it computes without.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridpipe.model.recording.events import LossReadsForward, line_of_forward
from hybridpipe.model.tensors import tensors_in


class LossReads(TorchFunctionMode):
    """Refuses the use of tensors that a forward has made but not returned: behind it they would be stale."""

    def __init__(self, made: Callable[[Tensor], bool], returned: Any) -> None:
        """Watch a loss.

        Args:
            made: says for a tensor if the forward has made it.
            returned: what the loss may read.
        """
        super().__init__()
        self._made, self._returned = made, set(map(id, tensors_in(returned)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function if its arguments are allowed."""
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self._returned and self._made(tensor):
                line = line_of_forward()
                what = "the loss reads a tensor that the forward makes but does not return (return it)"
                raise LossReadsForward(f"{line}: {what}")
        return func(*args, **(kwargs or {}))
