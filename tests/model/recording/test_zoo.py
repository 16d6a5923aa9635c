"""Real models at tiny size, at every candidate cut."""

import pytest
import torch

from hybridpipe.model.recording import Unsplittable, record
from hybridpipe.model.recording.records import SHARE
from tests import zoo

from .slicing import cut_places, difference, in_slices, own_forward


def plans_of(made):
    """One cut at each candidate place, and all at once."""
    cuts = cut_places(made)
    return [*([cut] for cut in cuts), cuts]


@pytest.mark.parametrize("name", zoo.SPLIT)
def test_training(name):
    case = zoo.case_of(name)
    case.model.train()
    made = record(case.model, case.inputs, training=True, loss=case.loss, targets=case.targets, share=SHARE)

    def loss(out):
        return case.loss(out, case.targets)

    expected = own_forward(case.model, case.inputs, loss, made.opened)
    for cuts in plans_of(made):
        got = in_slices(made, cuts, case.model, case.inputs, loss)
        assert difference(got, expected, zoo.tolerance(name)) is None, cuts


@pytest.mark.parametrize("name", zoo.SPLIT)
def test_evaluation(name):
    case = zoo.case_of(name)
    made = record(case.model, case.inputs, training=False, share=SHARE)
    case.model.eval()

    def loss(out):
        return case.loss(out, case.targets)

    with torch.no_grad():
        expected = own_forward(case.model, case.inputs, loss, backward=False)
        for cuts in plans_of(made):
            got = in_slices(made, cuts, case.model, case.inputs, loss, backward=False)
            assert difference(got, expected, zoo.tolerance(name)) is None, cuts


@zoo.needs("layerdrop")
def test_layerdrop_is_refused_with_its_line():
    case = zoo.case_of("layerdrop")
    with pytest.raises(Unsplittable, match=r"^zoo.py:\d+: item reads data that only one stage has .*$"):
        record(case.model, case.inputs, training=True)
