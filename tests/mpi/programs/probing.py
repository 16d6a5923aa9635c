"""Probe, with work of our own; every rank must come to the same cluster, and within the fields' ranges."""

import torch

from hybridpipe.collectives.backends import suited, usable
from hybridpipe.comm.mpi import MPI
from hybridpipe.measure.probe import probe

world = MPI.COMM_WORLD
torch.set_num_threads(1)
matrix = torch.ones(128, 128)
calls = 0


def work():
    global calls
    calls += 1
    torch.mm(matrix, matrix)


backends = suited(usable(world, torch.device("cpu")), "auto")
cluster = probe(world, backends, work)

assert cluster.sync in backends
assert calls, "the work that was given is what computes"
assert world.allgather(cluster) == [cluster] * world.size
(level,) = cluster.levels
assert (level.name, level.ranks, cluster.node_ranks) == ("host", world.size, world.size)
assert level.shared_bandwidth is None, "below it are single ranks"
assert 1e6 < level.bandwidth < 1e12 and 0 < level.latency_seconds < 1 and level.fit_error >= 0
assert 1e5 < level.allreduce.bandwidth <= level.bandwidth * 1.001, "no ring is faster than its links"
assert 0 <= level.allreduce.wait_seconds < 1
assert len(cluster.wakeup_seconds) in (0, world.size - 1)
assert all(0 <= each < 5 for each in cluster.wakeup_seconds)
assert 0 <= level.allreduce.latency_seconds < 5 and level.allreduce.fit_error >= 0
assert len(cluster.compute_speeds) == world.size and cluster.compute_speeds[0] == 1
assert all(0.01 < speed <= 1 for speed in cluster.compute_speeds)
assert cluster.relative_speed is None and cluster.memory_bytes > 0
assert 0 <= cluster.message_seconds < 5 and 0 <= cluster.message_seconds_per_byte < 1e-6
assert 0 <= cluster.overlap <= 1
