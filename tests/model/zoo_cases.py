"""Real models at tiny size from zoo.py beside the repository, where it is; without it NAMES is empty."""

import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

ZOO = Path(os.environ.get("ZOO", Path(__file__).parents[2] / "../shared/zoo.py"))
REFUSED = {"layerdrop"}
IN_FLOAT32 = {"autocast"}  # which leaves float64 as it is
STATISTICS = {"resnet50", "densenet121", "batchnorm"}  # BatchNorm takes no single value
OTHER_SIZE = {"length": 9, "size": 64}  # of sequences and images


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("zoo", ZOO)
    assert spec is not None and spec.loader is not None
    zoo = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    return zoo


zoo = _load() if ZOO.exists() else None
NAMES = sorted(zoo.ZOO.keys() - REFUSED) if zoo else []


def case_of(name: str, **options: Any) -> Any:
    """Return a case in float64; skip the test where its libraries are missing."""
    try:
        case = zoo.ZOO[name](**options)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    if case is None:
        pytest.skip("torchvision is missing")
    if name in IN_FLOAT32:
        return case
    inputs, targets = pytree.tree_map(_double, (case.inputs, case.targets))
    return case._replace(model=case.model.double(), inputs=inputs, targets=targets)


def minibatches(name: str) -> list[tuple[Any, Any, int]]:
    """Return inputs, targets and the size of a microbatch: 3, 3, 2 samples; another shape; one by one."""
    taken = inspect.signature(zoo.ZOO[name]).parameters
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
