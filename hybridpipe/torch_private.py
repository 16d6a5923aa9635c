"""Names that torch keeps private, in one place, for what has no public name.

Tried with torch 2.13 and 2.14. Invariant: other modules name nothing that torch keeps private, but for three
that `tests/test_imports.py` lists.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

pytree, disable_current_modes = _pytree, _disable_current_modes
FAKE_TENSOR_LOG = FakeTensor.__module__  # the name of a logger
number_of = torch.ops.aten._local_scalar_dense.default  # the operator of `item()` and `float(tensor)`

# A recording sees the calls inside of a call, and those of a function that was bound before it.
DisableTorchFunction: Any = torch._C.DisableTorchFunction
EnableTorchFunction: Any = torch._C._EnableTorchFunction
top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
is_wrapped_by_transform: Any = torch._C._functorch.is_functorch_wrapped_tensor  # by vmap or grad
are_transforms_active: Any = torch._C._are_functorch_transforms_active

# Fused operations over many tensors: torch.nn.utils and torch.optim call them.
foreach_norm: Any = torch._foreach_norm
foreach_mul_: Any = torch._foreach_mul_

AnyBatchNorm = _BatchNorm  # of any number of dimensions
verify_batch_size: Any = torch.nn.functional._verify_batch_size  # type: ignore[attr-defined]  # raises the error of a BatchNorm that sees one value
will_run: Any = torch._C._will_engine_execute_node  # this backward runs the node
autograd: Any = torch._C._autograd
profiler: Any = torch._C._profiler  # sees each allocation


def uses_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the number of objects that use a tensor's memory; torch's CUDA graph trees ask so."""
    return int(torch._C._storage_Use_Count(storage._cdata))
