"""Doctor: checks of a machine before training, each with advice for a failure.

    hybridpipe doctor                                             one process
    python -m hybridpipe.launch.mpirun 4 -- hybridpipe doctor     a job like a training, with messages

Invariant: an exception in a check, such as a failing import, becomes a failed check and no traceback.
Heavy modules are therefore imported inside the checks only.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hybridpipe import environment
from hybridpipe.environment.fragments import FRAGMENTS, set_fragments
from hybridpipe.errors import REMEDIES, TRAINING
from hybridpipe.launch import gpus, mpirun

TORCH_FROM, TORCH_BELOW = (2, 6), (2, 16)  # as in pyproject.toml, which says why
SETUP = "run hybridpipe setup"
DEADLINE_SECONDS = 60.0
FAIL, SLOW, ABSENT = "FAIL", "slow", "–"  # training cannot work; is slower; does without, and as well


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Args:
        name: of the check.
        ok: True if it passed.
        detail: the finding.
        advice: a command or a setting that helps; empty if `ok`.
        severity: of a failure: FAIL, SLOW or ABSENT.
    """

    name: str
    ok: bool
    detail: str
    advice: str = ""
    severity: str = FAIL

    @property
    def prevents(self) -> bool:
        """True if training cannot work."""
        return not self.ok and self.severity == FAIL


class Finding(Exception):
    """A failed check, with advice if the check's own does not fit."""

    def __init__(self, detail: str, advice: str | None = None, severity: str = FAIL) -> None:
        super().__init__(detail)
        self.advice, self.severity = advice, severity


def check(name: str, advice: str) -> Callable[[Callable[[], str]], Callable[[], Check]]:
    """Decorate a function that returns its finding: it then returns a `Check`, failed for any exception."""

    def decorate(examine: Callable[[], str]) -> Callable[[], Check]:
        @functools.wraps(examine)
        def examined() -> Check:
            try:
                return Check(name, True, examine())
            except Finding as error:
                own = advice if error.advice is None else error.advice
                return Check(name, False, str(error), own, error.severity)
            except Exception as error:
                detail = str(error).strip().splitlines() or [type(error).__name__]
                return Check(name, False, detail[0], REMEDIES.get(getattr(error, "name", None) or "", advice))

        return examined

    return decorate


# ---- Alone ---------------------------------------------------------------------------------------------


@check("Python", "install hybridpipe into an environment of Python 3.11 to 3.14")
def python_version() -> str:
    """Check that Python is 3.11 to 3.14."""
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        raise Finding(f"{platform.python_version()} is not 3.11 to 3.14")
    return f"{platform.python_version()} at {sys.executable}"


@check("torch", TRAINING)
def torch_version() -> str:
    """Check that torch is in the supported range."""
    import torch

    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not TORCH_FROM <= found < TORCH_BELOW:
        wanted = f"torch>={'.'.join(map(str, TORCH_FROM))},<{'.'.join(map(str, TORCH_BELOW))}"
        raise Finding(f"{torch.__version__} is not {wanted}", f"pip install '{wanted}' && hybridpipe setup")
    return f"{torch.__version__}, {_count(torch.get_num_threads(), 'thread')}"


@check("MPI library", SETUP)
def mpi_library() -> str:
    """Check that exactly one MPI library is loaded."""
    from mpi4py import MPI

    with open("/proc/self/maps") as maps:
        loaded = sorted({line.split()[-1] for line in maps if re.search(r"/libmpi\b[^/]*$", line)})
    if len(loaded) > 1:
        raise Finding(f"two at once: {', '.join(loaded)}", "unset LD_LIBRARY_PATH, then hybridpipe setup")
    return f"{_make_and_version(MPI.Get_library_version())} at {', '.join(loaded) or 'an unknown path'}"


@check("thread level", "use an MPI that was built with MPI_THREAD_MULTIPLE, and import mpi4py before Horovod")
def thread_level() -> str:
    """Check that MPI provides MPI_THREAD_MULTIPLE."""
    from mpi4py import MPI

    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise Finding("MPI_THREAD_MULTIPLE is not provided: threads of one rank could not send at once")
    return "MPI_THREAD_MULTIPLE"


@check("mpirun", f"{SETUP}, or put the MPI's bin folder on the PATH (module load openmpi)")
def launcher() -> str:
    """Check that there is an mpirun."""
    return f"{_make_and_version(mpirun.mpirun_version(_mpirun()))} at {_mpirun()}"


