"""Networks: hosts with limited links on one machine, which share its cores.

`netcluster` makes them (as root, with iproute2): ../shared/cluster/netcluster or $NETCLUSTER.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jobs

NETCLUSTER = jobs.ROOT / os.environ.get("NETCLUSTER", "../shared/cluster/netcluster")
NUM_HOSTS = 4


@dataclass(frozen=True)
class Hosts:
    """How to start a job there: what goes before its command, and over this process's environment."""

    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def available() -> bool:
    """Whether hosts can be made here."""
    return NETCLUSTER.is_file() and os.geteuid() == 0


@contextmanager
def hosts(rate: str) -> Iterator[Hosts]:
    """NUM_HOSTS hosts for one rank each, with links of `rate` (as tc writes it: 1gbit) between them."""
    _netcluster("up", str(NUM_HOSTS), "--rate", rate)
    try:
        lines = _netcluster("env").replace("export ", "").split()
        names = ",".join(f"h{i}:1" for i in range(1, NUM_HOSTS + 1))
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        environment |= {"HYBRIDPIPE_MPIRUN_FLAGS": f"--host {names}", "PATH": os.environ["PATH"]}
        # The hosts share this machine's cores, which a launcher that counts ranks by host cannot see.
        environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "10"}
        # Whoever polls for a message over TCP is to leave its core to whoever computes: a thread that yields
        # has it again at once (3-1 took 1.3 to 1.5 times as long; within a machine it makes no difference).
        environment |= {"OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep", "OMP_NUM_THREADS": "1"}
        settings = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
        yield Hosts((str(NETCLUSTER), "run", *settings, "h1"), environment)
    finally:
        _netcluster("down")


def _netcluster(*words: str) -> str:
    done = subprocess.run([str(NETCLUSTER), *words], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"netcluster {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
