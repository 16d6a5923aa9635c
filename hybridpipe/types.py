"""Types that several packages share: functions that users pass in, and agreement between ranks.

Only torch is known here; there is no behaviour.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over the samples, a tensor of one number
OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Agree = Callable[[float], float]  # maximum over all measuring ranks; also a barrier
