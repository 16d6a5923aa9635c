"""Peers: two ranks that train with hybridpipe and other libraries, beside the ceiling of the machine.

    python benchmarks/run.py peers                                      three models, one round; eight minutes
    python benchmarks/run.py peers --only 'mlp: ours' --rounds 3

Ranks have one thread each. `one process` trains whole minibatches. The ceiling is `two independent halves`:
the two stages of the pipelines train side by side on whole minibatches, without messages. `tuned` ways have a
fused step and keep freed memory, as ours always do; others follow their documentation. Data-parallel ways
take half a minibatch each, synchronous pipelines 8 microbatches. Pipelines have balanced cuts, the same in
later calls.

All ways have the same model, samples and optimizer, so all synchronous ways end with the loss of one process;
the output names those that do not. `auto` may choose among synchronous schedules; `auto under pipedream` has
its schedule given. One process and the ceilings run whatever --only says, because all ways are compared with
them. A second table shows the parts of our ranks' minibatches (`train --trace`).
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import median as median_of
from typing import Any

import jobs
import results
from jobs import Run, Way
from plans import measured_cuts
from results import Row, milliseconds, number, of, times_as_fast

from hybridpipe.report.rank_time import TRACED

MODELS = ("gpt", "vgg", "mlp")
MICROBATCHES = 8
ONE, CEILING, TUNED_CEILING = "one process", "two independent halves", "two independent halves, tuned"
REFERENCES = (ONE, CEILING, TUNED_CEILING)
INTERLEAVED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")  # two stages a rank
DATA_PARALLEL = (
    Way("torch DDP", "ddp"),
    Way("torch DDP, tuned", "ddp", "tuned"),
    Way("plain Horovod", "plain_horovod"),
    Way("plain Horovod, tuned", "plain_horovod", "tuned"),
)
PIPELINES = (
    *(
        Way(f"torch pipelining, {name}", "torch_pipelining", name)
        for name in ("Schedule1F1B", "ScheduleGPipe", *INTERLEAVED)
    ),
    Way("DeepSpeed's pipeline", "deepspeed_pipeline"),
)
AUTO, PIPEDREAM = "ours, auto", "ours, auto under pipedream"
WAYS = (
    Way(ONE, "one_process", ranks=1),
    Way(f"one process, {MICROBATCHES} microbatches", "one_process", "micro", ranks=1),
    Way(CEILING, "halves"),
    Way(TUNED_CEILING, "halves", "tuned"),
    *DATA_PARALLEL,
    *PIPELINES,
    Way("ours, dp", "ours", "dp"),
    Way("ours, 1f1b", "ours", "1f1b"),
    Way("ours, pipedream", "ours", "pipedream"),
    Way(AUTO, "ours", "auto"),
    Way(PIPEDREAM, "ours", "auto-pipedream"),
)
STALE = ("ours, pipedream", PIPEDREAM)
# These train whole minibatches, in which dense layers take a smaller part of the time than in microbatches.
WHOLE = (CEILING, TUNED_CEILING, *STALE)
# Waiting threads of Open MPI leave their cores to computing ones.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--minibatches", type=int, default=10, help="minibatches of a job; three are warm-up")


def measure(run: Run) -> Iterator[Row]:
    """Train every model every way."""
    for model in MODELS:
        wanted = [way for way in WAYS if run.wants(model, way.name)]
        for way in WAYS if wanted else ():
            if way in wanted or way.name in REFERENCES:
                yield _trained(run, model, way)


def _trained(run: Run, model: str, way: Way) -> Row:
    count = 1 if way.name in WHOLE else MICROBATCHES
    stages = 4 if way.variant in INTERLEAVED else 2
    cuts = measured_cuts(model, stages, count, ENVIRONMENT, run.out / model / "profile")
    arguments = ["--minibatches", str(run.options.minibatches), "--microbatches", str(MICROBATCHES)]
    arguments += ["--cuts", ",".join(map(str, cuts))]
    folder = run.out / model / way.name.replace(" ", "-") / f"round{run.round}"
    return jobs.start(way, model, model, run.round, folder, arguments=arguments, environment=ENVIRONMENT)


def report(rows: Sequence[Row]) -> str:
    """Return two tables, and the losses that differ from that of one process."""
    lines = [
        f"another loss: {row.group}, {row.way}, round {row.round}: {row['loss']:.6f} instead of {wanted:.6f}"
        for row, wanted in results.other_losses(rows, ONE, STALE)
    ]
    parts = list(minibatch_parts(rows))
    return "\n\n".join([results.table(times(rows)), *lines, *([results.table(parts)] if parts else [])])


def times(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a line for each model and way: its time, its speed relative to the references, and its loss."""
    for model in results.groups(rows):
        for way in results.ways(rows, model):
            latest, seconds = results.last(rows, model, way), results.median(rows, model, way)
            faster = number(times_as_fast(rows, model, way, ONE))
            yield {
                "model": model,
                "way": way + (f" ({latest['plan']})" if latest["plan"] else ""),
                "ms a minibatch": milliseconds(seconds),
                "× one process": faster if seconds else f"did not run: {latest.error}",
                "of the ceiling": number(times_as_fast(rows, model, way, CEILING)),
                "of the tuned ceiling": number(times_as_fast(rows, model, way, TUNED_CEILING)),
                "loss": number(latest["loss"], 5),
                "rounds": str(len(of(rows, model, way))),
            }


