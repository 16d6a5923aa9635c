"""Ranks that a launcher has bound, each to a core of its own, or all to one, on what cores they compute."""

import os

from hybridpipe.comm.communicators import default_num_threads, this_host
from hybridpipe.comm.idle import cores_to_spare
from hybridpipe.comm.mpi import MPI

world = MPI.COMM_WORLD
os.environ.pop("OMP_NUM_THREADS")  # the launcher's
all_cores = sorted(os.sched_getaffinity(0))

os.sched_setaffinity(0, [all_cores[world.rank]])
assert this_host(world).num_cores == world.size
assert cores_to_spare(world), "each has its own"

os.sched_setaffinity(0, [all_cores[0]])
assert this_host(world).num_cores == 1
assert not cores_to_spare(world)

if world.rank > 0:  # the others may use all
    os.sched_setaffinity(0, all_cores)
num_threads = default_num_threads(this_host(world))
assert num_threads == (len(all_cores) // world.size if world.rank > 0 else 1), num_threads
