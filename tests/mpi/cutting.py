"""A job on three hosts, one of which is cut off in the middle of it. Needs root and `netcluster`."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hybridpipe.launch import mpirun
from tests.mpi import faulting

ROOT = Path(__file__).resolve().parents[2]
NETCLUSTER = Path(os.environ.get("NETCLUSTER", ROOT / "../shared/cluster/netcluster"))
HOSTS = 3


def is_possible() -> bool:
    """Whether this machine can make hosts, and nobody has."""
    return NETCLUSTER.is_file() and os.geteuid() == 0 and not Path("/run/netcluster").exists()


def netcluster(*words: str) -> str:
    """What the command prints."""
    return subprocess.run([str(NETCLUSTER), *words], capture_output=True, text=True, check=True).stdout


def train_and_cut(host: str, plan: str, hang_timeout: float) -> faulting.Ended:
    """Train with a rank on each host; `host` loses its link while rank 0 sleeps in a forward."""
    netcluster("up", str(HOSTS), "--rate", "10gbit")
    try:
        lines = netcluster("env").replace("export ", "").split()
        settings = dict(line.split("=", 1) for line in lines if "=" in line)
        settings |= {"HYBRIDPIPE_FAULT": "rank=0,step=4,point=forward,kind=delay,seconds=2"}
        settings |= {"HYBRIDPIPE_MPIRUN_FLAGS": "--host h1:1,h2:1,h3:1"}
        environment = os.environ | settings
        command, added = mpirun.mpirun_command(
            HOSTS, [sys.executable, str(faulting.PROGRAM), plan, "1f1b", f"{hang_timeout:g}"], environment
        )
        return _run([str(NETCLUSTER), "run", "h1", *command], environment | added, host)
    finally:
        netcluster("down")


def _run(command: list[str], environment: dict[str, str], host: str) -> faulting.Ended:
    with tempfile.TemporaryFile("w+") as output:
        job = mpirun.start(command, environment, stdout=output, stderr=output)
        end = time.monotonic() + faulting.LIMIT_SECONDS
        while (
            "injected delay" not in faulting.read(output)
            and job.process.poll() is None
            and time.monotonic() < end
        ):
            time.sleep(0.05)
        netcluster("stop", host)
        code, seconds, left = faulting.end_of(job)
        return faulting.Ended(code, seconds, faulting.read(output), left)
