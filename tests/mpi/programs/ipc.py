"""Under mpirun: CUDA IPC's protocol between processes, where shared memory stands for a GPU's.

Usage: ipc.py messages, or ipc.py FAULT PROGRAM [ARGUMENT ...], which runs another of these programs over the
stand-in. FAULT: none; wrong or error, which spoils what rank 1 opens.
"""

import os
import runpy
import sys
from itertools import combinations
from pathlib import Path

import torch
import torch.multiprocessing

from hybridpipe.comm import mailbox
from hybridpipe.comm.courier import IpcCourier, courier_of
from hybridpipe.comm.cuda_ipc import WANTED, readers
from hybridpipe.comm.messages import spec_of
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.engine import worker
from tests.mpi.process_cuda import ProcessLanes

WORLD = MPI.COMM_WORLD
ROUNDS = 60
TAGS = 2 * mailbox.MOST_SLOTS  # messages under way have different ones


def transport(communicator: MPI.Comm, to_spare: bool, progress_thread: bool, pinned: bool) -> MpiTransport:
    """Return a transport whose buffers are not pinned: there is no GPU."""
    return MpiTransport(communicator, to_spare, progress_thread)


class Spoilt(ProcessLanes):
    """Lanes that see what memory was when it was opened, or that cannot open any."""

    fault = ""

    def opened(self, handle: bytes):
        if self.fault == "error":
            raise RuntimeError("invalid device context\nand more")
        memory, *events = super().opened(handle)
        return memory.clone() if isinstance(memory, torch.Tensor) else memory, *events


def message(sender: int, number: int) -> tuple[torch.Tensor | None, ...]:
    """Return a message of one of some sizes, small and large ones, the same wherever it is made."""
    generator = torch.Generator().manual_seed(1000 * sender + number)
    size = int(torch.randint(1, 10, (1,), generator=generator)) ** (1 + number % 6)
    return torch.randn(size, 3, generator=generator), torch.full((5,), float(number))


def messages() -> None:
    """Send messages between all ranks, more at once than there are slots, and compare them."""
    lanes = ProcessLanes()
    others = readers(WORLD, lanes, list(combinations(range(WORLD.size), 2)))
    assert others == set(range(WORLD.size)) - {WORLD.rank}
    number = 0
    with MpiTransport(WORLD.Dup()) as between:
        courier = courier_of(between, lanes, readers=others)
        assert isinstance(courier, IpcCourier)
        for turn in range(ROUNDS):
            burst = range(number, number := number + 1 + turn % (2 * mailbox.MOST_SLOTS))
            arriving = []
            for each in burst:
                tensors = message(WORLD.rank, each)
                courier.send(spec_of(tensors), tensors, (0, each), sorted(others), tag=each % TAGS)
                for tensor in tensors:
                    tensor.fill_(torch.nan)  # a message has the values of its moment
            for each in burst:
                for peer in sorted(others):
                    expected = message(peer, each)
                    arriving.append(
                        (courier.receive(spec_of(expected), (0, each), peer, each % TAGS), expected)
                    )
            for each, expected in arriving:
                for seen, wanted in zip(each.wait(), expected, strict=True):
                    assert torch.equal(seen, wanted)
        for outbox in courier._out.values():
            assert (
                len(outbox._mailbox.slots) == mailbox.MOST_SLOTS and outbox._keeps_order
            )  # some were staged
        courier.close()
    print(f"rank {WORLD.rank}: {number} messages to each of {len(others)} ranks", flush=True)


def main(fault: str, program: str, *arguments: str) -> None:
    """Run a program whose devices are the stand-in."""
    Spoilt.fault = fault
    lanes = Spoilt if fault != "none" and WORLD.rank == 1 else ProcessLanes
    worker.lanes_of, worker.MpiTransport = lambda device: lanes(), transport
    couriers = []
    close = IpcCourier.close
    IpcCourier.close = lambda self: (couriers.append(self), close(self))[1]
    sys.argv = [program, *arguments]
    runpy.run_path(str(Path(__file__).parent / program), run_name="__main__")
    print(f"rank {WORLD.rank}: {len(couriers)} couriers by IPC", flush=True)


if __name__ == "__main__":
    os.environ[WANTED] = "1"
    torch.multiprocessing.set_sharing_strategy("file_system")
    if sys.argv[1:] == ["messages"]:
        messages()
    else:
        main(*sys.argv[1:])
