"""Probe: measures the machines under mpirun, in a few seconds, and returns a `Cluster`.

Not known here: how figures follow from timings (`hybridpipe.planning.cost.fit`).
Invariant: ranks outside a measurement sleep (`hybridpipe.comm.idle`); those inside repeat equally often.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridpipe.comm.idle import machine_leaders
from hybridpipe.device import GpuLanes, Lanes, lanes_of
from hybridpipe.environment.memory_limits import bytes_for_stages
from hybridpipe.measure.allreduce import LARGE_BYTES, fastest_backend, measure_allreduce
from hybridpipe.measure.computing import Computing, measure_computing
from hybridpipe.measure.links import Link, measure_link, measure_wakeups
from hybridpipe.measure.memory import memory_of_ranks
from hybridpipe.measure.repetitions import OpenTransport, Unit, Work, default_work
from hybridpipe.measure.sharding import measure_sharding
from hybridpipe.planning.cluster import Cluster, Collective, Level

if TYPE_CHECKING:
    from mpi4py import MPI

CPU = torch.device("cpu")


def probe(
    world: "MPI.Comm",
    backends: Sequence[str],
    work: Work | None = None,
    gradient_bytes: int = LARGE_BYTES[-1],
    progress_thread: bool = True,
    device: torch.device = CPU,
    with_sharding: bool = True,
) -> Cluster:
    """Measure the machines behind `world`, as training uses them. Collective.

    Messages go through the transport of training, alone and several at once. A backend's all-reduce is timed
    by size, and beside a computation; the fastest one's reduce-scatter and all-gather by size. The ranks of a
    machine, or of a GPU, compute alone and together.

    Args:
        backends: those that training may use, the default first (`suited`).
        work: computes one unit of the ranks' work, and returns when it is done, to measure how computing
            ranks slow each other down. By default a product of matrices, which stays in the cache, and a sum,
            which does not.
        gradient_bytes: size of the model's gradients; at most 64 MiB are all-reduced.
        progress_thread: the transport of training has a progress thread (`needs_progress_thread`).
        device: on which this rank computes.
        with_sharding: measure also what only plans with `zero` need: reduce-scatter and all-gather.

    Returns:
        The cluster, in seconds and bytes; the same on every rank.

    Raises:
        ValueError: the ranks are not placed host by host in equal numbers.
    """
    from hybridpipe.comm.gpus import processor_leaders
    from hybridpipe.comm.mpi_transport import MpiTransport
    from hybridpipe.measure.staged import StagedTransport

    if world.size == 1:
        return Cluster.flat(1, bandwidth=1e10, latency_seconds=0.0)  # there is no link
    per_host, lanes = _ranks_per_host(world), lanes_of(device)
    per_machine = _equal_units(machine_leaders(world)) or per_host
    per_processor = _equal_units(processor_leaders(world, device)) or per_machine
    names = [("host", 1, per_host), ("network", per_host, world.size)]
    units = [Unit(*unit) for unit in names if unit[1] < unit[2]]
    open_transport: OpenTransport = partial(MpiTransport, progress_thread=progress_thread)
    work = work or default_work(lanes)
    measure_now = partial(measure_computing, world, per_processor, work, open_transport, lanes.on_host)
    computing = measure_now()
    if isinstance(lanes, GpuLanes):
        open_transport = partial(StagedTransport, progress_thread=progress_thread, lanes=lanes)
    sync = fastest_backend(world, units[-1], backends, gradient_bytes, lanes)
    links, levels, overlap, replicated_speed = _measure_levels(
        world, units, per_machine, gradient_bytes, computing, open_transport, lanes, with_sharding, sync
    )
    computing = computing.or_more(measure_now())
    wakeups: tuple[float, ...] = ()  # a GPU goes on computing while its host wakes up
    if lanes.on_host:
        wakeups = measure_wakeups(world, computing.sharing, computing.speeds, open_transport)
    return Cluster(
        levels=levels,
        memory_bytes=bytes_for_stages(memory_of_ranks(world, device)),
        relative_speed=computing.relative_speed,
        node_ranks=per_processor,
        compute_speeds=computing.speeds,
        message_seconds=max(link.handling_seconds for link in links),
        message_seconds_per_byte=max(link.handling_seconds_per_byte for link in links),
        wakeup_seconds=wakeups,
        replicated_speed=replicated_speed,
        overlap=overlap,
        sync=sync,
    )


def _measure_levels(
    world: "MPI.Comm",
    units: Sequence[Unit],
    per_machine: int,
    gradient_bytes: int,
    computing: Computing,
    open_transport: OpenTransport,
    lanes: Lanes,
    with_sharding: bool,
    backend: str,
) -> tuple[list[Link], tuple[Level, ...], float, float]:
    """Return links and levels, and overlap and speed beside an all-reduce over all ranks. Collective."""
    links = [measure_link(world, unit, per_machine, open_transport, lanes.on_host) for unit in units]
    all_reduces = [
        measure_allreduce(world, unit, link, gradient_bytes, computing, lanes, backend)
        for unit, link in zip(units, links, strict=True)
    ]
    reduced, overlap, replicated_speed = zip(*all_reduces, strict=True)
    sharded: list[tuple[Collective | None, Collective | None]] = [(None, None) for _ in units]
    if with_sharding:
        sharded = [
            measure_sharding(world, unit, link, gradient_bytes, allreduce, open_transport, lanes, backend)
            for unit, link, allreduce in zip(units, links, reduced, strict=True)
        ]
    levels = tuple(map(_level, units, links, reduced, sharded))
    return links, levels, overlap[-1], replicated_speed[-1]


def _level(
    unit: Unit, link: Link, allreduce: Collective, sharded: tuple[Collective | None, Collective | None]
) -> Level:
    return Level(
        unit.name,
        unit.ranks,
        bandwidth=1 / link.message.seconds_per_byte,
        latency_seconds=link.message.start_seconds,
        shared_bandwidth=link.shared_bandwidth,
        allreduce=allreduce,
        burst_bytes=link.burst_bytes,
        fit_error=link.message.error,
        reduce_scatter=sharded[0],
        all_gather=sharded[1],
    )


def _ranks_per_host(world: "MPI.Comm") -> int:
    from hybridpipe.comm.mpi import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = world.allgather(host.bcast(world.rank))
    host.Free()
    size = _equal_units(leaders)
    if size is None:
        raise ValueError(
            "probe needs the ranks host by host in equal numbers (mpirun --map-by slot, "
            f"srun --distribution=block), got ranks whose hosts begin at ranks {leaders}"
        )
    return size


def _equal_units(leaders: Sequence[int]) -> int | None:
    """Return the number of ranks a unit, given the first rank of each rank's unit; None: the units differ."""
    size = leaders.count(leaders[0])
    if len(leaders) % size:
        return None
    return size if list(leaders) == [rank - rank % size for rank in range(len(leaders))] else None
