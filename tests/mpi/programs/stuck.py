"""A thread ends the job while the main thread sits in MPI or Horovod and MPI_Abort hangs: stuck.py WHERE."""

import ctypes
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import torch

from hybridpipe.collectives.horovod import horovod
from hybridpipe.comm.mpi import MPI
from hybridpipe.health import failure

world = MPI.COMM_WORLD
hvd = horovod(world) if sys.argv[1] == "horovod" else None
hanging = SimpleNamespace(Abort=lambda code: ctypes.PyDLL(None).sleep(60), rank=world.rank, size=world.size)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # as whoever waits for signals in a thread does


def end() -> None:
    time.sleep(1)
    failure.MPI = SimpleNamespace(COMM_WORLD=hanging)
    print(f"ending at {time.time()}", flush=True)
    failure.end_job(3)


if world.rank == 0:
    threading.Thread(target=end, daemon=True).start()
    if sys.argv[1] == "horovod":
        hvd.allreduce(torch.ones(4), name="alone")
    world.Recv(np.empty(1), 1)
world.Recv(np.empty(1), 0)