@check("one MPI", "put the mpirun of the MPI library first on the PATH, then hybridpipe setup")
def mpi_matches() -> str:
    """Check that mpirun and the MPI library are of one make and version."""
    from mpi4py import MPI

    started = _make_and_version(mpirun.mpirun_version(_mpirun()))
    loaded = _make_and_version(MPI.Get_library_version())
    # MPICH and its derivatives have an mpirun called HYDRA, whose version is not always the library's.
    comparable = "HYDRA" not in started or "MPICH" in loaded
    if comparable and started.replace("HYDRA", "MPICH") != loaded:
        raise Finding(f"mpirun is {started} but the library is {loaded}: each rank would run alone")
    return "mpirun and the library belong together"


@check("sync horovod", f"{SETUP}, or pip uninstall horovod")
def sums_by_horovod() -> str:
    """Check that Horovod, if it is installed, is built with MPI and loads with torch."""
    from mpi4py import MPI  # noqa: F401  before Horovod: it requests THREAD_MULTIPLE

    try:
        import horovod
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise
        raise Finding("not installed, and not needed: hybridpipe setup builds it", "", ABSENT) from None
    import horovod.torch as hvd

    if not hvd.mpi_built():
        raise Finding(f"{horovod.__version__} has no MPI", "pip uninstall horovod, then hybridpipe setup")
    parts = ["MPI", "torch"] + ["CUDA"] * hvd.cuda_built()
    if version := hvd.nccl_built():
        parts.append(gpus.nccl_name(version))
    return f"Horovod {horovod.__version__}, built with {', '.join(parts[:-1])} and {parts[-1]}"


@check("sync mpi", SETUP)
def sums_by_mpi() -> str:
    """Check that mpi4py sums an array where it is."""
    import mpi4py
    import numpy
    from mpi4py import MPI

    ones = numpy.ones(2**10, numpy.float32)
    MPI.COMM_SELF.Allreduce(MPI.IN_PLACE, ones)
    if not (ones == 1).all():
        raise Finding("an all-reduce over this process alone changed its numbers")
    return f"MPI_Allreduce, by mpi4py {mpi4py.__version__}"


@check("sync torch", TRAINING)
def sums_by_torch() -> str:
    """Say what torch.distributed can sum with."""
    from torch import distributed

    if not distributed.is_available():
        raise Finding("this torch is built without torch.distributed, which is not needed", "", ABSENT)
    found = ["gloo"] * distributed.is_gloo_available() + ["NCCL"] * distributed.is_nccl_available()
    return f"torch.distributed with {' and '.join(found) or 'neither gloo nor NCCL'}"


