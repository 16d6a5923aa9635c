"""Learning: epochs and seconds until a validation target, under each schedule.

    python benchmarks/run.py learning                              both examples, one round
    python benchmarks/run.py learning --only gpt --rounds 3        one of them, the medians of three seeds

The target is that of the example's config, and so is everything else: no way has hyperparameters of its own.
All pipelines of an example have the same cut, which the planner chooses before the first round. Rounds differ
in their seed; within a round all ways start from the same weights and see the samples in the same order.

`seconds` is the training time of whole epochs. It includes loading, communication, and the filling and
draining of the pipeline, but no start-up, measuring and evaluation.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jobs
import results
from jobs import ROOT, Run
from results import Row

from hybridpipe.config.file import TrainConfig, load_config
from hybridpipe.files import read_plan, write_json
from hybridpipe.planning.plan import Plan

EXAMPLES = ("fashion", "gpt")
RANKS = 2


@dataclass(frozen=True)
class Way:
    """A schedule, on one stage with replicas or on a straight pipeline."""

    schedule: str
    straight: bool = True
    vertical_sync: bool = False
    prediction: str = "off"

    @property
    def name(self) -> str:
        """Name for tables and folders."""
        plan = "straight" if self.straight else "dp"
        options = [("vertical sync", self.vertical_sync), (self.prediction, self.prediction != "off")]
        return ", ".join([plan, self.schedule, *(name for name, is_on in options if is_on)])

    def overrides(self, example: str) -> list[str]:
        """Return the changes to the example's config: under pipedream a microbatch is a whole minibatch."""
        return [f"train.microbatch={config_of(example).minibatch}"] if self.schedule == "pipedream" else []

    def plan(self, straight: Plan) -> Plan:
        """Return the plan of this way, with the cut and the microbatches of a synchronous pipeline."""
        if not self.straight:
            return Plan.data_parallel(straight.num_layers, RANKS, straight.num_microbatches, self.schedule)
        return replace(
            straight,
            schedule=self.schedule,
            num_microbatches=1 if self.schedule == "pipedream" else straight.num_microbatches,
            vertical_sync=self.vertical_sync,
            prediction=self.prediction,
            predicted=None,
        )


WAYS = (
    Way("1f1b", straight=False),
    Way("1f1b"),
    Way("pipedream"),
    Way("pipedream", vertical_sync=True),
    Way("pipedream", prediction="xpipe"),  # both examples train by Adam
    Way("pipedream-2bw"),
    Way("pipedream-2bw", prediction="xpipe"),
)
# Colour and line style of each way.
STYLES = dict(
    zip(
        (way.name for way in WAYS),
        (
            (results.DATA_PARALLEL, "solid"),
            (results.SYNCHRONOUS, "solid"),
            (results.ASYNCHRONOUS, "solid"),
            (results.ASYNCHRONOUS, "dashed"),
            (results.ASYNCHRONOUS, "dashdot"),
            (results.ASYNCHRONOUS, "dotted"),
            (results.ASYNCHRONOUS, (0, (1, 5))),
        ),
        strict=True,
    )
)


def config_of(example: str) -> TrainConfig:
    """Return the example's training options."""
    return load_config(ROOT / f"examples/{example}.toml").train


def target_of(example: str) -> tuple[str, float]:
    """Return the metric and the target of the example's config."""
    config = config_of(example)
    if config.target_accuracy is not None:
        return "accuracy", config.target_accuracy
    if config.target_loss is not None:
        return "loss", config.target_loss
    raise SystemExit(f"{example}: the config names no train.target_accuracy and no train.target_loss")


def measure(run: Run) -> Iterator[Row]:
    """Train every example every way, until the target."""
    for example in EXAMPLES:
        for way in WAYS:
            if run.wants(example, way.name):
                yield _trained(run, example, way)


def _trained(run: Run, example: str, way: Way) -> Row:
    folder = run.out / example / way.name.replace(", ", "-").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "given.json", way.plan(straight(example, run.out / example / "cut")))
    overrides = [f"train.seed={run.round}", *way.overrides(example)]
    out = folder / f"round{run.round}"
    summary = jobs.train(f"{example}.toml", folder / "given.json", RANKS, overrides, out)
    metric, elapsed = target_of(example)[0], 0.0
    told = ("plan", "samples_per_second", "epochs_to_target", "seconds_to_target")
    figures: dict[str, Any] = {name: summary[name] for name in told}
    figures["elapsed"] = [elapsed := elapsed + epoch["seconds"] for epoch in summary["epochs"]]
    figures["validation"] = [epoch["validation"][metric] for epoch in summary["epochs"]]
    return Row(example, way.name, run.round, figures)


def straight(example: str, folder: Path, overrides: Sequence[str] = ()) -> Plan:
    """Return the straight plan of a short job, which the first call runs."""
    if not (folder / "plan.json").is_file():
        short = (
            *overrides,
            "train.epochs=1",
            "plan.schedule=1f1b",
            "data.args.limit=256",
            "data.validation_args.limit=64",
        )
        jobs.train(f"{example}.toml", "straight", RANKS, short, folder)
    return read_plan(folder / "plan.json")


def report(rows: Sequence[Row]) -> str:
    """Return medians over the rounds; a round that missed the target counts as infinitely long."""
    return results.table(_lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for example in results.groups(rows):
        metric, wanted = target_of(example)
        for way in results.ways(rows, example):
            found = results.of(rows, example, way)
            epochs, seconds = (
                statistics.median(row[name] or math.inf for row in found)
                for name in ("epochs_to_target", "seconds_to_target")
            )
            yield {
                "example": f"{example}, {metric} {'≥' if metric == 'accuracy' else '≤'} {wanted:g}",
                "schedule": way,
                "plan": found[-1]["plan"],
                "epochs to target": "not reached" if math.isinf(epochs) else f"{epochs:g}",
                "seconds to target": "–" if math.isinf(seconds) else f"{seconds:.0f}",
                "samples/s": f"{statistics.median(row['samples_per_second'] for row in found):.0f}",
                "final metric": f"{statistics.median(row['validation'][-1] for row in found):.3f}",
            }


def picture(rows: Sequence[Row]) -> Any:
    """Draw the validation metric over training time: axes for each example, a line for each round."""
    examples = results.groups(rows)
    figure, parts = results.subplots(height=3.6, columns=len(examples))
    for example, axes in zip(examples, [parts] if len(examples) == 1 else parts, strict=True):
        metric, wanted = target_of(example)
        for way in results.ways(rows, example):
            color, style = STYLES[way]
            for i, row in enumerate(results.of(rows, example, way)):
                label = None if i else way
                axes.plot(row["elapsed"], row["validation"], color=color, linestyle=style, label=label)
        axes.axhline(wanted, color=results.DARK, linewidth=0.8, label="target")
        axes.set_xlabel("seconds of training")
        axes.set_ylabel(f"{example}: validation {metric}")
    (parts if len(examples) == 1 else parts[0]).legend(fontsize=9)
    return figure
