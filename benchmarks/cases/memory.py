"""Memory: the peak memory of each rank's process in training, beside the memory model's prediction.

    python benchmarks/run.py memory                           three models, seven plans each; ten minutes
    python benchmarks/run.py memory --only 'vgg: 1-1-gpipe'

The plans are given, so that no profile is measured in the process before it trains. `measured` is the growth
of the process from the start of training to its peak, plus the weights of its own stage, which were there
before. The growth with a model of some kB (libraries that are loaded late, MPI's buffers) is subtracted.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jobs
import results
from cases.peers import ENVIRONMENT
from jobs import PROGRAMS, Run, Way
from plans import balanced
from results import Row

from hybridpipe.files import write_json
from hybridpipe.measure.layers import measure as measure_layers
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile

sys.path.insert(0, str(PROGRAMS))
from common import TASKS

# Samples of a minibatch, so many that a microbatch's activations stand out from the process's other memory.
MINIBATCHES = {"gpt": 64, "vgg": 128, "mlp": 1024, "tiny": 16}
MODELS, SMALL = ("gpt", "vgg", "mlp"), "tiny"
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


def measure(run: Run) -> Iterator[Row]:
    """Yield a row for each rank of each plan of each model; its way is the plan and the rank."""
    for model in MODELS:
        for name in PLANS:
            if run.wants(model, name):
                yield from _rows(run, model, name)


def _rows(run: Run, model: str, name: str) -> Iterator[Row]:
    """Yield a row for each rank of a job, with the bytes that it holds for its stage."""
    plan, costs = made(model, name)
    stage_of = {rank: stage for stage in plan.stages for rank in stage.ranks}
    folder = run.out / f"round{run.round}"
    grown = _grown(model, name, folder / model / name)
    grown_anyway = _grown(SMALL, name, folder / SMALL / name)
    for rank, predicted in zip(plan.ranks, peak_memory_bytes(costs, plan), strict=True):
        stage = stage_of[rank]
        weights = sum(layer.parameter_bytes for layer in costs.layers[stage.start : stage.stop])
        figures = {"predicted": predicted, "measured": grown[rank] - grown_anyway[rank] + weights}
        yield Row(model, f"{name}, rank {rank}", run.round, figures)


@cache
def profile(model: str, samples: int) -> ModelProfile:
    """Measure the profile of a model with microbatches of `samples`."""
    task = TASKS[model]
    return measure_layers(task.build(), *task.samples(samples).tensors, task.loss, task.optimizer)


def made(model: str, name: str) -> tuple[Plan, ModelProfile]:
    """Return a plan with stages of about equal time, and the profile at its microbatch size."""
    replicas, schedule, count = PLANS[name]
    costs = profile(model, MINIBATCHES[model] // count)
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in costs.layers]
    edges = (0, *balanced(seconds, len(replicas)), len(seconds))
    stages = tuple(StageSpec(*edge, width) for edge, width in zip(pairwise(edges), replicas, strict=True))
    return Plan(stages, schedule, count), costs


@cache
def _grown(model: str, name: str, out: Path) -> list[int]:
    """Return the bytes by which each process of a job grew from the start of training to its peak."""
    plan, _ = made(model, name)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "plan.json", plan)
    way = Way(name, "ours", str(out / "plan.json"), ranks=len(plan.ranks))
    arguments = ["--minibatch", str(MINIBATCHES[model]), "--minibatches", str(NUM_MINIBATCHES)]
    row = jobs.start(way, model, model, 0, out, arguments=arguments, environment=ENVIRONMENT)
    if row.error:
        raise SystemExit(f"{model}, {name}: {row.error}")
    return [
        peak - held for peak, held in zip(row["peak_memory_bytes"], row["memory_before_bytes"], strict=True)
    ]


def report(rows: Sequence[Row]) -> str:
    """Return the table, and the ratios of measured and predicted bytes."""
    bytes_held = list(results.medians(rows, "predicted", "measured"))
    lines = [
        {
            "model": model,
            "plan": way,
            "predicted, MB": f"{predicted / 1e6:.0f}",
            "measured, MB": f"{measured / 1e6:.0f}",
            "measured / predicted": f"{measured / predicted:.2f}",
        }
        for model, way, (predicted, measured) in bytes_held
    ]
    ratios = [measured / predicted for *_, (predicted, measured) in bytes_held]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    summary = (
        f"measured / predicted: {low:.2f} to {high:.2f}, {middle:.2f} in the median of {len(ratios)} ranks"
    )
    return f"{results.table(lines)}\n\n{summary}"


def picture(rows: Sequence[Row]) -> Any:
    """Draw measured over predicted megabytes, a mark for each rank."""
    colors = {
        "data parallelism": results.DATA_PARALLEL,
        "synchronous pipelines": results.SYNCHRONOUS,
        "pipedream": results.ASYNCHRONOUS,
    }
    figure, axes = results.subplots(height=4.2)
    points = list(results.medians(rows, "predicted", "measured"))
    for model, marker in zip(MODELS, "os^", strict=True):
        for kind, color in colors.items():
            found = [point for point in points if point[0] == model and _kind(point[1]) == kind]
            if found:
                xs, ys = zip(*([num_bytes / 1e6 for num_bytes in point[2]] for point in found), strict=True)
                axes.scatter(xs, ys, 36, color, marker, label=f"{model}, {kind}", zorder=2)
    most = 1.05 * max(max(point[2]) for point in points) / 1e6
    axes.plot([0, most], [0, most], color=results.DARK, linewidth=0.8, zorder=0)
    axes.set_xlabel("predicted, MB")
    axes.set_ylabel("measured, MB")
    axes.legend(loc="upper left", fontsize=9)
    return figure


def _kind(way: str) -> str:
    replicas, schedule, _ = PLANS[way.split(", ")[0]]
    if len(replicas) == 1:
        return "data parallelism"
    return "pipedream" if schedule == "pipedream" else "synchronous pipelines"