@check("GPUs", TRAINING)
def graphics_processors() -> str:
    """Say which GPUs this machine has, and what sums gradients on them."""
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    build = _build() if names else gpus.Build(torch.version.cuda)
    return gpus.describe(build, names, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _build() -> gpus.Build:
    import torch
    from torch import distributed

    from hybridpipe.comm.cuda_aware import library_says_so

    horovod = {}
    if sums_by_horovod().ok:
        import horovod.torch as hvd

        horovod = {"horovod_cuda": hvd.cuda_built(), "nccl": hvd.nccl_built()}
    torch_nccl = distributed.is_available() and distributed.is_nccl_available()
    return gpus.Build(torch.version.cuda, torch_nccl=torch_nccl, cuda_aware=library_says_so(), **horovod)


@check("launcher", "srun --mpi=pmix (`srun --mpi=list` shows what this Slurm has), or mpirun")
def launcher_met() -> str:
    """Check that MPI's world has all the ranks that the launcher started."""
    from mpi4py import MPI

    size, promised = MPI.COMM_WORLD.size, environment.promised_ranks()
    if promised is not None and size < promised:
        raise Finding(f"it started {promised} ranks, and each sees a world of {size}")
    return f"a world of {size} as started" if promised else "none: this is one process"


# ---- Together: these checks are collective ---------------------------------------------------------------


@check("ranks' GPUs", gpus.APART)
def gpu_of_each_rank() -> str:
    """Check that each rank has a GPU, as a training chooses them, and that gradients need not leave them."""
    import torch
    from mpi4py import MPI

    from hybridpipe.collectives.backends import suited, usable
    from hybridpipe.comm.gpus import own_device
    from hybridpipe.device import visible_gpus
    from hybridpipe.planning.checks import AUTO_SYNC

    world, here = MPI.COMM_WORLD, socket.gethostname()
    device = own_device(world, None)
    own: gpus.RankDevice | Exception = gpus.RankDevice(world.rank, here, "", "")
    try:
        if device.type == "cuda":
            name = f"{device} ({torch.cuda.get_device_name(device)})"
            own = gpus.RankDevice(world.rank, here, visible_gpus()[device.index], name)
    except Exception as error:  # told below on all ranks, so that none waits for this one
        own = error
    found = world.allgather(own)
    for rank, each in enumerate(found):
        if isinstance(each, Exception):
            raise Finding(f"rank {rank}: {each}")
    devices = [each for each in found if isinstance(each, gpus.RankDevice)]
    able = usable(world, device)
    if able.on_gpus and suited(able, AUTO_SYNC) == ["mpi"]:
        slower = "MPI sums gradients, through the host's memory"
        raise Finding(f"{gpus.who_has_which(devices)}: {slower}: {able.whys['torch']}", severity=SLOW)
    return gpus.who_has_which(devices)


@check("messages", "mpirun --mca pml ob1 --mca btl tcp,self shows whether it is the network")
def messages() -> str:
    """Check that a message of 1 MiB passes from each rank to the next."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent, received = f"{world.rank:08}".encode() * 2**17, bytearray(2**20)  # too long for the eager protocol
    world.Sendrecv(sent, right, recvbuf=received, source=left)
    if received[-8:] != f"{left:08}".encode():
        raise Finding(f"rank {world.rank} received other bytes than rank {left} sent")
    return "1 MiB passed from each rank to the next"


@check("single copy", "mpirun --mca btl sm,self shows whether it is shared memory")
def single_copy() -> str:
    """Say whether large messages within a host are read from the sender's memory, else how they go."""
    from mpi4py import MPI

    from hybridpipe.comm.progress_thread import arrive_unaided

    world = MPI.COMM_WORLD
    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    most, unaided = (
        world.allreduce(neighbours.size, MPI.MAX),
        world.allreduce(arrive_unaided(neighbours), MPI.LAND),
    )
    neighbours.Free()
    if most == 1:
        return "not needed: no host has two ranks"
    if unaided:
        return "large messages within a host arrive without their sender's help"
    size, count = (os.environ[name] for name in FRAGMENTS)
    how = (
        f", in fragments of {size} bytes, {count} at once" if "Open MPI" in MPI.Get_library_version() else ""
    )
    return f"none: large messages within a host are copied twice{how}"


@check("all-reduce", SETUP)
def all_reduce() -> str:
    """Check that each backend that a training would choose from averages over all ranks."""
    import torch
    from mpi4py import MPI

    from hybridpipe.collectives.backends import open_collectives, suited, usable
    from hybridpipe.comm.communicators import WatchedComm
    from hybridpipe.comm.gpus import own_device
    from hybridpipe.planning.checks import AUTO_SYNC

    world = MPI.COMM_WORLD
    device = own_device(world, None)
    backends = suited(usable(world, device), AUTO_SYNC)
    everyone = WatchedComm(world.Dup(), world)
    for backend in backends:
        collectives = open_collectives(backend, everyone, None, device)
        numbers = torch.tensor([float(world.rank)], device=device)
        mean = float(collectives.all_reduce([numbers], "doctor").wait()[0]) / world.size
        collectives.close()
        if mean != (world.size - 1) / 2:
            raise Finding(f"{backend}'s mean of the ranks' numbers is {mean}, not {(world.size - 1) / 2}")
    everyone.Free()
    return f"{' and '.join(backends)} averaged over {world.size} ranks"


@check("cores", "set OMPI_MCA_mpi_yield_when_idle=1 (launch/mpirun.sh does)")
def cores() -> str:
    """Check that the ranks of each host have enough cores, or yield them while they wait."""
    from mpi4py import MPI

    mine = (socket.gethostname(), environment.cores(), os.environ.get("OMPI_MCA_mpi_yield_when_idle"))
    everyone = MPI.COMM_WORLD.allgather(mine)
    lines, crowded = [], False
    for host, yields in dict.fromkeys((host, yields) for host, _, yields in everyone):
        theirs = [cores for other, cores, _ in everyone if other == host]
        ranks, num_cores = len(theirs), len(frozenset().union(*theirs))
        crowded |= ranks > num_cores and yields != "1" and "Open MPI" in MPI.Get_library_version()
        lines.append(f"{host}: {_count(ranks, 'rank')} on {_count(num_cores, 'core')}")
    if crowded:
        waits = ": waiting ranks take cores from computing ranks"
        raise Finding("; ".join(lines) + waits, severity=SLOW)
    return "; ".join(lines)


# ---- All of it -------------------------------------------------------------------------------------------

ALONE = (
    python_version,
    torch_version,
    mpi_library,
    thread_level,
    launcher,
    mpi_matches,
    sums_by_horovod,
    sums_by_mpi,
    sums_by_torch,
    graphics_processors,
    launcher_met,
)
TOGETHER = (cores, gpu_of_each_rank, messages, single_copy, all_reduce)


def checks() -> list[Check]:
    """Results of all checks; those that need several ranks run in a job of several ranks only.

    Collective: every rank returns the same list, in which a check is ok if it is ok on all ranks.
    """
    set_fragments()
    found = [examine() for examine in ALONE]
    world = _world()
    if world is None or world.size == 1:
        return found
    found = _merge(world, found)
    if not any(check.prevents for check in found):  # else a rank might not take part
        found += _merge(world, [examine() for examine in TOGETHER])
    return found


def main() -> int:
    """Print a line for each check and advice for failed ones; return 1 if training cannot work, else 0."""
    with _Deadline():
        found = checks()
    bad = any(check.prevents for check in found)
    if _prints():
        width = max(len(check.name) for check in found)
        for check in found:
            verdict = "ok" if check.ok else check.severity
            print(f"{verdict:5}{check.name:{width}}  {check.detail}")
            if check.advice:
                print(f"     {'':{width}}  → {check.advice}")
        sys.stdout.flush()
    return int(bad)


def _prints() -> bool:
    """True on rank 0; if every task is a world of one rank, on Slurm's first task only."""
    world = _world()
    if world is not None and world.size > 1:
        return bool(world.rank == 0)
    return os.environ.get("SLURM_PROCID", "0") == "0"


def _world() -> Any:
    """Return MPI's world, or None if MPI cannot be loaded, which the check `MPI library` reports."""
    try:
        from mpi4py import MPI
    except Exception:
        return None
    return MPI.COMM_WORLD


def _merge(world: Any, mine: list[Check]) -> list[Check]:
    """Merge the lists of all ranks: a check that failed on some rank has failed, and names that rank."""
    by_rank = world.allgather((f"(rank {world.rank}, {socket.gethostname()})", mine))
    merged = list(mine)
    for index in range(len(mine)):
        failed = [(where, theirs[index]) for where, theirs in by_rank if not theirs[index].ok]
        if failed:
            where, check = failed[0]
            everywhere = len(failed) == world.size
            merged[index] = check if everywhere else replace(check, detail=f"{check.detail} {where}")
    return merged


def _make_and_version(text: str) -> str:
    """Return `Open MPI 5.0.11` from the version text of a library or an mpirun."""
    makes = "Open MPI", "Intel", "MVAPICH", "HYDRA", "MPICH"
    make = next((make for make in makes if make in text), text.split("\n")[0][:40])
    version = re.search(r"\d+\.\d+[\w.]*", text)
    return f"{make} {version[0]}" if version else make


def _mpirun() -> str:
    found = mpirun.find_program("mpirun")
    if found is None:
        raise Finding("there is none beside this Python or on the PATH")
    return found


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


class _Deadline:
    """Time limit of the checks: prints a failure and ends the job, in case communication hangs."""

    def __enter__(self) -> None:
        self.timer = threading.Timer(DEADLINE_SECONDS, self.give_up)
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

    def give_up(self) -> None:
        host = socket.gethostname()
        print(
            f"FAIL no answer on {host} for {DEADLINE_SECONDS:.0f} s: the ranks cannot reach each other\n"
            "     → choose the network: OMPI_MCA_btl_tcp_if_include=eth0 (or your interface)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # mpirun then ends the other ranks; MPI_Abort itself might hang


if __name__ == "__main__":
    sys.exit(main())
