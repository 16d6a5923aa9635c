"""Older name of `hybridpipe.launch.mpirun`: `python -m hybridpipe.launcher NUM_RANKS -- COMMAND...`."""

import sys

from hybridpipe.launch.mpirun import *  # noqa: F403
from hybridpipe.launch.mpirun import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
