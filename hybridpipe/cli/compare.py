"""Comparison of several plans and baselines on one config. Each run is a separate job under mpirun.

Several rounds are interleaved, so that a drift of the machine's speed affects all runs alike. Figures are
medians over the rounds.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridpipe.errors import UserError
from hybridpipe.files import read_object, read_plan, write_json
from hybridpipe.launch import mpirun
from hybridpipe.planning.plan import Plan
from hybridpipe.report.tables import compare_table, reference_of
from hybridpipe.run_folder.report import REPORT, report_at_end, round_folder

COMPARE_FORMAT = "hybridpipe-compare/1"
HOROVOD = "horovod"
MEDIANS = (
    "samples_per_second",
    "predicted_samples_per_second",
    "minibatch_seconds_median",
    "predicted_minibatch_seconds",
    "bubble_fraction",
)


def compare(
    config: Path,
    ranks: int,
    plans: Sequence[str],
    baselines: Sequence[str],
    overrides: Sequence[str],
    rounds: int,
    out: Path,
) -> int:
    """Run every plan and baseline, print a table and write `out`/compare.json.

    Args:
        plans: values of `train --plan`.
        baselines: names; NAME runs the script `baseline_NAME.py` beside `config`. "horovod" is left out where
            Horovod is not installed.

    Returns:
        0, or the exit code of the first failed job.

    Raises:
        UserError: a baseline has no script.
    """
    commands = {plan: _train_command(config, plan, overrides) for plan in plans}
    commands |= _baseline_commands(config, baselines, overrides)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for round_number in range(rounds):
        for name, command in commands.items():
            folder = round_folder(out, name, round_number)
            print(f"\n== {name}, round {round_number + 1} of {rounds}, {ranks} ranks", flush=True)
            done = mpirun.run(ranks, [*command, "--out", str(folder)])
            if done.returncode:
                print(f"hybridpipe: {name} failed with exit code {done.returncode}", file=sys.stderr)
                return done.returncode
            runs[name].append(read_object(folder / "summary.json"))
    figures = {name: _median(summaries) for name, summaries in runs.items()}
    for name, twin in same_plans({plan: _plans_of(out, plan, rounds) for plan in plans}).items():
        figures[name]["same_plan_as"] = twin
    write_json(
        out / "compare.json", {"format": COMPARE_FORMAT, "ranks": ranks, "rounds": rounds, "runs": figures}
    )
    print(f"\n{compare_table(figures, reference_of(figures))}\n\nwritten to {out / 'compare.json'}")
    if report_at_end(out):
        print(f"and to {out / REPORT}")
    return 0


def same_plans(plans: Mapping[str, Sequence[Plan]]) -> dict[str, str]:
    """Return, for each run whose plans an earlier run had in every round, the first such run."""
    first = {name: next(other for other in plans if plans[other] == plans[name]) for name in plans}
    return {name: twin for name, twin in first.items() if twin != name}


def _plans_of(out: Path, name: str, rounds: int) -> list[Plan]:
    """Return the plan of each round, without its prediction, which is of measurements of its own."""
    folders = (round_folder(out, name, number) for number in range(rounds))
    return [replace(read_plan(folder / "plan.json"), predicted=None) for folder in folders]


def _train_command(config: Path, plan: str, overrides: Sequence[str]) -> list[str]:
    return ["hybridpipe", "train", str(config), "--plan", plan, *_set(overrides)]


def _baseline_commands(config: Path, names: Sequence[str], overrides: Sequence[str]) -> dict[str, list[str]]:
    commands = {name: _baseline_command(config, name, overrides) for name in names}
    if HOROVOD in commands and find_spec(HOROVOD) is None:
        del commands[HOROVOD]
        print("hybridpipe: the baseline horovod is left out: Horovod is not installed", file=sys.stderr)
    return commands


def _baseline_command(config: Path, name: str, overrides: Sequence[str]) -> list[str]:
    script = config.parent / f"baseline_{name}.py"
    if not script.is_file():
        present = sorted(path.stem.removeprefix("baseline_") for path in config.parent.glob("baseline_*.py"))
        beside = ", ".join(present) or "none"
        raise UserError(f"--baselines: {script} must exist, but is missing; beside CONFIG are: {beside}")
    return [sys.executable, str(script), str(config), *_set(overrides)]


def _set(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _median(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last round's summary with its MEDIANS replaced by medians over all rounds."""
    medians = {
        key: statistics.median(summary[key] for summary in summaries)
        for key in MEDIANS
        if all(summary.get(key) is not None for summary in summaries)
    }
    return {**summaries[-1], **medians}
