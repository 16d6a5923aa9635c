"""One rank sees a mistake of the user; the others wait. Usage: refusing.py RANK."""

import sys

from hybridpipe.comm.mpi import MPI
from hybridpipe.health import failure

failure.install()
if MPI.COMM_WORLD.rank == int(sys.argv[1]):
    failure.refuse(ValueError("only here"))
MPI.COMM_WORLD.Barrier()
