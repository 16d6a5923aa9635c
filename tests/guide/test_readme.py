"""README's first example: as printed it trains on two ranks."""

import json
import subprocess
import sys

import pytest

from tests.guide.blocks import PAGES, README, ROOT
from tests.libraries import skip_without_transformers

TELLS = "if trainer.world.rank == 0: print([round(each['loss'], 3) for each in trainer.history], len(state))"


@pytest.mark.jobs
@pytest.mark.timeout(300)
def test_the_first_example_trains(tmp_path):
    skip_without_transformers()
    (first,) = (block.text for block in PAGES[README] if block.language == "python")
    (tmp_path / "train.py").write_text(f"{first}{TELLS}\n")
    launch = [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "2", "--"]
    command = [*launch, "python", str(tmp_path / "train.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    losses, _, keys = done.stdout.splitlines()[-1].rpartition(" ")
    losses = json.loads(losses)
    assert len(losses) == 5 and losses[-1] < losses[0] < 6 and int(keys) == 6 * 12 + 5
