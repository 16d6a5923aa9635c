"""Learning: how many epochs, and how long, until a validation target, under which plan and schedule?

    python benchmarks/learning.py --out runs/learning            both examples, one round
    python benchmarks/learning.py --examples gpt --rounds 3      one of them, the medians of three seeds

The target is that of the example's config, and so is everything else: no way has hyperparameters of its own.
All pipelines of an example have one cut, which the planner makes before the first round. Rounds differ in
their seed; within a round all ways start from the same weights and see the samples in the same order.

`seconds` is training: whole epochs, with loading, the filling and draining of the pipeline and its
communication, without start-up, measuring and evaluation.
Writes DIR/learning.json, a table in DIR/learning.md and DIR/EXAMPLE.svg, the validation metric against time.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import plots
from jobs import ROOT, train
from tabulate import tabulate

from hybridpipe.config import TrainConfig, load_config
from hybridpipe.files import read_plan, write_json
from hybridpipe.planning.plan import Plan

EXAMPLES = ("fashion", "gpt")
RANKS = 2


@dataclass(frozen=True)
class Way:
    """To train: a schedule, on one stage with replicas or on a straight pipeline."""

    schedule: str
    straight: bool = True
    vertical_sync: bool = False

    @property
    def name(self) -> str:
        """For tables and folders."""
        plan = "straight" if self.straight else "dp"
        return f"{plan}, {self.schedule}" + (", vertical sync" if self.vertical_sync else "")

    def overrides(self, example: str) -> list[str]:
        """Under pipedream a minibatch travels whole."""
        whole = load_config(ROOT / f"examples/{example}.toml").train.minibatch
        return [f"train.microbatch={whole}"] if self.schedule == "pipedream" else []

    def plan(self, straight: Plan) -> Plan:
        """The plan, with the cut and the microbatches of a synchronous pipeline."""
        if not self.straight:
            return Plan.data_parallel(straight.num_layers, RANKS, straight.num_microbatches, self.schedule)
        return replace(
            straight,
            schedule=self.schedule,
            num_microbatches=1 if self.schedule == "pipedream" else straight.num_microbatches,
            vertical_sync=self.vertical_sync,
            predicted=None,
        )


WAYS = (
    Way("1f1b", straight=False),
    Way("1f1b"),
    Way("pipedream"),
    Way("pipedream", vertical_sync=True),
    Way("pipedream-2bw"),
)


@dataclass(frozen=True)
class Outcome:
    """One training until its target; `seconds` (so far) and `validation` (the metric) after each epoch."""

    example: str
    way: str
    plan: str
    round: int
    samples_per_second: float
    epochs_to_target: int | None
    seconds_to_target: float | None
    seconds: tuple[float, ...]
    validation: tuple[float, ...]


def target(config: TrainConfig) -> tuple[str, float]:
    """The metric, and what it is to be."""
    if config.target_accuracy is not None:
        return "accuracy", config.target_accuracy
    if config.target_loss is not None:
        return "loss", config.target_loss
    raise SystemExit("the config names no train.target_accuracy and no train.target_loss")


def target_of(example: str) -> tuple[str, float]:
    """The example's."""
    return target(load_config(ROOT / f"examples/{example}.toml").train)


def plan_files(example: str, out: Path) -> dict[Way, Path]:
    """A plan file for each way, all with the cut that a short job's straight plan has."""
    short = ("train.epochs=1", "plan.schedule=1f1b", "data.args.limit=256", "data.validation_args.limit=64")
    train(f"{example}.toml", "straight", RANKS, short, out / "cut")
    straight, files = read_plan(out / "cut" / "plan.json"), {}
    for way in WAYS:
        files[way] = out / f"{way.name.replace(', ', '-').replace(' ', '-')}.json"
        write_json(files[way], way.plan(straight))
    return files


def run(examples: Sequence[str], rounds: int, out: Path) -> list[Outcome]:
    """Train everything, interleaved over the rounds."""
    plans = {example: plan_files(example, out / example) for example in examples}
    outcomes = []
    for r in range(rounds):
        for example in examples:
            for way, file in plans[example].items():
                folder = out / example / file.stem / f"round{r}"
                overrides = [f"train.seed={r}", *way.overrides(example)]
                summary = train(f"{example}.toml", file, RANKS, overrides, folder)
                outcomes.append(outcome(example, way, r, summary))
                print(json.dumps(asdict(outcomes[-1])), flush=True)
    return outcomes


def outcome(example: str, way: Way, number: int, summary: dict) -> Outcome:
    """What is kept of a summary."""
    metric, _ = target_of(example)
    epochs, elapsed = summary["epochs"], 0.0
    return Outcome(
        example,
        way.name,
        summary["plan"],
        number,
        summary["samples_per_second"],
        summary["epochs_to_target"],
        summary["seconds_to_target"],
        tuple(elapsed := elapsed + epoch["seconds"] for epoch in epochs),
        tuple(epoch["validation"][metric] for epoch in epochs),
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Medians over the rounds; a round that missed the target counts as infinitely long."""
    rows = []
    for example, way in dict.fromkeys((o.example, o.way) for o in outcomes):
        of_way = [o for o in outcomes if (o.example, o.way) == (example, way)]
        metric, wanted = target_of(example)
        epochs = statistics.median(o.epochs_to_target or math.inf for o in of_way)
        seconds = statistics.median(o.seconds_to_target or math.inf for o in of_way)
        rate = statistics.median(o.samples_per_second for o in of_way)
        rows.append(
            {
                "example": f"{example}, {metric} {'≥' if metric == 'accuracy' else '≤'} {wanted:g}",
                "schedule": way,
                "plan": of_way[0].plan,
                "epochs to target": "not reached" if math.isinf(epochs) else f"{epochs:g}",
                "seconds to target": "–" if math.isinf(seconds) else f"{seconds:.0f}",
                "samples/s": f"{rate:.0f}",
                "final metric": f"{statistics.median(o.validation[-1] for o in of_way):.3f}",
            }
        )
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def plot(example: str, outcomes: Sequence[Outcome], path: Path) -> None:
    """The validation metric against training time, a line a round, a colour a way."""
    metric, wanted = target_of(example)
    figure, axes = plots.svg_axes(figsize=(6, 4))
    for i, way in enumerate(dict.fromkeys(o.way for o in outcomes)):
        for o in outcomes:
            if o.way == way:
                label = way if o.round == 0 else None
                axes.plot(o.seconds, o.validation, "o-", color=f"C{i}", markersize=3, label=label)
    axes.axhline(wanted, color="grey", linewidth=0.8)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"validation {metric}")
    axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    options = parser.parse_args()
    examples, out = options.examples.split(","), options.out.resolve()
    outcomes = run(examples, options.rounds, out)
    write_json(out / "learning.json", {"outcomes": [asdict(each) for each in outcomes]})
    text = table(outcomes)
    (out / "learning.md").write_text(text + "\n")
    for example in examples:
        plot(example, [o for o in outcomes if o.example == example], out / f"{example}.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
