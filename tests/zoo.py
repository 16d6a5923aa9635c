"""Real models at tiny size, of zoo.py in the folder shared/ beside the repository, or where ZOO says.

Nothing is known here of records and plans.
Invariant: a case is skipped only where the file or a library that it needs is missing, and says which.
"""

import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.libraries import missing

PATH = Path(os.environ.get("ZOO", Path(__file__).parents[2] / "shared/zoo.py"))
LIBRARIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bert", "gpt2", "gpt2_padded", "llama", "t5", "vit"), ("transformers",)),
    **dict.fromkeys(("densenet121", "resnet50"), ("torchvision",)),
    "convnext": ("timm", "torchvision"),
}
REFUSED = {"layerdrop"}  # its path follows from random numbers and from activations
TIED = {"gpt2", "gpt2_padded", "t5"}
IN_FLOAT32 = {"autocast"}  # which leaves float64 as it is
STATISTICS = {"resnet50", "densenet121", "batchnorm"}  # BatchNorm takes no single value
OTHER_SIZE = {"length": 9, "size": 64}  # of sequences and images


def _load() -> dict[str, Any]:
    if not PATH.exists():
        return {}
    spec = importlib.util.spec_from_file_location("zoo", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ZOO


CASES = _load()


def needs(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test that builds these cases, which skips it where they cannot be built."""
    absent = missing(*sorted({library for name in names for library in LIBRARIES.get(name, ())}))
    reason = absent if CASES else f"needs {PATH}, which is not there"
    return pytest.mark.skipif(reason is not None, reason=str(reason))


# A parameter for each case that is split; without the file one that is skipped.
SPLIT = [pytest.param(name, marks=needs(name)) for name in sorted(CASES.keys() - REFUSED) or ["any"]]


def case_of(name: str, **options: Any) -> Any:
    """Return a case in float64, or in float32 if it needs that."""
    case = CASES[name](**options)
    if name in IN_FLOAT32:
        return case
    inputs, targets = pytree.tree_map(_double, (case.inputs, case.targets))
    return case._replace(model=case.model.double(), inputs=inputs, targets=targets)


def minibatches(name: str) -> list[tuple[Any, Any, int]]:
    """Return inputs, targets and the size of a microbatch: 3, 3, 2 samples; another shape; one by one."""
    taken = inspect.signature(CASES[name]).parameters
    other = {option: value for option, value in OTHER_SIZE.items() if option in taken}
    first, second = case_of(name, batch=8), case_of(name, batch=5, seed=1, **other)
    found = [(first.inputs, first.targets, 3), (second.inputs, second.targets, 3)]
    if name not in STATISTICS:
        third = case_of(name, batch=2, seed=2)
        found.append((third.inputs, third.targets, 1))
    return found


def tolerance(name: str) -> float:
    """Return how far results may lie apart."""
    return 1e-5 if name in IN_FLOAT32 else 1e-10


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
