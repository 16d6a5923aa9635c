"""Jobs: starts `hybridpipe` commands and programs/ under mpirun, and reads their results.

Not known here: the benchmarks. Invariant: a job that is given up is ended before the next one starts.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networks
from networks import HERE, ROOT, Network
from results import Row, steady_seconds

PROGRAMS = ROOT / "benchmarks" / "programs"
# Saving in the background costs time where no core is free: with a checkpoint after each epoch of three
# minibatches, the MLP of `prediction` took a quarter longer.
NEVER = "checkpoint.every=1000000"
GRACE_SECONDS = 60.0  # for a launcher to end a job that may hang
COMMAND_SECONDS, PROGRAM_SECONDS = 900.0, 150.0


@dataclass(frozen=True)
class Run:
    """One round of a benchmark: its number, the folder of its jobs, and the command line's options."""

    out: Path
    round: int
    options: argparse.Namespace

    def wants(self, group: str, way: str) -> bool:
        """True if "GROUP: WAY" matches every --only."""
        return all(re.search(pattern, f"{group}: {way}") for pattern in self.options.only)

    def network(
        self, name: str, num_hosts: int = 4, ranks_per_host: int = 1
    ) -> AbstractContextManager[Network]:
        """Make the network of that name with the program of --netcluster."""
        return networks.network(name, self.options.netcluster, num_hosts, ranks_per_host)


@dataclass(frozen=True)
class Way:
    """A way to train: a program, its variant and its number of ranks. The name is for tables and folders."""

    name: str
    program: str
    variant: str = ""
    ranks: int = 2


def train(
    config: str, plan: str | Path, ranks: int, overrides: Sequence[str], out: Path, network: Network = HERE
) -> dict:
    """Train examples/`config`, with a checkpoint at the end only, and return the summary."""
    words = ["train", f"examples/{config}", "--plan", str(plan)]
    words += [word for override in (*overrides, NEVER) for word in ("--set", override)]
    return command(words, ranks, out, network)


def command(words: Sequence[str], ranks: int, out: Path, network: Network = HERE) -> dict:
    """Run a `hybridpipe` command on several ranks and return its summary.

    Raises:
        SystemExit: the job has failed.
    """
    hybridpipe = [sys.executable, "-m", "hybridpipe", *words, "--out", str(out)]
    code = _logged(hybridpipe, ranks, out, network, {}, COMMAND_SECONDS)
    if code:
        raise SystemExit(f"{' '.join(words)}: exit code {code}; see {out / 'log.txt'}")
    return json.loads((out / "summary.json").read_text())


def program(
    name: str,
    arguments: Sequence[str],
    ranks: int,
    out: Path,
    environment: Mapping[str, str] | None = None,
    network: Network = HERE,
    limit_seconds: float = COMMAND_SECONDS,
) -> None:
    """Run one of programs/, which writes into `out`.

    Raises:
        SystemExit: the job has failed.
    """
    words = [sys.executable, str(PROGRAMS / f"{name}.py"), *arguments, "--out", str(out)]
    code = _logged(words, ranks, out, network, environment or {}, limit_seconds)
    if code:
        raise SystemExit(f"{name}: exit code {code}; see {out / 'log.txt'}")


def start(
    way: Way,
    task: str,
    group: str,
    number: int,
    out: Path,
    *,
    arguments: Sequence[str] = (),
    network: Network = HERE,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = PROGRAM_SECONDS,
) -> Row:
    """Train a task one way in round `number`; the row of a job that fails holds its error."""
    words = [sys.executable, str(PROGRAMS / f"{way.program}.py"), task, "--variant", way.variant]
    words += [*arguments, "--out", str(out)]
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environment or {})}
    try:
        code = _logged(words, way.ranks, out, network, settings, limit_seconds)
    except subprocess.TimeoutExpired:
        return Row(group, way.name, number, error=f"took more than {limit_seconds:g} s")
    if code:
        return Row(group, way.name, number, error=reason((out / "log.txt").read_text()))
    reports = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(way.ranks)]
    return Row(group, way.name, number, merged(reports))


def merged(reports: Sequence[dict]) -> dict[str, Any]:
    """Merge the ranks' reports: the largest time, the sum of the last losses, and rank 0's other figures.

    Processor seconds, which some programs report, are summed over the ranks.
    """
    losses = [report["losses"][-1] for report in reports if report["losses"]]
    merged_here = ("seconds", "losses", "processor")
    told = {name: value for name, value in reports[0].items() if name not in merged_here}
    if all("processor" in report for report in reports):
        told["processor"] = sum(steady_seconds(report["processor"]) for report in reports)
    return {
        "seconds": max(steady_seconds(report["seconds"]) for report in reports),
        "loss": sum(losses) if losses else None,
        **told,
    }


def reason(log: str) -> str:
    """Return the first error of a log in one line."""
    errors = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*)$", log, re.MULTILINE)
    return errors[0][:200] if errors else (log.strip().splitlines() or ["no output"])[-1][:200]


def _logged(
    words: Sequence[str],
    ranks: int,
    out: Path,
    network: Network,
    environment: Mapping[str, str],
    limit_seconds: float,
) -> int:
    """Run a job with its output in `out`/log.txt, and return its exit code."""
    launcher = [*network.prefix, sys.executable, "-m", "hybridpipe.launch.mpirun", str(ranks), "--"]
    settings = {**environment, **network.environment}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        return finished([*launcher, *words], settings, limit_seconds, **streams).returncode


def finished(
    words: Sequence[str], environment: Mapping[str, str], limit_seconds: float, **streams: Any
) -> subprocess.CompletedProcess:
    """Run a launcher to its end. An exception meanwhile, such as the time limit, ends its job first.

    The launcher is killed only if it does not end by itself, because the ranks would be left then.
    """
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | environment, **streams)
    try:
        output, errors = process.communicate(timeout=limit_seconds)
    except BaseException:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)
