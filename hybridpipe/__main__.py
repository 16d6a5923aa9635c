"""Entry point of `python -m hybridpipe`, which is the command `hybridpipe`."""

import signal
import sys

if sys.argv[1:2] in (["launch"], ["train"]):  # a notice waits until they listen; importing takes a while
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

from hybridpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
