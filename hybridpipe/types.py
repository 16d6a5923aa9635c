"""Types that several packages share: the functions that users pass in, and agreement on a number.

Knows torch only; holds no behaviour.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over the samples, a tensor of one number
OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Agree = Callable[[float], float]  # this rank's number -> the largest of all ranks' numbers; collective