def minibatch_parts(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield the parts of our ranks' minibatches in milliseconds, each the median over the rounds."""
    for model in results.groups(rows):
        for way in results.ways(rows, model):
            traced = [row for row in of(rows, model, way) if row["rank_seconds"]]
            for rank in traced[-1]["rank_seconds"] if traced else ():
                all_rounds = [row["rank_seconds"][rank] for row in traced if rank in row["rank_seconds"]]
                told = {"model": model, "way": f"{way} ({traced[-1]['plan']})", "rank": rank}
                yield told | {
                    name: milliseconds(median_of(seconds[part] for seconds in all_rounds), 1)
                    for part, name in TRACED.items()
                }


def picture(rows: Sequence[Row]) -> Any:
    """Draw the speed of each way relative to one process."""
    return draw(results.speed_ups(rows, ONE))


def draw(faster: Mapping[tuple[str, str], float]) -> Any:
    """Draw four bars for each model, the best way of each kind, and a line for the ceiling."""
    kinds = {
        "the best of DDP and Horovod": (
            [way.name for way in DATA_PARALLEL],
            results.DATA_PARALLEL,
        ),
        "the best other pipeline": ([way.name for way in PIPELINES], results.OTHERS),
        "hybridpipe, auto": ([AUTO], results.SYNCHRONOUS),
        "hybridpipe, auto under pipedream": ([PIPEDREAM], results.ASYNCHRONOUS),
    }
    models = list(dict.fromkeys(model for model, _ in faster))
    figure, axes = results.subplots(height=3.6)
    width = 0.8 / len(kinds)
    for i, (label, (ways, color)) in enumerate(kinds.items()):
        heights = [max((faster.get((model, way), 0.0) for way in ways), default=0.0) for model in models]
        places = [m + width * (i + 0.5) - 0.4 for m in range(len(models))]
        bars = axes.bar(places, heights, width * 0.92, color=color, label=label)
        ink = results.DARK if color == results.OTHERS else "white"
        axes.bar_label(
            bars, [f"{height:.2f}" if height else "" for height in heights], padding=-13, color=ink
        )
    for m, model in enumerate(models):
        if ceiling := faster.get((model, TUNED_CEILING)):
            label = None if m else "ceiling: two independent halves, tuned"
            axes.hlines(ceiling, m - 0.42, m + 0.42, color=results.DARK, label=label)
    axes.axhline(1.0, color=results.DARK, linestyle="dotted", zorder=0, label="one process")
    axes.set_xticks(range(len(models)), [model.upper() for model in models])
    axes.set_ylabel("times as fast as one process")
    results.legend_above(figure, columns=2)
    return figure
