"""Cuts: where the peers' models are cut into stages, by our profile."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import jobs
import programs

from hybridpipe.files import read_profile


def balanced(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Where to cut layers that take so long, so that the longest stage is as short as can be."""

    def longest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))

    return min(combinations(range(1, len(seconds)), num_stages - 1), key=longest)


def cuts(
    model: str, num_stages: int, num_microbatches: int, environment: Mapping[str, str], out: Path
) -> tuple[int, ...]:
    """The best balanced by the profile in `out`, measured when first asked for: the same in later calls."""
    folder = out / f"{num_microbatches}-microbatches"
    if not (folder / "profile.json").is_file():
        _measure(model, num_microbatches, environment, folder)
    seconds = [
        num_microbatches * (layer.forward_seconds + layer.backward_seconds) + layer.update_seconds
        for layer in read_profile(folder / "profile.json").layers
    ]
    return balanced(seconds, num_stages)


def _measure(model: str, num_microbatches: int, environment: Mapping[str, str], folder: Path) -> None:
    """In a job of its own, as the ways have, so that memory is as fast: huge pages, the same allocator."""
    program = str(programs.FOLDER / "profile_layers.py")
    command = [sys.executable, "-m", "hybridpipe.launch.mpirun", "1", "--", sys.executable, program, model]
    command += ["--microbatches", str(num_microbatches), "--out", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        done = jobs.finished(command, environment, programs.TIMEOUT_SECONDS, **streams)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}; see {log.name}")
