"""Is this machine ready? One check for each thing that has to be right, and what to do where it is not.

    hybridpipe doctor                                            alone
    python -m hybridpipe.launch.mpirun 4 -- hybridpipe doctor         the same job as a training: really sends

A check is a function that returns what it found, or raises: any exception, a failing import above all,
becomes a failed check and never a traceback. So nothing heavy is imported outside of the checks.
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
from hybridpipe.errors import REMEDIES, TRAINING
from hybridpipe.launch import mpirun

TORCH_FROM, TORCH_BELOW = (2, 6), (2, 14)  # as in pyproject.toml, which says why
SETUP = "run hybridpipe setup"
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str
    advice: str = ""  # a command or a setting that helps; empty when ok
    needed: bool = True  # training cannot work without it; otherwise it is slower


class Problem(Exception):
    """What is wrong and, where the check's own advice does not fit, what to do."""

    def __init__(self, detail: str, advice: str = "") -> None:
        super().__init__(detail)
        self.advice = advice


def check(name: str, advice: str, needed: bool = True) -> Callable[[Callable[[], str]], Callable[[], Check]]:
    def decorate(examine: Callable[[], str]) -> Callable[[], Check]:
        @functools.wraps(examine)
        def examined() -> Check:
            try:
                return Check(name, True, examine(), needed=needed)
            except Exception as error:
                detail = str(error).strip().splitlines() or [type(error).__name__]
                missing = REMEDIES.get(getattr(error, "name", None) or "")
                return Check(name, False, detail[0], getattr(error, "advice", missing) or advice, needed)

        return examined

    return decorate


# ---- Alone ---------------------------------------------------------------------------------------------


@check("Python", "PYTHON=/path/to/python3.11 launch/setup")
def python_version() -> str:
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        raise Problem(f"{platform.python_version()} is not 3.11 or 3.12")
    return f"{platform.python_version()} at {sys.executable}"


@check("torch", TRAINING)
def torch_version() -> str:
    import torch

    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not TORCH_FROM <= found < TORCH_BELOW:
        wanted = f"torch>={'.'.join(map(str, TORCH_FROM))},<{'.'.join(map(str, TORCH_BELOW))}"
        raise Problem(f"{torch.__version__} is not {wanted}", f"pip install '{wanted}' && hybridpipe setup")
    threads, devices = torch.get_num_threads(), torch.cuda.device_count()
    return f"{torch.__version__}, {_count(threads, 'thread')}, {_count(devices, 'CUDA device')}"


@check("MPI library", SETUP)
def mpi_library() -> str:
    from mpi4py import MPI

    with open("/proc/self/maps") as maps:
        loaded = sorted({line.split()[-1] for line in maps if re.search(r"/libmpi\b[^/]*$", line)})
    if len(loaded) > 1:
        raise Problem(f"two at once: {', '.join(loaded)}", "unset LD_LIBRARY_PATH, then hybridpipe setup")
    return f"{_make_and_version(MPI.Get_library_version())} at {', '.join(loaded) or 'a place unknown'}"


@check("thread level", "use an MPI that was built with MPI_THREAD_MULTIPLE, and import mpi4py before Horovod")
def thread_level() -> str:
    from mpi4py import MPI

    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise Problem("MPI_THREAD_MULTIPLE is not provided: threads of one rank could not send side by side")
    return "MPI_THREAD_MULTIPLE"


@check("mpirun", f"{SETUP}, or put the MPI's bin folder on the PATH (module load openmpi)")
def launcher() -> str:
    return f"{_make_and_version(mpirun.mpirun_version(_mpirun()))} at {_mpirun()}"


@check("one MPI", "put the mpirun of the MPI library first on the PATH, then hybridpipe setup")
def mpi_matches() -> str:
    from mpi4py import MPI

    started = _make_and_version(mpirun.mpirun_version(_mpirun()))
    loaded = _make_and_version(MPI.Get_library_version())
    # MPICH's descendants all start with an mpirun called HYDRA, whose number is not the library's.
    comparable = "HYDRA" not in started or "MPICH" in loaded
    if comparable and started.replace("HYDRA", "MPICH") != loaded:
        raise Problem(f"mpirun is {started} but the library is {loaded}: each rank would think to be alone")
    return "mpirun and the library belong together"


@check("Horovod", SETUP)
def horovod() -> str:
    from mpi4py import MPI  # noqa: F401  before Horovod: it asks MPI for THREAD_MULTIPLE

    import horovod  # isort: skip
    import horovod.torch as hvd

    if not hvd.mpi_built():
        raise Problem(f"{horovod.__version__} has no MPI", "pip uninstall horovod, then hybridpipe setup")
    return f"{horovod.__version__}, built with MPI and torch"


