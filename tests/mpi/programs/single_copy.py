"""Rank 0 prints whether each rank needs no communication thread, with so many compute threads."""

import sys

import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.progress_thread import needs_no_thread

torch.set_num_threads(int(sys.argv[1]))
told = MPI.COMM_WORLD.gather(needs_no_thread(MPI.COMM_WORLD, torch.device("cpu")))
if told is not None:
    print("needs no thread:", *told, flush=True)
