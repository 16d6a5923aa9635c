"""`hybridpipe launch` above a real training: asked to stop it saves and says 75, and goes on where it was."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "benchmarks" / "soak.toml"


@pytest.mark.timeout(180)
def test_a_training_that_is_asked_to_stop_goes_on_where_it_was(tmp_path):
    out = tmp_path / "out"
    plan = {"format": "hybridpipe-plan/1", "num_layers": 6, "schedule": "pipedream", "num_microbatches": 1}
    stages = [{"start": 0, "stop": 3, "ranks": [0]}, {"start": 3, "stop": 6, "ranks": [1]}]
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "stages": stages}))
    words = ["train", str(CONFIG), "--plan", str(tmp_path / "plan.json"), "--out", str(out)]
    launch = [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "2", "--"]

    # So many samples that the epoch is not over before the signal comes; the order of the data depends on
    # their number, so what goes on is the same training.
    words += ["--set", "data.args.samples=4000", "--set", "train.epochs=1"]
    process = subprocess.Popen(launch + words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, end = out / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "SIGTERM: asking the job to save and stop" in said
    assert "exit code 75: start it again with --resume auto" in said.splitlines()[-1]
    assert not list(out.glob(".launch-*")), "what the ranks have told is cleared away"
    (saved,) = out.glob("checkpoints/step-*")
    step = int(saved.name[5:])
    assert 0 < step < 500

    done = subprocess.run([*launch, *words, "--resume", "auto"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert f"resuming from {saved}: step {step}" in done.stdout
    records = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert records == list(range(500)), "every minibatch once"