@check("launcher", "srun --mpi=pmix (`srun --mpi=list` shows what this Slurm has), or mpirun")
def launcher_met() -> str:
    from mpi4py import MPI

    size, promised = MPI.COMM_WORLD.size, environment.promised_ranks()
    if promised is not None and size < promised:
        raise Problem(f"it started {promised} ranks, and each sees a world of {size}")
    return f"a world of {size} as started" if promised else "none: this is one process"


# ---- Together: these send, so all ranks or none call them ---------------------------------------------


@check("messages", "mpirun --mca pml ob1 --mca btl tcp,self shows whether it is the network")
def messages() -> str:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent, received = f"{world.rank:08}".encode() * 2**17, bytearray(2**20)  # too long to be sent eagerly
    world.Sendrecv(sent, right, recvbuf=received, source=left)
    if received[-8:] != f"{left:08}".encode():
        raise Problem(f"rank {world.rank} got other bytes than rank {left} sent")
    return "1 MiB went round from rank to rank"


@check("all-reduce", SETUP)
def all_reduce() -> str:
    from mpi4py import MPI

    import horovod.torch as hvd  # isort: skip
    import torch

    world = MPI.COMM_WORLD
    hvd.init(comm=world.Dup())
    mean = float(hvd.allreduce(torch.tensor([float(world.rank)]), name="doctor"))
    if mean != (world.size - 1) / 2:
        raise Problem(f"Horovod's mean of the ranks' numbers is {mean}, not {(world.size - 1) / 2}")
    return f"Horovod averaged over {world.size} ranks"


# Whether the cores suffice is a question about all ranks of a host, so rank 0 answers it for them.
@check("cores", "set OMPI_MCA_mpi_yield_when_idle=1 (launch/mpirun.sh does)", needed=False)
def cores() -> str:
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
        raise Problem("; ".join(lines) + ": waiting ranks take the cores from those that compute")
    return "; ".join(lines)


# ---- All of it -------------------------------------------------------------------------------------------

ALONE = (
    python_version,
    torch_version,
    mpi_library,
    thread_level,
    launcher,
    mpi_matches,
    horovod,
    launcher_met,
)
TOGETHER = (cores, messages, all_reduce)


def checks() -> list[Check]:
    """All checks of this process, and in a job of several ranks those that need all of them.

    Collective in that case: every rank gets the same list, where a check is ok when it is so on all ranks.
    """
    found = [examine() for examine in ALONE]
    world = _world()
    if world is None or world.size == 1:
        return found
    found = _merge(world, found)
    if all(check.ok for check in found if check.needed):  # else some rank might not take part
        found += _merge(world, [examine() for examine in TOGETHER])
    return found


def main() -> int:
    """Prints a line for each check, and advice below those that fail; 1 when something needed is missing."""
    with _Deadline():
        found = checks()
    bad = any(check.needed and not check.ok for check in found)
    if _speaks():
        width = max(len(check.name) for check in found)
        for check in found:
            verdict = "ok" if check.ok else "FAIL" if check.needed else "slow"
            print(f"{verdict:5}{check.name:{width}}  {check.detail}")
            if check.advice:
                print(f"     {'':{width}}  → {check.advice}")
        sys.stdout.flush()
    return int(bad)


def _speaks() -> bool:
    """Rank 0. Where launcher and MPI did not meet, all believe to be that: then only Slurm's first task."""
    world = _world()
    if world is not None and world.size > 1:
        return bool(world.rank == 0)
    return os.environ.get("SLURM_PROCID", "0") == "0"


def _world() -> Any:
    """MPI's world, or None where MPI cannot be loaded (the check `MPI library` has said so)."""
    try:
        from mpi4py import MPI
    except Exception:
        return None
    return MPI.COMM_WORLD


def _merge(world: Any, mine: list[Check]) -> list[Check]:
    """One list from those of all ranks: what failed anywhere failed, and names where."""
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
    """`Open MPI 5.0.11` from the many words of a library or an mpirun."""
    makes = "Open MPI", "Intel", "MVAPICH", "HYDRA", "MPICH"
    make = next((make for make in makes if make in text), text.split("\n")[0][:40])
    version = re.search(r"\d+\.\d+[\w.]*", text)
    return f"{make} {version[0]}" if version else make


def _mpirun() -> str:
    found = mpirun.find_program("mpirun")
    if found is None:
        raise Problem("there is none beside this Python and none on the PATH")
    return found


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


class _Deadline:
    """A doctor must not hang where the machine does: after a minute it says so and ends the job."""

    def __enter__(self) -> None:
        self.timer = threading.Timer(DEADLINE_SECONDS, self.give_up)
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

    def give_up(self) -> None:
        host = socket.gethostname()
        print(
            f"FAIL no answer on {host} for {DEADLINE_SECONDS:.0f} s: the ranks do not reach each other\n"
            "     → choose the network: OMPI_MCA_btl_tcp_if_include=eth0 (or your interface)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # mpirun then ends the other ranks; MPI_Abort itself might hang


if __name__ == "__main__":
    sys.exit(main())
