#!/usr/bin/env bash
# Trains with horovodrun, for clusters that are set up for it. Elsewhere launch/mpirun.sh is better:
# horovodrun chooses MPI's slowest path (pml ob1), and a TERM to it leaves ranks running.
#   launch/horovodrun.sh 4 examples/digits.toml --plan auto --out runs/digits
#   launch/horovodrun.sh 4 -- python train.py                      a script of your own
#   HOSTS=h1:4,h2:4 launch/horovodrun.sh 8 CONFIG                  on several hosts; needs ssh between them
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: launch/horovodrun.sh RANKS CONFIG [OPTIONS OF hybridpipe train] | RANKS -- COMMAND" >&2; exit 2; }
ranks=$1; shift

python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}   # without it, that of the active environment
[ -x "$python" ] || python=$(type -P python)
bin=$(cd "$(dirname "$python")" && pwd)

if [ "$1" = -- ]; then shift; else set -- "$bin/python" -m hybridpipe train "$@"; fi
export PATH=$bin:$PATH                                   # horovodrun calls the first mpirun on the PATH
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}   # a waiting rank leaves its core to others
# Between hosts, large all-reduces take a ring.
if [ -n "${HOSTS:-}" ] && [ -z "${OMPI_MCA_coll_tuned_use_dynamic_rules+set}" ]; then
  rules=$("$bin/python" -c 'from hybridpipe.launch.mpirun import RING_RULES; print(RING_RULES)')
  export OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_dynamic_rules_filename=$rules
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}             # raise it if there are more cores than ranks
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}           # huge pages
# horovodrun's own binding options begin with one dash, which Open MPI 5 misreads.
exec "$bin/python" "$bin/horovodrun" --binding-args="--bind-to none --map-by slot:OVERSUBSCRIBE" \
  -np "$ranks" -H "${HOSTS:-localhost:$ranks}" "$@"
