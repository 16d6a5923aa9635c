"""CUDA-aware MPI: whether MPI reads and writes the memory of GPUs itself, where a user asks for it.

Knows the library's word for it and a trial; no messages of a training.
Invariant: a library that does not say so gets no such memory, since it would crash.
"""

import ctypes
import os

import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import memory_of
from hybridpipe.errors import UserError

ASKED = "HYBRIDPIPE_CUDA_AWARE_MPI"
TRIAL_BYTES = (64, 2**22)  # sent at once, and in pieces or by the receiver


def cuda_aware(world: MPI.Comm, device: torch.device) -> bool:
    """Return True if MPI shall read and write the memory of `device` itself. Collective.

    Raises:
        UserError: HYBRIDPIPE_CUDA_AWARE_MPI=1 asks for it, and MPI says that it cannot, or errs.
    """
    asked = os.environ.get(ASKED, "0") not in ("", "0")
    if not world.allreduce(asked, op=MPI.LOR):
        return False
    if not world.allreduce(asked and library_says_so(), op=MPI.LAND):
        raise UserError(
            f"{ASKED}=1 asks MPI to read GPUs' memory, and {MPI.Get_library_version().split(',')[0]} says "
            "that it cannot: leave it out, and messages go through pinned memory"
        )
    if not world.allreduce(all(_arrives(world, device, num_bytes) for num_bytes in TRIAL_BYTES), op=MPI.LAND):
        raise UserError(f"{ASKED}=1: MPI got a message between GPUs wrong; leave it out")
    return device.type == "cuda"


def library_says_so() -> bool:
    """Return True if the MPI library says that it can read and write the memory of GPUs, as it runs now."""
    for library in (MPI.__file__, None):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support() == 1)
        except (OSError, AttributeError):  # another MPI than Open MPI, or it is loaded elsewhere
            continue
    return False


def _arrives(world: MPI.Comm, device: torch.device, num_bytes: int) -> bool:
    """Send bytes round the ranks, and return True if those of the rank before have arrived here."""
    numbers = torch.arange(num_bytes) % 251
    before, behind = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent = (numbers + world.rank % 5).to(device, torch.uint8)
    received = torch.zeros_like(sent)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    world.Sendrecv([memory_of(sent), MPI.BYTE], behind, 0, [memory_of(received), MPI.BYTE], before, 0)
    return torch.equal(received.cpu(), (numbers + before % 5).to(torch.uint8))
