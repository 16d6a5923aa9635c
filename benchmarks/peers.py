"""Peers: how fast do two ranks of one thread train, by every way there is, beside the ceiling of the machine?

    python benchmarks/peers.py --out runs/peers                    three models, one round; some eight minutes
    python benchmarks/peers.py --models mlp --ways ours --rounds 3

One process trains whole minibatches; `two independent halves` are the two stages of the pipelines, trained
side by side and whole, without a message: the ceiling. `tuned` ways have a fused step and keep freed memory,
as ours do by themselves; others are as their documentation has them. Data-parallel ways take half a minibatch
each, synchronous pipelines 8 microbatches; each is cut where that balances. All have the same model, samples
and optimizer, so all synchronous ways end with one process's loss; the output names those that do not. `auto`
may choose among synchronous schedules; `auto under pipedream` is told its schedule. Every way is a small
program in peer_programs/. A second table says where our ranks' minibatches go (`train --trace`).

Rounds are interleaved, each way a fresh job; figures are medians, ratios are taken within a round. Rounds of
earlier calls with the same DIR count on, and have the same cuts. Writes DIR/peers.json, a table in
DIR/peers.md and a plot in DIR/peers.svg.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import plots
import programs
from cuts import cuts
from programs import Way
from rounds import (
    Outcome,
    line,
    median_seconds,
    next_round,
    number,
    of,
    other_losses,
    read,
    times_as_fast,
    write,
)
from tabulate import tabulate

from hybridpipe.report.tables import TRACED

MODELS = ("gpt", "vgg", "mlp")
MICROBATCHES = 8
ONE, CEILING, TUNED_CEILING = "one process", "two independent halves", "two independent halves, tuned"
CEILINGS = {CEILING: "solid", TUNED_CEILING: "dashed"}  # how they are drawn
INTERLEAVED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")  # two stages a rank
WAYS = (
    Way(ONE, "one_process", ranks=1),
    Way(f"one process, {MICROBATCHES} microbatches", "one_process", "micro", ranks=1),
    Way(CEILING, "halves"),
    Way(TUNED_CEILING, "halves", "tuned"),
    Way("torch DDP", "ddp"),
    Way("torch DDP, tuned", "ddp", "tuned"),
    Way("plain Horovod", "plain_horovod"),
    Way("plain Horovod, tuned", "plain_horovod", "tuned"),
    *(
        Way(f"torch pipelining, {name}", "torch_pipelining", name)
        for name in ("Schedule1F1B", "ScheduleGPipe", *INTERLEAVED)
    ),
    Way("DeepSpeed's pipeline", "deepspeed_pipeline"),
    Way("ours, dp", "ours", "dp"),
    Way("ours, 1f1b", "ours", "1f1b"),
    Way("ours, pipedream", "ours", "pipedream"),
    Way("ours, auto", "ours", "auto"),
    Way("ours, auto under pipedream", "ours", "auto-pipedream"),
)
ASYNCHRONOUS = ("ours, pipedream", "ours, auto under pipedream")
WHOLE = (*CEILINGS, *ASYNCHRONOUS)  # train whole minibatches, whose dense layers weigh less than eight times
# Threads of Open MPI that wait leave their cores to those that compute.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def run(model: str, ways: Sequence[Way], round_: int, minibatches: int, out: Path) -> Iterator[Outcome]:
    """One round of a model."""
    for way in ways:
        count = 1 if way.name in WHOLE else MICROBATCHES
        stages = 4 if way.variant in INTERLEAVED else 2
        where = cuts(model, stages, count, ENVIRONMENT, out / model / "profile")
        arguments = ["--minibatches", str(minibatches), "--microbatches", str(MICROBATCHES)]
        arguments += ["--cuts", ",".join(map(str, where))]
        folder = _folder(out, model, way.name, round_)
        yield programs.start(way, model, model, round_, folder, arguments=arguments, environment=ENVIRONMENT)


def _folder(out: Path, model: str, way: str, round_: int) -> Path:
    return out / model / way.replace(" ", "-") / f"round{round_}"


def rows(outcomes: Sequence[Outcome], models: Sequence[str]) -> Iterator[dict[str, str]]:
    """Of the table: for each model, milliseconds, times one process, of the ceilings, and the loss."""
    for model in models:
        for way in WAYS:
            found = of(outcomes, model, way.name)
            if not found:
                continue
            seconds = median_seconds(outcomes, model, way.name)
            faster = times_as_fast(outcomes, model, way.name, ONE)
            yield {
                "model": model,
                "way": way.name + (f" ({found[-1].plan})" if found[-1].plan else ""),
                "ms a minibatch": number(seconds and seconds * 1e3, digits=0),
                "× one process": number(faster) if seconds else f"did not run: {found[-1].error}",
                "of the ceiling": number(times_as_fast(outcomes, model, way.name, CEILING)),
                "of the tuned ceiling": number(times_as_fast(outcomes, model, way.name, TUNED_CEILING)),
                "loss": number(found[-1].loss, digits=5),
                "rounds": str(len(found)),
            }


def parts(outcomes: Sequence[Outcome], models: Sequence[str], out: Path) -> Iterator[dict[str, str]]:
    """Where our ranks' minibatches go, in milliseconds: medians over the rounds, each part by itself."""
    for model in models:
        for way in (way for way in WAYS if way.program == "ours"):
            found = [o for o in of(outcomes, model, way.name) if not o.error]
            reports = [
                json.loads((_folder(out, model, way.name, o.round) / "rank0.json").read_text()) for o in found
            ]
            traced = [ranks for report in reports if (ranks := report.get("rank_seconds"))]
            for rank in traced[-1] if traced else ():
                seconds = {
                    name: median(ranks[rank][part] for ranks in traced if rank in ranks)
                    for part, name in TRACED.items()
                }
                told = {"model": model, "way": f"{way.name} ({found[-1].plan})", "rank": rank}
                yield told | {name: number(each * 1e3, digits=1) for name, each in seconds.items()}


