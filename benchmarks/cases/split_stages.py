"""Split stages: plans whose replicas split experts, or have shards, beside others, predicted and measured.

    python benchmarks/run.py split_stages                       two models, two rates, as root with netcluster
    python benchmarks/run.py split_stages --only "tensors, 1gbit"

Two hosts have two ranks each, which share this machine's cores. One job a model and rate measures model and
machines once, predicts every plan from that, and trains each for 14 minibatches (programs/splits.py).
"""

import json
import statistics
from collections.abc import Iterator, Sequence

import jobs
import results
from jobs import Run
from results import Row, milliseconds, number

RATES = ("10gbit", "1gbit")
PLANS = {
    "tensors": ("4", "2-2", "1-1-1-1", "2t2", "1t2-1t2"),
    "experts": ("4", "4e", "2-2", "2e-2e"),
}
WARM_UP = 4  # minibatches


def measure(run: Run) -> Iterator[Row]:
    """Train every model by every plan, between two hosts."""
    for rate in RATES:
        wanted = [model for model in PLANS if run.wants(f"{model}, {rate}", "all plans")]
        if wanted:
            with run.network(rate, num_hosts=2, ranks_per_host=2) as network:
                for model in wanted:
                    out = run.out / f"{model}-{rate}" / f"round{run.round}"
                    jobs.program(
                        "splits", [model, "--variant", ",".join(PLANS[model])], 4, out, network=network
                    )
                    yield from _rows(run, f"{model}, {rate}", json.loads((out / "splits.json").read_text()))


def _rows(run: Run, group: str, found: dict) -> Iterator[Row]:
    for name, each in found["plans"].items():
        seconds = statistics.median(each["seconds"][WARM_UP:])
        figures = {"seconds": seconds, "predicted": each["predicted"], "auto": found["auto"]}
        yield Row(group, name, run.round, figures)


def report(rows: Sequence[Row]) -> str:
    """Return a table of the plans' milliseconds, predicted and measured."""
    return results.table(lines(rows))


def lines(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a line for each model, network and plan."""
    for group in results.groups(rows):
        names = results.ways(rows, group)
        for name in names:
            predicted, measured = (
                results.median(rows, group, name, each) for each in ("predicted", "seconds")
            )
            yield {
                "model, network": group,
                "plan": name,
                "predicted, ms": milliseconds(predicted),
                "measured, ms": milliseconds(measured),
                "measured / predicted": number(measured / predicted),
                "auto": results.last(rows, group, name)["auto"],
            }
