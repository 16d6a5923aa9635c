"""Sharding: seconds of a backend's reduce-scatter of gradients and all-gather of weights, by size.

Not known here: stages and plans. Invariant: as in `repetitions`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridpipe.collectives.protocol import Collectives
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.device import Lanes
from hybridpipe.measure.allreduce import LEAST_BYTES, cycle_milliseconds, pausing, quick_collectives
from hybridpipe.measure.links import Link
from hybridpipe.measure.repetitions import OpenTransport, Timed, Unit, by_size, in_group
from hybridpipe.planning.cluster import Collective
from hybridpipe.planning.cost import fit
from hybridpipe.planning.cost.formula import BUCKET_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

WORD_BYTES = 8  # of which a share has a whole number


def measure_sharding(
    world: "MPI.Comm",
    unit: Unit,
    link: Link,
    gradient_bytes: int,
    allreduce: Collective,
    open_transport: OpenTransport,
    lanes: Lanes,
    backend: str,
) -> tuple[Collective, Collective]:
    """Measure the reduce-scatter and the all-gather over the first unit of a level. Collective over `world`.

    Three sizes are timed, up to the all-reduce's largest, or until one takes long: the choice between a
    reduce-scatter and an all-reduce is one of a factor of two.

    Args:
        link: the level's link, already measured.
        gradient_bytes: size of the model's gradients.
        allreduce: the level's, already measured, for the wait for Horovod's cycle.
        backend: one of BACKENDS.

    Returns:
        The figures of the reduce-scatter, which waits for Horovod's cycle as the all-reduce does, and of the
        all-gather.
    """
    burst_size = int((link.burst_bytes or 0.0) * unit.ranks / (unit.ranks - 1))
    most = max(min(gradient_bytes, 8 * BUCKET_BYTES), 2 * LEAST_BYTES, 2 * burst_size)
    sizes = [LEAST_BYTES // 4, min(BUCKET_BYTES, most // 2), most]
    rest_seconds = (link.burst_bytes or 0.0) * link.message.seconds_per_byte
    measure = partial(
        _timed,
        sizes=sizes,
        rest_seconds=rest_seconds,
        open_transport=open_transport,
        lanes=lanes,
        backend=backend,
    )
    scattered, gathered = in_group(world, range(unit.ranks), measure)
    sent = (unit.ranks - 1) / unit.ranks
    least = sent * link.message.seconds_per_byte  # no ring is faster than its links
    lines = [fit.fit_line(fit.beyond(timed, burst_size), least) for timed in (scattered, gathered)]
    quick = min(1e-3 * min(world.bcast(cycle_milliseconds(backend)), 1.0) / 2, lines[0].start_seconds)
    starts = lines[0].start_seconds - quick, lines[1].start_seconds
    waits = allreduce.wait_seconds, 0.0
    reduce_scatter, gather = (
        Collective(sent / line.seconds_per_byte, start, line.error, wait)
        for line, start, wait in zip(lines, starts, waits, strict=True)
    )
    return reduce_scatter, gather


def _timed(
    group: "MPI.Comm",
    sizes: list[int],
    rest_seconds: float,
    open_transport: OpenTransport,
    lanes: Lanes,
    backend: str,
) -> tuple[list[Timed], list[Timed]]:
    """Return the timings of both by size."""
    pause = pausing(rest_seconds)
    with open_transport(group) as transport:
        assert isinstance(transport, MpiTransport)
        with quick_collectives(group, lanes, backend, transport) as collectives:
            scattering = partial(_scattering, collectives, group.size, lanes)
            scattered = by_size(group, sizes, scattering, pause)
            gathering = partial(_gathering, collectives, group.size, lanes)
            gathered = by_size(group, sizes, gathering, pause)
    return scattered, gathered


def _scattering(
    collectives: Collectives, replicas: int, lanes: Lanes, num_bytes: int
) -> Callable[[], object]:
    """Return a whole reduce-scatter, with the copy of the gradients into rows, as one function."""
    share = max(1, num_bytes // 4 // replicas)
    gradients = torch.zeros(replicas * share, device=lanes.device)

    def scatter() -> None:
        rows = torch.zeros(replicas, share, device=lanes.device)
        rows.copy_(gradients.view_as(rows))
        collectives.reduce_scatter(rows, f"scattered{num_bytes}").wait()
        lanes.synchronize()

    return scatter


def _gathering(collectives: Collectives, replicas: int, lanes: Lanes, num_bytes: int) -> Callable[[], object]:
    """Return all-gathers of buckets that together have `num_bytes`, all started at once, as one function."""
    count = max(1, num_bytes // BUCKET_BYTES)
    words = max(1, num_bytes // count // WORD_BYTES // replicas)
    length = words * replicas * WORD_BYTES // 4
    buckets = [torch.zeros(length, device=lanes.device) for _ in range(count)]

    def gather() -> None:
        pending = [collectives.all_gather(bucket) for bucket in buckets]
        for each in pending:
            each.wait()
        lanes.synchronize()

    return gather
