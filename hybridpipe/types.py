"""Types that several packages share: the functions that users pass in, and agreement on a number.

Knows torch only; holds no behaviour.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# (outputs, targets) -> a tensor of one number, the mean over the samples; or a pair (sum, weight), such as
# the sum over the tokens that are not padding and their number. A weight is >= 0 and has no gradient.
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
# Of parameters, or of pairs (name, parameter); several optimizers each have their own parameters.
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer | Iterable[torch.optim.Optimizer]]
Collate = Callable[[list[Any]], Any]  # the samples of a microbatch -> (inputs, targets), or a dict for both
Agree = Callable[[float], float]  # this rank's number -> the largest of all ranks' numbers; collective
