"""A train step stays readable: how many of the package's files it enters, and how often it crosses them.

A step that passes through what is off, or through closures that climb back, cannot be followed by eye
(docs/decisions/0042). A ceiling moves with a decision only.
"""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/programs/files_entered.py"


@pytest.mark.parametrize(
    "more, files, crossings", [((), 24, 205), (("--gpt2",), 31, 450)], ids=["sequential", "recorded"]
)
def test_a_step_enters_few_files(job, tmp_path, more, files, crossings):
    """Two stages, 1F1B, four microbatches, fp32, a mean loss, on the CPU."""
    if more:
        pytest.importorskip("transformers")
    job(2, str(PROGRAM), "--out", str(tmp_path), *more)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(found["calls"]) <= files and found["crossings"] <= crossings, found
