"""Sync: data parallelism whose gradients are summed by Horovod, by MPI's thread or by torch's gloo.

    python benchmarks/run.py sync --rounds 5                     three models, in a host and between hosts
    python benchmarks/run.py sync --rounds 5 --only loopback     without root

Two ranks have one thread each and train half a minibatch each. In a round every way runs once, as a fresh
job, and ratios are taken within the round. "the measured choice" measures the machines and chooses.
"""

from collections.abc import Iterator, Sequence

import jobs
import networks
import results
from jobs import Run, Way
from networks import LOOPBACK, Network
from results import Row, milliseconds, number, of, times_as_fast

MODELS = ("gpt", "vgg", "mlp")
RATES = (LOOPBACK, "10gbit", "1gbit")
HOROVOD = "dp, horovod"
WAYS = (
    Way("plain Horovod, tuned", "plain_horovod", "tuned"),
    Way(HOROVOD, "ours", "dp:horovod"),
    Way("dp, mpi", "ours", "dp:mpi"),
    Way("dp, torch", "ours", "dp:torch"),
    Way("dp, the measured choice", "ours", "dp:auto"),
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
MINIBATCHES = 16  # of a job; three are warm-up


def measure(run: Run) -> Iterator[Row]:
    """Train every model every way, in one host and between two."""
    for rate in RATES:
        wanted = {model: [way for way in WAYS if run.wants(f"{model}, {rate}", way.name)] for model in MODELS}
        if not any(wanted.values()):
            continue
        if rate != LOOPBACK and not networks.are_available(run.options.netcluster):
            raise SystemExit("sync: hosts need root and netcluster, named by --netcluster or $NETCLUSTER")
        with run.network(rate, num_hosts=2) as network:
            for model, ways in wanted.items():
                for way in ways:
                    yield _trained(run, model, rate, way, network)


def _trained(run: Run, model: str, rate: str, way: Way, network: Network) -> Row:
    group, arguments = f"{model}, {rate}", ["--minibatches", str(MINIBATCHES)]
    out = run.out / group.replace(", ", "-") / way.name.replace(", ", "-") / f"round{run.round}"
    environment = {} if network.prefix else ENVIRONMENT
    return jobs.start(
        way, model, group, run.round, out, arguments=arguments, network=network, environment=environment
    )


def report(rows: Sequence[Row]) -> str:
    """Return a table of times."""
    return results.table(times(rows))


def times(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a line for each model, network and way; ratios are to `HOROVOD` of the same round."""
    for group in results.groups(rows):
        for way in results.ways(rows, group):
            latest = results.last(rows, group, way)
            took = sorted({str(row["sync"]) for row in of(rows, group, way) if row["sync"]})
            yield {
                "model, network": group,
                "way": way + (f" ({', '.join(took)})" if way.endswith("choice") else ""),
                "ms a minibatch": milliseconds(results.median(rows, group, way)),
                "× dp, horovod": number(times_as_fast(rows, group, way, HOROVOD)),
                "loss": number(latest["loss"], 5),
            }
