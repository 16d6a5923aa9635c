"""A part of a parameter is a range of its elements, whole along all dimensions but the first."""

import pytest
import torch
from torch import nn

from hybridpipe.model.held_part import HeldPart, held_part, part_of, whole_forms


def counted(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(torch.Size(sizes).numel(), dtype=torch.float64).reshape(sizes))


@pytest.mark.parametrize("sizes", [(4,), (4, 3), (8, 2, 3), (4, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_joined_again_are_the_whole(sizes, count):
    whole, joined = counted(*sizes).detach(), torch.full(sizes, -1.0, dtype=torch.float64)
    parts = [HeldPart.along_first(whole.shape, i, count) for i in range(count)]
    assert [each.elements.start for each in parts] == [i * whole.numel() // count for i in range(count)]
    for i, part in enumerate(parts):
        own = part.of(whole)
        assert own.shape == part.shape and torch.equal(own, whole.chunk(count)[i])
        part.put(joined, own.reshape(-1) if i else own)  # as it is on its way
    assert torch.equal(joined, whole)


def test_a_part_is_a_copy():
    whole = counted(4, 3).detach()
    own = HeldPart.along_first(whole.shape, 1, 2).of(whole)
    own += 1
    assert torch.equal(whole, counted(4, 3))
    assert own.untyped_storage().nbytes() == own.nbytes


def test_a_part_of_what_is_not_contiguous_is_in_the_order_of_its_indices():
    whole = counted(3, 4).detach().T
    part = HeldPart.along_first(whole.shape, 1, 2)
    assert torch.equal(part.of(whole), whole[2:])


def test_a_part_is_written_on_its_parameter():
    whole = counted(4, 3)
    whole.rate = 0.5
    part = HeldPart.along_first(whole.shape, 1, 4)
    own = part_of(whole, whole.detach(), part)
    assert held_part(own) == part and own.rate == 0.5
    assert isinstance(own, nn.Parameter) and own.is_leaf and own.requires_grad
    assert held_part(whole) is None and held_part(own.detach()) is None and held_part(torch.ones(2)) is None
    assert not part_of(whole.requires_grad_(False), whole, part).requires_grad


def test_the_whole_form_of_a_part_is_on_the_meta_device():
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.BatchNorm1d(4))
    before = {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()}
    weight = model[0].weight
    model[0].weight = part_of(weight, weight.detach(), HeldPart.along_first(weight.shape, 0, 2))
    forms = whole_forms(model)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in forms.items()} == before
    assert list(forms) == list(before)
    assert [key for key, tensor in forms.items() if tensor.is_meta] == ["0.weight"]
    assert model[0].weight.shape == (2, 3)
