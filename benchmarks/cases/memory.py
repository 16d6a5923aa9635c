"""Memory: the most that each rank's process has in training, beside the memory model's prediction.

    python benchmarks/run.py memory                           six models; half an hour
    python benchmarks/run.py memory --only 'vgg: 1-1-gpipe'
    python benchmarks/run.py memory --kept                    freed memory is kept, as where there is room

The plans are given, so that no profile is measured in the process before it trains. `measured` is the growth
of the process from before training to its peak (programs/memory.py), plus the weights of its own stages,
which were there before. Freed memory is returned, as where a limit is near: a process has what is in use.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
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
from common import TASKS, ZOO

# Samples of a minibatch, so many that a microbatch's activations stand out from the process's other memory.
MINIBATCHES = {"gpt": 64, "vgg": 128, "mlp": 1024, "gpt-deep": 128, "zoo-gpt2": 512, "zoo-resnet": 128}
MODELS = tuple(model for model in MINIBATCHES if ZOO.is_file() or not model.startswith("zoo"))
Given = tuple[tuple[int, ...], str, int, dict[str, Any]]  # replicas, schedule, microbatches, options
PLANS: dict[str, Given] = {
    "2, 1f1b": ((2,), "1f1b", 4, {}),
    "1-1, gpipe": ((1, 1), "gpipe", 8, {}),
    "1-1, 1f1b": ((1, 1), "1f1b", 8, {}),
    "1-1, recompute": ((1, 1), "1f1b", 8, {"recompute": True}),
    "1-1, interleaved": ((1, 1, 1, 1), "interleaved-1f1b", 8, {"chunks": 2}),
    "1-1, zero-bubble": ((1, 1), "zero-bubble", 8, {}),
    "1-1, pipedream": ((1, 1), "pipedream", 1, {}),
    "2-1, 1f1b": ((2, 1), "1f1b", 8, {}),
}
ONCE, TWICE = (1,) * 4, (1,) * 8  # stages of four ranks
DEEP_PLANS: dict[str, Given] = {  # of a model with layers enough
    "1-1-1-1, 1f1b": (ONCE, "1f1b", 16, {}),
    "1-1-1-1, zero-bubble": (ONCE, "zero-bubble", 16, {}),
    **{f"1-1-1-1, {name}": (TWICE, name, 16, {"chunks": 2}) for name in ("zb-v", "v-half", "v-min")},
}
NUM_MINIBATCHES = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--kept", action="store_true", help="freed memory is kept")


def measure(run: Run) -> Iterator[Row]:
    """Yield a row for each rank of each plan of each model; its way is the plan and the rank."""
    for model in MODELS:
        for name in plans_of(model):
            if run.wants(model, name):
                yield from _rows(run, model, name)


def _rows(run: Run, model: str, name: str) -> Iterator[Row]:
    """Yield a row for each rank of a job, with the bytes that it holds for its stages."""
    plan, costs = made(model, name)
    grown = _grown(run, model, name, plan)
    for rank, predicted in zip(plan.ranks, peak_memory_bytes(costs, plan), strict=True):
        held = plan.held_stages(plan.place(rank))
        layers = [layer for s in held for layer in costs.layers[plan.stages[s].start : plan.stages[s].stop]]
        weights = sum(layer.parameter_bytes for layer in layers)
        figures = {"predicted": predicted, "measured": grown[rank] + weights}
        yield Row(model, f"{name}, rank {rank}", run.round, figures)


def plans_of(model: str) -> dict[str, Given]:
    """Return the plans that a model is trained by."""
    return DEEP_PLANS if model == "gpt-deep" else PLANS


@cache
def profile(model: str, samples: int) -> ModelProfile:
    """Measure the profile of a model with microbatches of `samples`."""
    task = TASKS[model]
    return measure_layers(task.build(), *task.samples(samples).tensors, task.loss, task.optimizer)


def made(model: str, name: str) -> tuple[Plan, ModelProfile]:
    """Return a plan with stages of about equal time, and the profile at its microbatch size."""
    replicas, schedule, count, options = plans_of(model)[name]
    costs = profile(model, MINIBATCHES[model] // count)
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in costs.layers]
    edges = (0, *balanced(seconds, len(replicas)), len(seconds))
    stages = tuple(StageSpec(*edge, width) for edge, width in zip(pairwise(edges), replicas, strict=True))
    return Plan(stages, schedule, count, **options), costs


def _grown(run: Run, model: str, name: str, plan: Plan) -> list[int]:
    """Return the bytes by which each process of a job grew from before training to its peak."""
    out = run.out / f"round{run.round}" / model / name.replace(", ", "-")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "plan.json", plan)
    variant = f"{out / 'plan.json'}{',kept' * run.options.kept}"
    way = Way(name, "memory", variant, ranks=len(plan.ranks))
    arguments = ["--minibatch", str(MINIBATCHES[model]), "--minibatches", str(NUM_MINIBATCHES)]
    row = jobs.start(way, model, model, 0, out, arguments=arguments, environment=ENVIRONMENT)
    if row.error:
        raise SystemExit(f"{model}, {name}: {row.error}")
    grown: list[int] = row["grown"]
    return grown


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
