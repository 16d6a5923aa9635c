"""MPI's collectives of tensors on a GPU, over the stand-in whose copies come late."""

import pytest
import torch

from hybridpipe.collectives.all_gather import all_gather
from hybridpipe.collectives.mpi import MpiCollectives
from hybridpipe.collectives.parcels import LARGE_BYTES
from hybridpipe.comm.mpi import MPI
from tests.late_cuda import LateLanes


class OwnMemory(LateLanes):
    """Lanes of a GPU with memory of its own, which MPI cannot read."""

    def is_here(self, tensor: torch.Tensor) -> bool:
        return self.cuda._is_on_device(tensor)


def computed(lanes: LateLanes, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers that the device computes late."""
    tensor = lanes.empty(numbers.nbytes).view(numbers.dtype).view(numbers.shape)
    return tensor.copy_(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_a_gpu_are_summed_once_they_are_computed(dtype):
    """They are large: small ones are joined on the device, and only copies are late in the stand-in."""
    lanes = OwnMemory()
    with lanes.cuda:
        collectives = MpiCollectives(MPI.COMM_SELF, lanes, all_gather)
        numbers = [torch.arange(LARGE_BYTES, dtype=dtype), torch.ones(512, 512, dtype=dtype)]
        gradients = [computed(lanes, each) for each in numbers]
        summed = collectives.all_reduce(gradients, "bucket0").wait()
        lanes.synchronize()
        assert all(torch.equal(*each) for each in zip(summed, numbers, strict=True))
        assert all(lanes.is_here(tensor) for tensor in summed)
        collectives.close()
    assert lanes.cuda.mistakes == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_gpu_are_exchanged_once_they_are_computed(dtype):
    lanes, numbers = OwnMemory(), torch.arange(8, dtype=dtype).view(1, 8)
    with lanes.cuda:
        collectives = MpiCollectives(MPI.COMM_SELF, lanes, all_gather)
        (row,) = collectives.reduce_scatter(computed(lanes, numbers), "bucket0").wait()
        lanes.synchronize()
        assert torch.equal(row, numbers)
        collectives.close()
    assert lanes.cuda.mistakes == []
