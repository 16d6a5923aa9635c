"""Real networks on real data learn, under every plan alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian puts it


@pytest.mark.timeout(600)
def test_the_quick_start_learns_the_digits(tmp_path):
    """What launch/quickstart runs, without the baseline and for fewer epochs."""
    command = [sys.executable, "-m", "hybridpipe", "compare", EXAMPLES / "digits.toml", "--ranks", "4"]
    command += ["--set", "train.epochs=6"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert runs.keys() == {"auto", "dp", "straight"}
    assert runs["auto"]["metrics"]["accuracy"] >= 0.95
    for run in runs.values():
        assert run["loss_last"] == pytest.approx(runs["auto"]["loss_last"], abs=1e-4)  # float32


@pytest.mark.parametrize("schedule, plan", [("1f1b", "2-1"), ("pipedream", "1-1-1"), ("pipedream", "2-1")])
def test_a_training_ends_at_its_target_on_all_ranks_alike(job, schedule, plan):
    assert "reached after" in job(3, "target.py", schedule, plan).stdout


@pytest.mark.timeout(900)
@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist(job, tmp_path):
    job(4, "hybridpipe", "train", str(EXAMPLES / "fashion.toml"), "--out", str(tmp_path), timeout_seconds=800)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["epochs_to_target"] <= 15 and summary["metrics"]["accuracy"] >= 0.88
