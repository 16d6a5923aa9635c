"""Programs: starts one of peer_programs/ as a job under mpirun, and reads what its ranks report."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jobs
from networks import ROOT, Network
from rounds import Outcome, steady_seconds

FOLDER = ROOT / "benchmarks" / "peer_programs"
TIMEOUT_SECONDS = 150


@dataclass(frozen=True)
class Way:
    """To train: a program and its variant on so many ranks. Its name is for tables and folders."""

    name: str
    program: str
    variant: str = ""
    ranks: int = 2


def start(
    way: Way,
    task: str,
    group: str,
    number: int,
    out: Path,
    *,
    arguments: Sequence[str] = (),
    network: Network = jobs.HERE,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run one job of a round and see what came of it; one that fails is an outcome, too."""
    command = [*network.prefix, sys.executable, "-m", "hybridpipe.launch.mpirun", str(way.ranks), "--"]
    command += [sys.executable, str(FOLDER / f"{way.program}.py"), task, "--variant", way.variant]
    command += [*arguments, "--out", str(out)]
    out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environment or {})}
    environment |= network.environment
    with (out / "log.txt").open("w") as log:
        try:
            code = jobs.finished(
                command, environment, TIMEOUT_SECONDS, stdout=log, stderr=subprocess.STDOUT
            ).returncode
        except subprocess.TimeoutExpired:
            return Outcome(group, way.name, number, error=f"took more than {TIMEOUT_SECONDS} s")
    load = os.getloadavg()[0]
    if code:
        return Outcome(group, way.name, number, error=reason((out / "log.txt").read_text()), load=load)
    reports = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(way.ranks)]
    return merged(reports, Outcome(group, way.name, number, load=load))


def merged(reports: Sequence[dict], outcome: Outcome) -> Outcome:
    """The slowest rank's time, and the sum of all ranks' parts of the last loss."""
    losses = [report["losses"][-1] for report in reports if report["losses"]]
    return Outcome(
        outcome.group,
        outcome.way,
        outcome.round,
        max(steady_seconds(report["seconds"]) for report in reports),
        sum(losses) if losses else None,
        reports[0].get("plan", ""),
        load=outcome.load,
    )


def reason(log: str) -> str:
    """The error that a log tells of, in one line."""
    errors = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*)$", log, re.MULTILINE)
    return errors[0][:200] if errors else (log.strip().splitlines() or ["no output"])[-1][:200]
