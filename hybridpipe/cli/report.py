"""Report: the command that writes the report of a folder and says so.

Not known here: what a report shows. Invariant: what is left out of it is reported.
"""

from pathlib import Path

from hybridpipe.run_folder.report import REPORT, write_report


def report(folder: Path) -> int:
    """Write the report of a training or a comparison, and say so; return exit code 0.

    Raises:
        UserError: the folder is none of a training or a comparison, or the report cannot be written.
    """
    for line in write_report(folder):
        print(f"not in the report: {line}")
    print(f"written to {folder / REPORT}")
    return 0
