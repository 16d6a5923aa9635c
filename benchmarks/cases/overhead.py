"""Overhead: plan 1, whose one rank sends nothing, beside a plain loop that accumulates gradients.

    python benchmarks/run.py overhead                                   five minutes on a quiet machine

Both train in turns within one process of one thread, in 8 microbatches, so that a machine whose speed changes
decides nothing. The ratio is the median over the turns.
"""

import json
import statistics
from collections.abc import Iterator, Sequence

import jobs
import results
from jobs import Run
from results import Row, milliseconds, number

MINIBATCHES = {"gpt": 10, "vgg": 8, "mlp": 10, "gpt-small": 30, "tiny": 200}
MICROBATCHES = 8


def measure(run: Run) -> Iterator[Row]:
    """Train every model both ways."""
    for model, count in MINIBATCHES.items():
        if run.wants(model, "plan 1"):
            out = run.out / model / f"round{run.round}"
            words = [model, "--minibatches", str(count), "--microbatches", str(MICROBATCHES)]
            jobs.program("overhead", words, 1, out, {"OMP_NUM_THREADS": "1"})
            turns = json.loads((out / "rank0.json").read_text())["turns"]
            plain, planned = ([turn[name] for turn in turns] for name in ("plain", "plan 1"))
            ratios = [b / a for a, b in zip(plain, planned, strict=True)]
            figures = {"plain": statistics.median(plain), "ratios": ratios}
            yield Row(model, "plan 1", run.round, {"seconds": statistics.median(planned), **figures})


def report(rows: Sequence[Row]) -> str:
    """Return a table of the models."""
    return results.table(_line(rows, model) for model in results.groups(rows))


def _line(rows: Sequence[Row], model: str) -> dict[str, str]:
    ratios = [ratio for row in results.of(rows, model, "plan 1") for ratio in row["ratios"]]
    return {
        "model": model,
        "plain loop, ms": milliseconds(results.median(rows, model, "plan 1", "plain"), 1),
        "plan 1, ms": milliseconds(results.median(rows, model, "plan 1"), 1),
        "ratio": number(statistics.median(ratios), 3),
        "least and largest": f"{min(ratios):.3f} to {max(ratios):.3f}",
    }
