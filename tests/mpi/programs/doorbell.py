"""Three ranks ring each other; prints on rank 0 how many can."""

from hybridpipe.runtime.doorbell import Doorbell
from hybridpipe.runtime.mpi import MPI

world = MPI.COMM_WORLD
bell = Doorbell(world)
assert len({frozenset(peers) for peers in world.allgather(bell.peers)}) == 1
if world.rank == 0:
    print(f"{len(bell.peers)} ring", flush=True)
if bell.peers:
    right = (world.rank + 1) % world.size
    assert not bell.sleep(0.02)
    world.Barrier()
    bell.ring(right)
    bell.ring(right)
    assert bell.sleep(10)
    world.Barrier()
    bell.sleep(0)
    assert not bell.sleep(0.02)  # both are heard by now
    world.Barrier()
    for _ in range(100):
        bell.ring(right)  # more than are heard; who rings does not wait
    world.Barrier()
    if world.rank == 0:
        bell.close()
    world.Barrier()
    if right == 0:
        bell.ring(0)  # to one that is gone
bell.close()
assert not bell.peers
assert not Doorbell(world, wanted=world.rank != 1).peers  # one rank that wants none is enough
