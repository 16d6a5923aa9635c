"""Real models at tiny size, at every candidate cut; skipped where the zoo or its libraries are missing."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridpipe.model.recording import Unsplittable, record
from hybridpipe.model.recording.records import SHARE

from .slicing import cut_places, difference, in_slices, own_forward, plain_forward

ZOO = Path(os.environ.get("ZOO", Path(__file__).parents[3] / "../shared/zoo.py"))
if not ZOO.exists():
    pytest.skip("there is no zoo.py beside the repository", allow_module_level=True)
_spec = importlib.util.spec_from_file_location("zoo", ZOO)
zoo = importlib.util.module_from_spec(_spec)
sys.modules["zoo"] = zoo
_spec.loader.exec_module(zoo)

REFUSED = {"layerdrop"}
NAMES = sorted(zoo.ZOO.keys() - REFUSED)


def case_of(name):
    """A case in float64."""

    def double(leaf):
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    try:
        case = zoo.ZOO[name]()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    if case is None:
        pytest.skip("torchvision is missing")
    inputs, targets = pytree.tree_map(double, (case.inputs, case.targets))
    return case._replace(model=case.model.double(), inputs=inputs, targets=targets)


def plans_of(made):
    """One cut at each candidate place, and all at once."""
    cuts = cut_places(made)
    return [*([cut] for cut in cuts), cuts]


@pytest.mark.parametrize("name", NAMES)
def test_training(name):
    case = case_of(name)
    case.model.train()
    made = record(case.model, case.inputs, training=True, loss=case.loss, targets=case.targets, share=SHARE)

    def loss(out):
        return case.loss(out, case.targets)

    expected = own_forward(made, case.model, case.inputs, loss)
    for cuts in plans_of(made):
        assert difference(in_slices(made, cuts, case.model, case.inputs, loss), expected) is None, cuts


@pytest.mark.parametrize("name", NAMES)
def test_evaluation(name):
    case = case_of(name)
    made = record(case.model, case.inputs, training=False, share=SHARE)
    case.model.eval()

    def loss(out):
        return case.loss(out, case.targets)

    with torch.no_grad():
        expected = plain_forward(case.model, case.inputs, loss, backward=False)
        for cuts in plans_of(made):
            got = in_slices(made, cuts, case.model, case.inputs, loss, backward=False)
            assert difference(got, expected) is None, cuts


def test_layerdrop_is_refused_with_its_line():
    case = case_of("layerdrop")
    with pytest.raises(Unsplittable, match=r"^zoo.py:\d+: item reads data that only one stage has .*$"):
        record(case.model, case.inputs, training=True)
