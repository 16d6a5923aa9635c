"""Large tensors are summed where they are, small ones in one buffer a type."""

import torch

from hybridpipe.collectives import parcels
from hybridpipe.collectives.parcels import parcels_of


def test_only_small_tensors_are_copied(monkeypatch):
    monkeypatch.setattr(parcels, "LARGE_BYTES", 40)
    large, across = torch.ones(10), torch.ones(4, 5).t()
    small, none = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(2, 2)], torch.ones(0)
    found = parcels_of([small[0], large, none, *small[1:], across])
    assert [len(each.tensors) for each in found] == [1, 1, 2, 1]
    assert found[0].content.data_ptr() == large.data_ptr()
    for each in found:
        each.unpack(2 * each.content)
    assert all(tensor.eq(2).all() for tensor in [large, across, *small])
