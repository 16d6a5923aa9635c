"""The programs on the page of sharp bits print what the page says.

Those that end no job run in one, one after the other. Invariant: words are those of the page; numbers may
differ by 0.1 %, times, hashes and hosts at all.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridpipe.launch import mpirun
from tests.guide.blocks import PAGES

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(300)]
PAGE = PAGES["docs/guide/sharp-bits.md"]
# Runs the programs that it is given, each as if it were alone, with next to no measuring.
RUN = """
import sys, traceback
from functools import partial
import hybridpipe
from hybridpipe.comm.mpi import MPI
from hybridpipe.measure import turns

turns.MAX_REPEATS = 2
machines = hybridpipe.Cluster.flat(MPI.COMM_WORLD.size, 1e9, 1e-5)
hybridpipe.Trainer = partial(hybridpipe.Trainer, cluster=machines)

def say(*words):
    if MPI.COMM_WORLD.rank == 0:
        print(*words, flush=True)

for name in sys.argv[1:]:
    names = {}
    sys.modules.pop("toy", None)
    exec("from toy import *", names)
    say("==", name)
    try:
        exec(compile(open(f"{name}.py").read(), f"{name}.py", "exec"), names)
    except Exception as error:
        say(*traceback.format_exception_only(error))
    if trainer := names.get("trainer"):
        trainer.close()
"""
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
VARYING = re.compile(r"\d+(?= ms\b)|\d+(?= s\b)|\b[0-9a-f]{8}\b|(?<=on host )[\w-]+|(?<=reported by rank )\d")


class Bit(NamedTuple):
    """A program of the page, and the lines that it prints."""

    name: str
    program: str
    told: list[str]

    @property
    def ends_the_job(self) -> bool:
        """True if another program cannot follow it."""
        return any(line.endswith("ending the job") for line in self.told)

    @property
    def ranks(self) -> int:
        """The ranks that it runs on: two, or as many as what it prints names."""
        return 1 + max(1, *map(int, re.findall(r"\brank (\d)", " ".join(self.told))), 0)


def bits() -> Iterator[Bit]:
    """Yield the programs that are followed by what they print."""
    for block, behind in pairwise(PAGE):
        if (block.language, behind.language) == ("python", "text"):
            yield Bit(f"bit_{block.line}", block.text, behind.text.splitlines())


BITS = list(bits())


def is_told(line: str, printed: str) -> bool:
    """True if a line of the page is what was printed."""
    wanted, found = ([float(each) for each in NUMBER.findall(text)] for text in (line, printed))
    words = (VARYING.sub("~", NUMBER.sub("~", text)) for text in (line, printed))
    pattern, text = next(words), next(words)
    same = re.fullmatch(re.escape(pattern).replace(r"\.\.\.", ".*"), text.strip())
    return bool(same) and len(wanted) == len(found) and found == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def run(folder: Path, bits: list[Bit]) -> str:
    """What a job prints that runs the programs."""
    (folder / "toy.py").write_text(PAGE[0].text)
    (folder / "run.py").write_text(RUN)
    for bit in bits:
        (folder / f"{bit.name}.py").write_text(bit.program)
    command = [sys.executable, "run.py", *(bit.name for bit in bits)]
    ranks = max(bit.ranks for bit in bits)
    job = mpirun.run(
        ranks, command, timeout_seconds=200, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return job.stdout


def check(bit: Bit, printed: str) -> None:
    """Check that the lines of the page are among those that were printed, in their order."""
    lines = iter(printed.splitlines())
    for line in bit.told:
        assert any(is_told(line, each) for each in lines), f"{bit.name}: not printed: {line}\n{printed}"


def test_programs_that_go_on_print_what_the_page_says(tmp_path):
    going_on = [bit for bit in BITS if not bit.ends_the_job]
    printed = run(tmp_path, going_on)
    for bit, behind in zip(going_on, [*going_on[1:], None]):
        part = printed.partition(f"== {bit.name}\n")[2]
        check(bit, part.partition(f"== {behind.name}\n")[0] if behind else part)


def test_programs_that_end_their_job_print_what_the_page_says(tmp_path):
    ending = [bit for bit in BITS if bit.ends_the_job]
    folders = [tmp_path / bit.name for bit in ending]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as at_once:  # most of their time they wait
        jobs = list(at_once.map(run, folders, [[bit] for bit in ending]))
    for bit, printed in zip(ending, jobs):
        check(bit, printed)
