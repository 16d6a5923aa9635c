"""What hybridpipe tells in the output of a job.

Knows no job. Invariant: a line counts wherever it begins, as mpirun now and then forwards a stray byte first.
"""

import re


def own_lines(output: str) -> list[str]:
    """Return the lines that name hybridpipe, from its name on."""
    return re.findall(r"hybridpipe: .*", output)
