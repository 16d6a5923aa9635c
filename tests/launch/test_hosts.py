"""A host is lost for good: the training goes on with the ranks of the others, from the last checkpoint.

The hosts are netcluster's, network namespaces on this machine, which want root; without them it is skipped.
"""

import json
import subprocess
import sys
import time

import pytest

from tests.launch import netcluster


@pytest.mark.netcluster
@pytest.mark.timeout(180)
def test_a_training_goes_on_without_the_host_that_is_gone(tmp_path):
    words = [
        "--hosts", "h1:1,h2:1,h3:1", "--min-ranks", "2", "--max-restarts", "1", "--", "train",
        str(netcluster.ROOT / "tests/campaigns/soak.toml"), "--plan", "dp", "--out", str(tmp_path / "out"),
        "--hang-timeout", "5", "--set", "train.epochs=120", "--set", "checkpoint.every=20",
        "--set", "data.args.samples=48",
    ]  # fmt: skip
    metrics = tmp_path / "out" / "metrics.jsonl"
    with netcluster.hosts(3) as env, (tmp_path / "log.txt").open("w") as log:
        launch = [netcluster.NETCLUSTER, "run", "h1", sys.executable, "-m", "hybridpipe", "launch", *words]
        process = subprocess.Popen(launch, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 60
            while not (metrics.exists() and metrics.read_text().count("\n") > 25):
                assert time.monotonic() < end and process.poll() is None, (tmp_path / "log.txt").read_text()
                time.sleep(0.1)
            netcluster.run("stop", "h3")
            process.wait(100)
        finally:
            process.terminate()
            process.wait(60)
            said = (tmp_path / "log.txt").read_text()
    assert process.returncode == 0, said
    assert "no answer from h3: continuing with 2 of 3 ranks" in said, said
    assert "resuming from" in said and "done after 2 attempts" in said.splitlines()[-1], said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["ranks"] == 2 and len(summary["epochs"]) == 120
