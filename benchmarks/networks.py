"""Networks: this machine alone, or hosts with limited links, for the jobs of benchmarks.

The hosts are network namespaces of this machine, made by the program `netcluster` as root; they share its
processors and memory. Where $HYBRIDPIPE_MPIRUN_FLAGS names hosts, those are used as they are.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NETCLUSTER = Path(os.environ.get("NETCLUSTER", ROOT / "../shared/cluster/netcluster"))
LOOPBACK = "loopback"
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
FLAGS = "HYBRIDPIPE_MPIRUN_FLAGS"


@dataclass(frozen=True)
class Network:
    """A network, as the start of a job there."""

    prefix: tuple[str, ...]  # words before the job's command
    environment: Mapping[str, str]

    def with_flags(self, flags: str) -> "Network":
        """Return the network with more options for mpirun."""
        before = self.environment.get(FLAGS, os.environ.get(FLAGS, ""))
        return self.with_settings({FLAGS: f"{before} {flags}".strip()})

    def with_settings(self, settings: Mapping[str, str]) -> "Network":
        """Return the network with more variables in the environment of every rank."""
        environment = {**self.environment, **settings}
        return _hosted(self.prefix[0], environment) if self.prefix else Network((), environment)


HERE = Network((), {})


def are_available(netcluster: Path = NETCLUSTER) -> bool:
    """True if hosts are named, or this machine can make them."""
    return FLAGS in os.environ or (netcluster.is_file() and os.geteuid() == 0)


@contextmanager
def network(
    name: str, netcluster: Path = NETCLUSTER, num_hosts: int = 4, ranks_per_host: int = 1
) -> Iterator[Network]:
    """Make a network for the block.

    Args:
        name: `LOOPBACK`, or the rate of every host's link, such as "1gbit".
    """
    if name == LOOPBACK or FLAGS in os.environ:
        yield HERE
        return
    with _hosts(str(netcluster), name, num_hosts), _without_autogroups():
        lines = _netcluster(str(netcluster), "env").replace("export ", "").split()
        hosts = ",".join(f"h{i}:{ranks_per_host}" for i in range(1, num_hosts + 1))
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        environment |= {FLAGS: f"--host {hosts}", "PATH": os.environ["PATH"]}
        # The hosts share this machine's cores; a launcher that counts ranks by host does not know that.
        environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "3"}
        # A rank that polls for a message over TCP should leave its core to ranks that compute. By default it
        # gets the core back at once: plan 3-1 took 1.3 to 1.5 times as long. Within a machine times are
        # equal.
        environment |= {"OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep", "OMP_NUM_THREADS": "1"}
        yield _hosted(str(netcluster), environment)


@contextmanager
def _hosts(netcluster: str, rate: str, num_hosts: int) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are taken down first
    try:
        _netcluster(netcluster, "up", str(num_hosts), "--rate", rate)
        yield
    finally:
        _netcluster(netcluster, "down")
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_autogroups() -> Iterator[None]:
    """Switch the kernel's autogroups off, which divide cores among sessions: each emulated host is one.

    With autogroups a rank waited for a core for up to 140 ms while the others computed. Four ranks of the GPT
    under dp over 100 Mbit/s took 771 and 787 ms a minibatch, and 701 and 716 ms without.
    """
    before = AUTOGROUP.read_text() if AUTOGROUP.is_file() else None
    if before is not None:
        AUTOGROUP.write_text("0")
    try:
        yield
    finally:
        if before is not None:
            AUTOGROUP.write_text(before)


def _hosted(netcluster: str, environment: Mapping[str, str]) -> Network:
    """Return the network whose launcher runs on the first host, with the environment."""
    settings = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
    return Network((netcluster, "run", *settings, "h1"), environment)


def _netcluster(netcluster: str, *words: str) -> str:
    done = subprocess.run([netcluster, *words], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"netcluster {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
