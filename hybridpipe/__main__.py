"""Entry point of `python -m hybridpipe`, which is the command `hybridpipe`."""

import sys

from hybridpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
