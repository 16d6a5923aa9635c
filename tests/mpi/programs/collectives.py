"""Under mpirun: each backend's collectives beside sums that are made here: collectives.py BACKEND..."""

import sys

import torch

from hybridpipe.collectives import mpi
from hybridpipe.collectives.backends import open_collectives, usable
from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport

world, CPU = MPI.COMM_WORLD, torch.device("cpu")
mpi.PIECE_BYTES = 100_000  # several pieces
LARGE = 2**18 + 3
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Small ones, none, large ones, and large ones whose elements are in no order; all sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(3,), (LARGE,), (0,), (2, 5), (512, 512), ()]
    found = [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in shapes]
    found[4] = found[4].t()
    return found


def main() -> None:
    assert not {*sys.argv[1:]} & {*usable(world, CPU).whys}
    replicas = WatchedComm(world.Dup(), world)
    for backend in sys.argv[1:]:
        for _ in range(2):  # and once more after it was closed
            check(backend, replicas)
        if world.rank == 0:
            print(f"{backend}: right", flush=True)


def check(backend: str, replicas: WatchedComm) -> None:
    with MpiTransport(world.Dup()) as transport:
        collectives = open_collectives(backend, replicas, transport, CPU)
        for dtype in DTYPES[: 3 if backend == "horovod" else 4]:  # Horovod adds no bfloat16
            mine = tensors(world.rank, dtype)
            if backend == "horovod":
                mine[4] = mine[4].contiguous()
            wanted = [sum(each) for each in zip(*(tensors(r, dtype) for r in range(world.size)), strict=True)]
            works = [collectives.all_reduce(mine[:3], "one"), collectives.all_reduce(mine[3:], "other")]
            for work in works:
                work.wait()
            for got, expected in zip(mine, wanted, strict=True):
                assert torch.equal(got, expected), (backend, dtype, got.shape)
            everybodys = [torch.stack(tensors(r, dtype)[1:2] * world.size) for r in range(world.size)]
            for r, rows in enumerate(everybodys):
                rows += torch.arange(world.size)[:, None] * r  # each rank's row is another
            expected = sum(rows[world.rank] for rows in everybodys)
            (row,) = collectives.reduce_scatter(everybodys[world.rank], "rows").wait()
            assert torch.equal(row[0], expected), (backend, dtype)
        for dtype in (*DTYPES, torch.complex64):
            wanted = torch.arange(8.0 * world.size).to(dtype)
            weights, own = torch.zeros_like(wanted), slice(8 * world.rank, 8 * world.rank + 8)
            weights[own] = wanted[own]
            collectives.all_gather(weights).wait()
            assert torch.equal(weights, wanted), (backend, dtype)
        collectives.close()


main()
