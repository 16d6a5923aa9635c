"""Jobs: what the benchmarks have in common: `hybridpipe` commands under mpirun, and plots."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from networks import ROOT, Network

HERE = Network((), {})
# Saving in the background is not for nothing where no core is free: at the end of each epoch, of three
# minibatches, `prediction`'s MLP took a quarter longer.
NEVER = "checkpoint.every=1000000"


def train(
    config: str, plan: str | Path, ranks: int, overrides: Sequence[str], out: Path, network: Network = HERE
) -> dict:
    """The summary of training examples/`config`, which saves at its end only."""
    words = ["train", f"examples/{config}", "--plan", str(plan)]
    words += [word for override in (*overrides, NEVER) for word in ("--set", override)]
    return run(words, ranks, out, network)


def run(words: Sequence[str], ranks: int, out: Path, network: Network = HERE) -> dict:
    """The summary of one `hybridpipe` command on several ranks; ends the benchmark where the job fails."""
    command = [*network.prefix, sys.executable, "-m", "hybridpipe.launcher", str(ranks), "--", "hybridpipe"]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("w") as log:
        done = subprocess.run(
            [*command, *words, "--out", str(out)], cwd=ROOT, env=os.environ | network.environment,
            stdout=log, stderr=subprocess.STDOUT, timeout=900,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}; see {out / 'log.txt'}")
    return json.loads((out / "summary.json").read_text())


def svg_axes(**options):
    """A figure that is written as SVG, and its axes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot.subplots(**options)
