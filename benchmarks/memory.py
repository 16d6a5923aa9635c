"""Memory: what each rank's process holds at most while it trains, beside what the memory model says.

    python benchmarks/memory.py --out runs/memory                  three models, seven plans each; ten minutes
    python benchmarks/memory.py --models vgg --plans 1-1-gpipe

The plans are given, so that nothing is measured in the process before it trains. `measured` is how much the
process grew from when training began to its peak, less what it grows by with a model of some kB (libraries
that are loaded late, MPI's buffers), plus the weights of its own stage, which were there before.
Writes DIR/memory.json, a table in DIR/memory.md and a plot in DIR/memory.svg.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import peers
import plots
import programs
from cuts import balanced
from programs import Way
from tabulate import tabulate

from hybridpipe.files import write_json
from hybridpipe.measure.layers import measure
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile

sys.path.insert(0, str(programs.FOLDER))
from common import TASKS

# Samples of a minibatch, so large that a microbatch's activations stand out of what a process needs anyhow.
MINIBATCHES = {"gpt": 64, "vgg": 128, "mlp": 1024, "tiny": 16}
SMALL = "tiny"
PLANS = {  # replicas, schedule, microbatches
    "2-1f1b": ((2,), "1f1b", 4),
    "1-1-gpipe": ((1, 1), "gpipe", 8),
    "1-1-1f1b": ((1, 1), "1f1b", 8),
    "1-1-zero-bubble": ((1, 1), "zero-bubble", 8),
    "1-1-pipedream": ((1, 1), "pipedream", 1),
    "1-1-1-1-1f1b": ((1, 1, 1, 1), "1f1b", 8),
    "2-1-1f1b": ((2, 1), "1f1b", 8),
}
NUM_MINIBATCHES = 6


@dataclass(frozen=True)
class Held:
    """By one rank, in bytes."""

    model: str
    plan: str
    rank: int
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        """Of the measured to the predicted."""
        return self.measured / self.predicted


@cache
def profile(model: str, samples: int) -> ModelProfile:
    """At this microbatch."""
    task = TASKS[model]
    return measure(task.build(), *task.samples(samples).tensors, task.loss, task.optimizer)


def made(model: str, name: str) -> tuple[Plan, ModelProfile]:
    """The plan, with stages of about equal time, and the profile at its microbatch."""
    replicas, schedule, count = PLANS[name]
    costs = profile(model, MINIBATCHES[model] // count)
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in costs.layers]
    edges = (0, *balanced(seconds, len(replicas)), len(seconds))
    stages = tuple(StageSpec(*edge, width) for edge, width in zip(pairwise(edges), replicas, strict=True))
    return Plan(stages, schedule, count), costs


def grown(model: str, name: str, out: Path) -> list[int]:
    """One job; by how much each of its processes grew from the start of training to its peak."""
    plan, _ = made(model, name)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "plan.json", plan)
    way = Way(name, "ours", str(out / "plan.json"), ranks=len(plan.ranks))
    arguments = ["--minibatch", str(MINIBATCHES[model]), "--minibatches", str(NUM_MINIBATCHES)]
    outcome = programs.start(way, model, model, 0, out, arguments=arguments, environment=peers.ENVIRONMENT)
    if outcome.error:
        raise SystemExit(f"{model}, {name}: {outcome.error}")
    found = json.loads((out / "rank0.json").read_text())
    peaks, before = found["peak_memory_bytes"], found["memory_before_bytes"]
    return [peak - held for peak, held in zip(peaks, before, strict=True)]


@cache
def grown_anyhow(name: str, out: Path) -> list[int]:
    """The same with next to no model."""
    return grown(SMALL, name, out / SMALL / name)


def run(model: str, name: str, out: Path) -> Iterator[Held]:
    """What each rank of a job held for its stage."""
    plan, costs = made(model, name)
    stage_of = {rank: stage for stage in plan.stages for rank in stage.ranks}
    more, anyhow = grown(model, name, out / model / name), grown_anyhow(name, out)
    for rank, predicted in zip(plan.ranks, peak_memory_bytes(costs, plan), strict=True):
        stage = stage_of[rank]
        weights = sum(layer.parameter_bytes for layer in costs.layers[stage.start : stage.stop])
        yield Held(model, name, rank, predicted, more[rank] - anyhow[rank] + weights)


def text_of(found: list[Held]) -> str:
    """The table, and how far off the model is."""
    table = [
        {
            "model": held.model,
            "plan": held.plan,
            "rank": held.rank,
            "predicted, MB": f"{held.predicted / 1e6:.0f}",
            "measured, MB": f"{held.measured / 1e6:.0f}",
            "measured / predicted": f"{held.ratio:.2f}",
        }
        for held in found
    ]
    ratios = [held.ratio for held in found]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    summary = (
        f"measured / predicted: {low:.2f} to {high:.2f}, {middle:.2f} in the median of {len(found)} ranks"
    )
    return f"{tabulate(table, headers='keys', tablefmt='github', disable_numparse=True)}\n\n{summary}"


def plot(found: list[Held], path: Path) -> None:
    """Measured over predicted."""
    figure, axes = plots.svg_axes(figsize=(5, 5))
    for model in dict.fromkeys(held.model for held in found):
        points = [(held.predicted / 1e6, held.measured / 1e6) for held in found if held.model == model]
        axes.scatter(*zip(*points, strict=True), label=model)
    most = max(max(held.predicted, held.measured) for held in found) / 1e6
    axes.plot([0, most], [0, most], color="black", linewidth=0.8)
    axes.set_xlabel("predicted, MB")
    axes.set_ylabel("measured, MB")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--models", default="gpt,vgg,mlp")
    parser.add_argument("--plans", default=",".join(PLANS))
    options = parser.parse_args()
    out = options.out.resolve()
    found = []
    for model in options.models.split(","):
        for name in options.plans.split(","):
            for held in run(model, name, out):
                found.append(held)
                print(f"{model} {name} rank {held.rank}: {held.ratio:.2f}", flush=True)
    text = text_of(found)
    (out / "memory.json").write_text(json.dumps([asdict(held) for held in found], indent=1) + "\n")
    (out / "memory.md").write_text(text + "\n")
    plot(found, out / "memory.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
