"""Each rank prints whether it needs no communication thread, with so many compute threads as it is told."""

import sys

import torch

from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.single_copy import needs_no_thread

torch.set_num_threads(int(sys.argv[1]))
print(f"needs no thread: {needs_no_thread(MPI.COMM_WORLD, torch.device('cpu'))}", flush=True)
