"""All ranks measure the model at once, and all have the same profile, which says so."""

from functools import partial

import torch
from torch import nn

from hybridpipe.comm.idle import largest, machine_leaders, measure_together
from hybridpipe.comm.mpi import MPI
from hybridpipe.environment.memory_limits import RankMemory
from hybridpipe.measure import memory, turns
from hybridpipe.measure.layers import Rehearsal
from hybridpipe.model.layers import layers_of

world = MPI.COMM_WORLD
turns.MAX_REPEATS = 3
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
targets = torch.zeros(8, dtype=torch.long)
rehearsal = Rehearsal(layers_of(model, None), torch.ones(8, 64), targets, nn.functional.cross_entropy)
profile = measure_together(world, partial(rehearsal.measure, partial(torch.optim.SGD, lr=0.1)))

assert world.allgather(profile) == [profile] * world.size
assert profile.load == world.size and profile.samples == 8
assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in profile.layers)
assert largest(world, world.rank) == world.size - 1
assert machine_leaders(world) == [0] * world.size

# Rank 1 pretends to have a GPU, whose memory is looked at in the same call as the others'.
device = torch.device("cpu")
if world.rank == 1:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache, torch.cuda.memory_allocated = (lambda: None), (lambda device: 5)
    torch.cuda.mem_get_info, memory.visible_gpus = (lambda device: (60, 100)), (lambda: ("one",))
found = memory.memory_of_ranks(world, device)
assert found[1] == RankMemory(5, 65, "GPU memory") and found[0].held_bytes > 2**20
