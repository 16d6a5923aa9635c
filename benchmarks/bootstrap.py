"""Bootstrap: sets hybridpipe up from a bundle and continues in its environment, on a machine without one.

Standard library only. Invariant: where hybridpipe's environment is there, nothing is done.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "mpi4py", "horovod", "tabulate", "hybridpipe")
OPTION = "--from"


def enter(arguments: Sequence[str]) -> None:
    """Set up from the folder behind `--from`, and start this program again in the environment.

    Raises:
        SystemExit: set-up fails.
    """
    if OPTION not in arguments[:-1] or not missing():
        return
    folder = arguments[arguments.index(OPTION) + 1]
    print(f"benchmarks: {', '.join(missing())} missing: launch/setup --from {folder}", file=sys.stderr)
    words = [str(ROOT / "launch" / "setup"), "--system-site-packages", OPTION, folder]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    python = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not python:
        raise SystemExit(f"benchmarks: set-up failed, exit code {done.returncode}")
    os.execv(python, [python, *sys.argv])


def missing() -> list[str]:
    """Return the packages that this Python does not find."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]