def plot(outcomes: Sequence[Outcome], models: Sequence[str], path: Path) -> None:
    """Times one process: a group of bars a model, a line for each ceiling."""
    figure, axes = plots.svg_axes(figsize=(9, 4))
    ran = {outcome.way for outcome in outcomes if outcome.seconds}
    shown = [way for way in WAYS if way.name in ran - {ONE, *CEILINGS}]
    for i, way in enumerate(shown):
        heights = [times_as_fast(outcomes, model, way.name, ONE) or 0.0 for model in models]
        places = [m + 0.8 * (i / len(shown) - 0.5) for m in range(len(models))]
        axes.bar(places, heights, width=0.8 / len(shown), color=plots.COLORS[i], label=way.name, align="edge")
    for m, model in enumerate(models):
        for name, style in CEILINGS.items():
            height = times_as_fast(outcomes, model, name, ONE)
            if height:
                label = name if m == 0 else None
                axes.hlines(height, m - 0.4, m + 0.4, color="black", linestyle=style, label=label)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("times one process")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--minibatches", type=int, default=10)
    parser.add_argument("--ways", default="", help="only those whose name begins so, beside the references")
    options = parser.parse_args()
    models, out = options.models.split(","), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ways = [way for way in WAYS if way.name in (ONE, *CEILINGS) or way.name.startswith(options.ways)]
    outcomes = read(out / "peers.json")
    for _ in range(options.rounds):
        for model in models:
            for outcome in run(model, ways, next_round(outcomes, model), options.minibatches, out):
                print(line(outcome), flush=True)
                outcomes.append(outcome)
                write(out / "peers.json", outcomes)
    measured = [name for name in MODELS if any(o.group == name for o in outcomes)]
    table = list(rows(outcomes, measured))
    lines = [tabulate(table, headers="keys", tablefmt="github", disable_numparse=True)]
    lines += [
        f"another loss: {o.group}, {o.way}, round {o.round}: {o.loss:.6f} instead of {wanted:.6f}"
        for o, wanted in other_losses(outcomes, ONE, ASYNCHRONOUS)
    ]
    going = list(parts(outcomes, measured, out))
    lines += ["", tabulate(going, headers="keys", tablefmt="github", disable_numparse=True), ""]
    lines += [f"load of the machine: {max(o.load for o in outcomes):.1f} at most, {os.cpu_count()} cores"]
    text = "\n".join(lines)
    (out / "peers.md").write_text(text + "\n")
    plot(outcomes, measured, out / "peers.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
