"""Networks: where benchmarks run their jobs, which is this machine alone or hosts with limited links.

The hosts are network namespaces on this machine that the program `netcluster` makes, as root. They share its
processors and memory. Where $HYBRIDPIPE_MPIRUN_FLAGS names hosts, those are taken as they are.
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
    """How a job is started there: before its command, and in its environment."""

    prefix: tuple[str, ...]
    environment: Mapping[str, str]

    def with_flags(self, flags: str) -> "Network":
        """With more words for mpirun."""
        before = self.environment.get(FLAGS, os.environ.get(FLAGS, ""))
        return self.with_settings({FLAGS: f"{before} {flags}".strip()})

    def with_settings(self, settings: Mapping[str, str]) -> "Network":
        """With more variables in the environment of every rank."""
        environment = {**self.environment, **settings}
        return _hosted(self.prefix[0], environment) if self.prefix else Network((), environment)


HERE = Network((), {})


def are_available(netcluster: Path = NETCLUSTER) -> bool:
    """Whether there are hosts, or this machine can make them."""
    return FLAGS in os.environ or (netcluster.is_file() and os.geteuid() == 0)


@contextmanager
def network(
    name: str, netcluster: Path = NETCLUSTER, num_hosts: int = 4, ranks_per_host: int = 1
) -> Iterator[Network]:
    """`LOOPBACK`, or a rate such as "1gbit" of every host's link."""
    if name == LOOPBACK or FLAGS in os.environ:
        yield HERE
        return
    with _hosts(str(netcluster), name, num_hosts), _without_autogroups():
        lines = _netcluster(str(netcluster), "env").replace("export ", "").split()
        hosts = ",".join(f"h{i}:{ranks_per_host}" for i in range(1, num_hosts + 1))
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        environment |= {FLAGS: f"--host {hosts}", "PATH": os.environ["PATH"]}
        # The hosts share this machine's cores, which a launcher that counts ranks by host cannot see.
        environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "3"}
        # Whoever polls for a message over TCP is to leave its core to whoever computes: a thread that yields
        # has it again at once (3-1 took 1.3 to 1.5 times as long; within a machine it makes no difference).
        environment |= {"OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep", "OMP_NUM_THREADS": "1"}
        yield _hosted(str(netcluster), environment)


@contextmanager
def _hosts(netcluster: str, rate: str, num_hosts: int) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without taking the hosts down
    try:
        _netcluster(netcluster, "up", str(num_hosts), "--rate", rate)
        yield
    finally:
        _netcluster(netcluster, "down")
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_autogroups() -> Iterator[None]:
    """The kernel shares cores out among sessions, and each emulated host is one; real hosts share none.

    With autogroups a rank that could run waited for a core up to 140 ms while the others computed: four ranks
    of the GPT under dp over 100 Mbit/s took 771 and 787 ms a minibatch, without 701 and 716.
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
    """On the first host, which the environment is carried into."""
    settings = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
    return Network((netcluster, "run", *settings, "h1"), environment)


def _netcluster(netcluster: str, *words: str) -> str:
    done = subprocess.run([netcluster, *words], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"netcluster {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
