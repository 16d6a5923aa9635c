#!/usr/bin/env bash
# Trains with mpirun.
#   launch/mpirun.sh 4 examples/digits.toml --plan auto --out runs/digits
#   launch/mpirun.sh 4 -- python train.py                                     a script of your own
#   HYBRIDPIPE_MPIRUN_FLAGS="--host h1:4,h2:4" launch/mpirun.sh 8 CONFIG      on several hosts
#
# The flags of mpirun depend on its make and version, on the cores and on the user;
# hybridpipe.launch.mpirun chooses them. With Open MPI 5 and more ranks than cores it starts
#   OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 \
#     mpirun -n 4 --bind-to none --map-by :OVERSUBSCRIBE -x OMP_NUM_THREADS hybridpipe train CONFIG
# Variables that are set already (OMP_NUM_THREADS, OMPI_MCA_...) are kept. The exit code is mpirun's.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: launch/mpirun.sh RANKS CONFIG [OPTIONS OF hybridpipe train] | RANKS -- COMMAND" >&2; exit 2; }
ranks=$1; shift
if [ "$1" = -- ]; then shift; else set -- hybridpipe train "$@"; fi

python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}   # without it, that of the active environment
[ -x "$python" ] || python=python
exec "$python" -m hybridpipe.launch.mpirun "$ranks" -- "$@"
