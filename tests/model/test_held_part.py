"""The parts of a parameter are slices along one dimension, of each weight that it packs."""

import pytest
import torch
from torch import nn

from hybridpipe.model.held_part import HeldPart, held_part, part_of, whole_forms


def counted(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(torch.Size(sizes).numel(), dtype=torch.float64).reshape(sizes))


SIZES = [((4,), 0), ((4, 3), 0), ((8, 2, 3), 0), ((4, 1, 1, 2), 0), ((3, 4), 1), ((2, 4, 3), 1), ((2, 8), 1)]


@pytest.mark.parametrize("sizes, dim", SIZES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_joined_again_are_the_whole(sizes, dim, count):
    whole, joined = counted(*sizes).detach(), torch.full(sizes, -1.0, dtype=torch.float64)
    parts = HeldPart(whole.shape, "shard", 0, count, dim).all_parts
    for i, part in enumerate(parts):
        own = part.of(whole)
        assert part.is_possible and own.shape == part.shape and own.is_contiguous()
        assert torch.equal(own, whole.chunk(count, dim)[i])
        part.put(joined, own)
    assert torch.equal(joined, whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_of_packed_weights_each_is_cut(dim):
    gate, up = counted(4, 4).detach(), -counted(4, 4).detach()
    whole = torch.cat([gate, up], dim)
    joined = torch.zeros_like(whole)
    for i, part in enumerate(HeldPart(whole.shape, "shard", 0, 2, dim, packs=2).all_parts):
        own = part.of(whole)
        assert torch.equal(own, torch.cat([each.chunk(2, dim)[i] for each in (gate, up)], dim))
        part.put(joined, own)
    assert torch.equal(joined, whole)


@pytest.mark.parametrize("index, count, dim, packs", [(2, 2, 0, 1), (0, 0, 0, 1), (0, 2, 2, 1), (0, 4, 0, 2)])
def test_some_parts_no_parameter_has(index, count, dim, packs):
    assert not HeldPart(torch.Size([4, 4]), "shard", index, count, dim, packs).is_possible


def test_a_part_is_a_copy():
    whole = counted(4, 3).detach()
    own = HeldPart(whole.shape, "replica", 1, 2).of(whole)
    own += 1
    assert torch.equal(whole, counted(4, 3))
    assert own.untyped_storage().nbytes() == own.nbytes


def test_a_part_of_what_is_not_contiguous_is_in_the_order_of_its_indices():
    whole = counted(3, 4).detach().T
    part = HeldPart(whole.shape, "replica", 1, 2)
    assert torch.equal(part.of(whole), whole[2:])


def test_a_part_is_written_on_its_parameter():
    whole = counted(4, 3)
    whole.rate = 0.5
    part = HeldPart(whole.shape, "replica", 1, 4)
    own = part_of(whole, whole.detach(), part)
    assert held_part(own) == part and own.rate == 0.5
    assert isinstance(own, nn.Parameter) and own.is_leaf and own.requires_grad
    assert held_part(whole) is None and held_part(own.detach()) is None and held_part(torch.ones(2)) is None
    assert not part_of(whole.requires_grad_(False), whole, part).requires_grad


def test_the_whole_form_of_a_part_is_on_the_meta_device():
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.BatchNorm1d(4))
    before = {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()}
    weight = model[0].weight
    model[0].weight = part_of(weight, weight.detach(), HeldPart(weight.shape, "replica", 0, 2))
    forms = whole_forms(model)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in forms.items()} == before
    assert list(forms) == list(before)
    assert [key for key, tensor in forms.items() if tensor.is_meta] == ["0.weight"]
    assert model[0].weight.shape == (2, 3)
