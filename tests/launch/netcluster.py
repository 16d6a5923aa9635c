"""Hosts on this machine for tests: netcluster, for one test at a time, and gone afterwards."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETCLUSTER = Path(os.environ.get("NETCLUSTER", ROOT / "../shared/cluster/netcluster"))
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextmanager
def hosts(num_hosts: int, *options: str, needs: Sequence[str] = ("ip", "tc")) -> Iterator[dict[str, str]]:
    """An environment in which they can be used; skips the test where there can be none."""
    missing = [name for name in needs if shutil.which(name, path=PATH) is None]
    if not NETCLUSTER.is_file() or os.geteuid() != 0 or missing:
        pytest.skip(f"needs netcluster, root and {', '.join(missing) or 'programs that are all there'}")
    with open("/tmp/netcluster.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        up = run("up", str(num_hosts), *options)
        try:
            assert up.returncode == 0, up.stderr
            exports = dict(re.findall(r"(\w+)=(\S+)", run("env").stdout))
            yield {**os.environ, **exports, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        finally:
            run("down")


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """One command of netcluster. Its daemons keep what they inherit, so it goes to a file."""
    return subprocess.run([str(NETCLUSTER), *arguments], capture_output=True, text=True, timeout=60)
