"""Jobs: what the benchmarks that train have in common: `hybridpipe train` under mpirun, and plots."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def train(
    config: str,
    plan: str | Path,
    ranks: int,
    overrides: Sequence[str],
    out: Path,
    *,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict:
    """The summary of one job on examples/`config`; ends the benchmark where the job fails.

    Args:
        prefix: of the command, such as one that enters another host.
        environment: goes over this process's.
    """
    command = [*prefix, sys.executable, "-m", "hybridpipe.launcher", str(ranks), "--"]
    command += ["hybridpipe", "train", f"examples/{config}", "--plan", str(plan), "--out", str(out)]
    command += [word for override in overrides for word in ("--set", override)]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("w") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | (environment or {}),
            stdout=log, stderr=subprocess.STDOUT, timeout=900,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{config}, {plan}: exit code {done.returncode}; see {out / 'log.txt'}")
    return json.loads((out / "summary.json").read_text())


def svg_axes(**options):
    """A figure that is written as SVG, and its axes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot.subplots(**options)
