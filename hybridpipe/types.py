"""Types that several packages share: what users hand in as functions, and how ranks agree on a number.

Knows torch only; holds no behaviour.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over the samples, a tensor of one number
OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Agree = Callable[[float], float]  # the largest of all measuring ranks' numbers; a barrier, too
