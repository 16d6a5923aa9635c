"""Probe: measures the machines under mpirun, in about a second, and returns a `Cluster`.

Measured: messages between two ranks of one host and of two (ping-pong through the runtime's own transport:
bandwidth, latency, and the processor time that one takes),
Horovod's all-reduce over all ranks, and how many of a host's ranks can compute at once.
"""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridpipe.planning.cluster import AllReduce, Cluster, Level
from hybridpipe.runtime.gradients import horovod
from hybridpipe.runtime.transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL_BYTES, LARGE_BYTES = 64, 4 * 2**20  # 3 s in all over 100 Mbit/s
REPEATS = 7
COMPUTE_SECONDS = 0.1
_MATRIX = torch.ones(128, 128)


def probe(world: "MPI.Comm") -> Cluster:
    """Measure the machines behind `world`. Collective; the same cluster on every rank.

    Raises:
        ValueError: the ranks are not placed host by host in equal numbers.
    """
    if world.size == 1:
        return Cluster.flat(1, bandwidth=1e10, latency_seconds=0.0)  # no link to measure, and none to use
    per_host = _ranks_per_host(world)
    links = {}
    if per_host > 1:
        links["host", per_host] = _link(world, 0, 1)
    if per_host < world.size:
        links["network", world.size] = _link(world, 0, per_host)
    return Cluster(
        levels=tuple(
            Level(name, ranks, link.bandwidth, link.latency_seconds) for (name, ranks), link in links.items()
        ),
        allreduce=_allreduce(world),
        node_ranks=per_host,
        compute_slots=_compute_slots(world, per_host),
        message_seconds=max(link.message_seconds for link in links.values()),
    )


def _ranks_per_host(world: "MPI.Comm") -> int:
    from hybridpipe.runtime.mpi import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = world.allgather(host.bcast(world.rank))
    host.Free()
    size = leaders.count(leaders[0])
    if leaders != [rank - rank % size for rank in range(world.size)]:
        raise ValueError(
            "probe needs the ranks host by host in equal numbers (mpirun --map-by slot, "
            f"srun --distribution=block), got ranks whose hosts begin at ranks {leaders}"
        )
    return size


class _Link(NamedTuple):
    bandwidth: float
    latency_seconds: float
    message_seconds: float


def _link(world: "MPI.Comm", rank: int, other: int) -> _Link:
    """Figures of messages between two ranks, sent as the runtime sends them."""
    from hybridpipe.runtime.mpi_transport import MpiTransport

    figures = None
    own = world.Dup()
    if world.rank in (rank, other):
        peer = other if world.rank == rank else rank
        with MpiTransport(own) as transport:
            began = time.thread_time()
            small = _one_way(transport, world.rank, peer, SMALL_BYTES)
            message = (time.thread_time() - began) / (2 * REPEATS)
            large = _one_way(transport, world.rank, peer, LARGE_BYTES)
        figures = _Link(LARGE_BYTES / max(large - small, 1e-9), small, message)
        idle_barrier(world)
    else:  # computes meanwhile, as in training: with more ranks than cores a message waits for a time slice
        done = world.Ibarrier()
        while not done.Test():
            _product()
    own.Free()
    found: _Link = world.bcast(figures, root=rank)
    return found


def _one_way(transport: Transport, rank: int, peer: int, num_bytes: int) -> float:
    """Seconds that a message takes from one rank to the other: half of there and back."""
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def there_and_back() -> None:
        receiving = transport.receive(received, peer, 0)
        if rank > peer:
            receiving.wait()
        sending = transport.send(sent, peer, 0)
        receiving.wait()
        sending.wait()

    return _median_seconds(there_and_back) / 2


def _allreduce(world: "MPI.Comm") -> AllReduce:
    """Horovod's own, as the gradients will use it."""
    hvd = horovod(world)

    def seconds(num_bytes: int) -> float:
        tensor = torch.zeros(num_bytes // 4)
        return _median_seconds(lambda: hvd.allreduce_(tensor, name=f"probe{num_bytes}", op=hvd.Sum))

    small, large = seconds(SMALL_BYTES), seconds(LARGE_BYTES)
    hvd.shutdown()
    small, large = world.bcast((small, large))
    moved = 2 * (world.size - 1) / world.size * (LARGE_BYTES - SMALL_BYTES)
    return AllReduce(bandwidth=moved / max(large - small, 1e-9), latency_seconds=small)


def _compute_slots(world: "MPI.Comm", per_host: int) -> float:
    """Ranks' worth of compute of the slowest host: work done by all at once over work done by one alone."""
    alone = _work() if world.rank == 0 else 0
    idle_barrier(world)
    alone = world.bcast(alone)
    idle_barrier(world)
    together = world.allgather(_work())
    hosts = [sum(together[i : i + per_host]) for i in range(0, world.size, per_host)]
    return float(min(per_host, max(1.0, min(hosts) / alone)))


def _work() -> int:
    """Products of matrices finished in COMPUTE_SECONDS."""
    done, end = 0, time.perf_counter() + COMPUTE_SECONDS
    while time.perf_counter() < end:
        _product()
        done += 1
    return done


def _product() -> None:
    torch.mm(_MATRIX, _MATRIX)


def idle_barrier(world: "MPI.Comm") -> None:
    """A barrier that sleeps: a waiting rank must not take a core from the one being measured."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(1e-4)


def _median_seconds(function: Callable[[], object]) -> float:
    samples = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        function()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)
