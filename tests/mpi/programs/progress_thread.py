"""Rank 0 prints whether each rank needs a progress thread, with so many compute threads."""

import sys

import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.progress_thread import needs_progress_thread

torch.set_num_threads(int(sys.argv[1]))
told = MPI.COMM_WORLD.gather(needs_progress_thread(MPI.COMM_WORLD, torch.device("cpu")))
if told is not None:
    print("needs a thread:", *told, flush=True)
