"""Messages to measure, over lanes that come late."""

import pytest
import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.measure.staged import StagedTransport
from tests.late_cuda import LateLanes


@pytest.mark.parametrize("num_bytes", [64, 2**16])
def test_a_message_goes_through_the_gpu_at_both_ends(num_bytes):
    lanes, communicator = LateLanes(), MPI.COMM_SELF.Dup()
    sizes = torch.zeros(num_bytes, dtype=torch.uint8)
    with lanes.cuda, StagedTransport(communicator, progress_thread=False, lanes=lanes) as transport:
        for _ in range(3):
            receiving = transport.receive(sizes, 0, tag=1)
            sending = transport.send(sizes, 0, tag=1)
            assert not sending.is_complete() and not receiving.is_complete()
            receiving.wait()
            sending.wait()
            assert receiving.is_complete()
    communicator.Free()
    assert lanes.cuda.mistakes == [] and not lanes._outward.work
