"""MPI, initialised with THREAD_MULTIPLE. Importing this module starts MPI; no other module does.

mpi4py must start MPI before Horovod does, since the progress thread, the main thread and Horovod's thread all
call MPI.
"""

import mpi4py

from hybridpipe.environment.fragments import set_fragments

mpi4py.rc.thread_level = "multiple"
set_fragments()

try:
    from mpi4py import MPI
except RuntimeError as error:
    if not str(error).startswith("cannot load MPI library"):
        raise
    raise ModuleNotFoundError(f"mpi4py finds no MPI library: {error}", name="an MPI library") from None

if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    raise RuntimeError(
        "MPI must offer THREAD_MULTIPLE, got a lower thread level; use an MPI library built with thread "
        "support and import hybridpipe before anything else initialises MPI (`hybridpipe doctor` tells more)"
    )

__all__ = ["MPI"]
