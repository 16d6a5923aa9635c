"""What on the pages no test runs, each with its reason.

Knows the pages only. Invariant: each entry is the beginning of a block or of a command (`test_blocks.py`).
"""

from tests.guide.blocks import Block

# By page and the beginning of the text.
BLOCKS = {
    ("docs/guide/other-schedulers.md", "import os, subprocess, submitit"): "needs submitit; tried with 1.5.4",
    ("docs/guide/spark.md", "from functools import partial"): "tests/launch/test_spark.py runs it, in Spark",
    ("docs/guide/other-schedulers.md", "import runpy, sys, submitit"): "needs submitit; tried with 1.5.4",
}
# On any page: commands of other programs that are no part of this project.
COMMANDS = {
    "git clone <this repository>": "its address is the reader's",
    "cd hybridpipe": "goes with git clone",
    ". .venv/bin/activate": "launch/setup has made it: tests/install/test_setup.py",
    "tensorboard --logdir runs": "a server that stays; tests/callbacks/test_loggers.py reads its files",
    "unshare -rn ": "needs a kernel that lets users make name spaces",
    "sort -u": "of the shell",
    "ssh h2 ": "needs a second host",
}


def is_excused(block: Block) -> bool:
    """True if no test runs the block."""
    return any(block.page == page and block.text.startswith(text) for page, text in BLOCKS)


def is_foreign(command: str) -> bool:
    """True if the command is of a program that is no part of this project."""
    return any(command.startswith(beginning) for beginning in COMMANDS)
