"""Jobs: what the benchmarks have in common: `hybridpipe` commands under mpirun."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from networks import ROOT, Network

HERE = Network((), {})
# Saving in the background is not for nothing where no core is free: at the end of each epoch, of three
# minibatches, `prediction`'s MLP took a quarter longer.
NEVER = "checkpoint.every=1000000"
GRACE_SECONDS = 60.0  # for a launcher to end a job that may hang


def train(
    config: str, plan: str | Path, ranks: int, overrides: Sequence[str], out: Path, network: Network = HERE
) -> dict:
    """The summary of training examples/`config`, which saves at its end only."""
    words = ["train", f"examples/{config}", "--plan", str(plan)]
    words += [word for override in (*overrides, NEVER) for word in ("--set", override)]
    return run(words, ranks, out, network)


def run(words: Sequence[str], ranks: int, out: Path, network: Network = HERE) -> dict:
    """The summary of one `hybridpipe` command on several ranks; ends the benchmark where the job fails."""
    command = [
        *network.prefix,
        sys.executable,
        "-m",
        "hybridpipe.launch.mpirun",
        str(ranks),
        "--",
        "hybridpipe",
    ]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("w") as log:
        words = [*words, "--out", str(out)]
        code = finished(
            [*command, *words], network.environment, 900, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if code:
        raise SystemExit(f"{' '.join(words)}: exit code {code}; see {out / 'log.txt'}")
    return json.loads((out / "summary.json").read_text())


def finished(
    command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float, **streams: Any
) -> subprocess.CompletedProcess:
    """Run a launcher. Whatever ends the wait for it, also an exception, ends its job first.

    The launcher itself is killed only where it does not end: then nobody would end the ranks.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **streams)
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except BaseException:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
