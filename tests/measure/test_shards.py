"""One of several shards, measured alone: layers with a part of the weights, and sums that send nothing."""

from dataclasses import astuple

import pytest
import torch
from pytest import approx

from hybridpipe.measure import turns
from hybridpipe.measure.layers import Rehearsal
from hybridpipe.measure.shards import CountedSums
from hybridpipe.model.layers import layers_of
from hybridpipe.training.planner.shards import first_shard, numbers_of_shards
from tests import blocks
from tests.mixtures import FEATURES, of_classes

SAMPLES = 6
PLAN = {f"*.{name}": style for name, style in blocks.OF_BLOCK.items()}


def adam(parameters):
    return torch.optim.Adam(parameters)


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(turns, "MAX_REPEATS", 3)
        yield profile_of_shards()


def profile_of_shards():
    torch.manual_seed(3)
    inputs, targets = torch.randn(SAMPLES, FEATURES), torch.randint(0, 3, (SAMPLES,))
    model = blocks.blocks()
    layers = layers_of(model, inputs, of_classes, targets)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parts = inputs, targets, of_classes
    splits = (first_shard(layers, PLAN, count, None) for count in (2, 4))
    shards = [Rehearsal(split, *parts, sums=sums) for split, sums in splits]
    found = Rehearsal(layers.copied(), *parts).measure(adam, sizes=[SAMPLES, 2], shards=shards)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return found


def test_the_profile_has_the_layers_of_every_number_of_shards_at_every_size(measured):
    assert measured.tensors == (1, 2, 4)
    assert [measured.split_over(t).sizes for t in (1, 2, 4)] == [(2, SAMPLES)] * 3
    assert measured.state_factor == approx(2)
    whole, half = measured.layers[1], measured.split_over(2).layers[1]
    # Two pairs of linear layers of a block: halves of 6×16, 16, 16×6, 6×16, 16 and 8×6; the rest is whole.
    parts = 4 * (6 * 16 + 16 + 16 * 6 + 6 * 16 + 16 + 8 * 6)
    assert whole.parameter_bytes - half.parameter_bytes == parts / 2
    assert half.output_bytes == whole.output_bytes and half.forward_seconds > 0
    assert half.largest_bytes == 6 * 8 * 4 and whole.largest_bytes == 6 * 16 * 4


def test_sums_are_counted_with_their_bytes(measured):
    """A block sums two outputs of its rows, and gradients: of two inputs, and of the norm between."""
    row = 4 * blocks.WIDTH
    for size in (SAMPLES, 2):
        halves = measured.scaled_to(size).split_over(2)
        forward, backward, forward_bytes, backward_bytes = astuple(halves.layers[1].sums)
        assert (forward, forward_bytes) == (2, 2 * row * size)
        assert (backward, backward_bytes) == (2 + 2, 2 * row * size + 2 * 4 * 4)
    assert {each.sums for each in measured.layers} == {None}


@pytest.mark.parametrize("most, expected", [(1, []), (2, [2]), (3, [2]), (8, [2, 4, 8]), (16, [2, 4, 8])])
def test_shards_are_powers_of_two_that_divide_every_weight(most, expected):
    """Four divide the gate and the value of 8 columns each in a packed weight, and so do eight."""
    model = blocks.blocks()
    assert numbers_of_shards(layers_of(model, None), PLAN, most) == expected


def test_a_sum_alone_has_the_shape_of_one_among_shards():
    sums, rows = CountedSums(4), torch.ones(3, 2)
    assert torch.equal(sums.sum(rows), rows) and sums.sum(rows) is not rows
    assert sums.gather(rows).shape == (3, 8)
    assert sums.taken() == (3, 2 * 24 + 4 * 24 // 2)
    assert torch.equal(sums.sum(rows.half()), 4 * rows.half()) and sums.taken() == (1, 4 * 12 // 2)
    assert sums.taken() == (0, 0)
