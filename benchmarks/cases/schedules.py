"""Schedules: pipelines of a GPT under each synchronous schedule, messages real, computing by sleeping.

    python benchmarks/run.py schedules                      4 and 8 ranks, five minutes
    python benchmarks/run.py schedules --only '4 ranks'

The model is the transformer of memory_limits.py in a fifth of its time, four microbatches a rank. Each
schedule has its best plan with one replica a stage for ranks of one host. Bytes are divided by `SCALE`, and
the bandwidth that predictions take as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jobs
import results
from cases.memory_limits import MICROBATCHES_PER_RANK, transformer
from cases.replay import slowed
from results import Row, milliseconds, of

from hybridpipe.files import write_json
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules.registry import SYNCHRONOUS
from hybridpipe.planning.search.search import short_name, straight

RANKS = (4, 8)
PART = 0.2  # of the transformer's time
SCALE = 8.0
BANDWIDTH, LATENCY_SECONDS = 2e9 * SCALE, 1e-4  # of ranks of one host that share two cores
MINIBATCHES = 6
BASELINE = "1f1b"


def measure(run: jobs.Run) -> Iterator[Row]:
    """Replay every schedule."""
    profile = slowed(transformer(), PART)
    for num_ranks in RANKS:
        group, count = f"{num_ranks} ranks", MICROBATCHES_PER_RANK * num_ranks
        cluster = Cluster.flat(num_ranks, BANDWIDTH, LATENCY_SECONDS)
        for schedule in SYNCHRONOUS:
            if not run.wants(group, schedule):
                continue
            plan = straight(profile, cluster, num_ranks, count, schedule)
            assert plan is not None and plan.predicted is not None
            summary = _replayed(run, group, profile, cluster, plan)
            figures = {
                "plan": short_name(plan),
                "seconds": summary["minibatch_seconds_median"],
                "predicted": summary["predicted_minibatch_seconds"],
                "idle": plan.predicted.bubble_fraction,
                "peak": max(plan.predicted.peak_memory_bytes),
            }
            yield Row(group, schedule, run.round, figures)


def _replayed(run: jobs.Run, group: str, profile: ModelProfile, cluster: Cluster, plan: Plan) -> dict:
    out = run.out / group.replace(" ", "-") / plan.schedule / f"round{run.round}"
    out.mkdir(parents=True, exist_ok=True)
    files = {"profile": profile, "plan": replace(plan, predicted=None), "cluster": cluster}
    words = ["replay", "--scale", str(SCALE), "--minibatches", str(MINIBATCHES)]
    for name, value in files.items():
        write_json(out / f"{name}.json", value)
        words += [f"--{name}", str(out / f"{name}.json")]
    return jobs.command(words, plan.num_ranks, out)


def report(rows: Sequence[Row]) -> str:
    """Return a table of the schedules of each number of ranks."""
    return results.table(_lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for group, schedule, (measured, predicted) in results.medians(rows, "seconds", "predicted"):
        latest, base = results.last(rows, group, schedule), of(rows, group, BASELINE)
        yield {
            "ranks": group,
            "schedule": schedule,
            "plan": latest["plan"],
            "predicted": f"{milliseconds(predicted)} ms",
            "measured": f"{milliseconds(measured)} ms",
            "off by": f"{predicted / measured - 1:+.1%}",
            f"times as fast as {BASELINE}": _faster(rows, group, schedule),
            "predicted peak": f"{latest['peak'] / max(row['peak'] for row in base):.2f}" if base else "–",
        }


def _faster(rows: Sequence[Row], group: str, schedule: str) -> str:
    ratio = results.times_as_fast(rows, group, schedule, BASELINE)
    return f"{ratio:.2f}" if ratio else "–"
