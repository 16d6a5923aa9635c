"""Zero: data parallelism whose replicas shard their update, beside that whose replicas do not.

    python benchmarks/run.py zero --rounds 3                          two models, in a host and between hosts
    python benchmarks/run.py zero --rounds 3 --only loopback          without root

Two ranks have one thread each and train half a minibatch each. In a round every way runs once, as a fresh
job, and ratios are taken within the round. First a job measures model and machines, and chooses whether to
shard: "the plan's choice". What is predicted follows from its profile and cluster, of the same round.
"""

from collections.abc import Iterator, Sequence

import jobs
import networks
import results
from jobs import Run, Way
from networks import LOOPBACK, Network
from results import Row, milliseconds, number, times_as_fast

from hybridpipe.files import read_cluster, read_profile
from hybridpipe.planning.plan import Plan, Variant
from hybridpipe.planning.simulator.predict import predict

MODELS = ("vgg", "mlp")
RATES = (LOOPBACK, "10gbit")
DP, CHOICE = "dp", "the plan's choice"
VARIANTS = {  # of programs/ours.py
    DP: Variant(),
    "dp, zero = 1": Variant(zero=1),
    "dp, zero = 1, reduce-scatter": Variant(zero=1, scatter=True),
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
MINIBATCHES = 16  # of a job; three are warm-up


def measure(run: Run) -> Iterator[Row]:
    """Train every model every way, in one host and between two."""
    for rate in RATES:
        wanted = [model for model in MODELS if run.wants(f"{model}, {rate}", DP)]
        if wanted and rate != LOOPBACK and not networks.are_available(run.options.netcluster):
            raise SystemExit("zero: hosts need root and netcluster, named by --netcluster or $NETCLUSTER")
        if wanted:
            with run.network(rate, num_hosts=2) as network:
                for model in wanted:
                    yield from _trained(run, model, rate, network)


def _trained(run: Run, model: str, rate: str, network: Network) -> Iterator[Row]:
    group, arguments = f"{model}, {rate}", ["--minibatches", str(MINIBATCHES)]
    folder = run.out / group.replace(", ", "-")

    def start(name: str, variant: str) -> Row:
        out = folder / variant / f"round{run.round}"
        way, environment = Way(name, "ours", variant), {} if network.prefix else ENVIRONMENT
        return jobs.start(
            way, model, group, run.round, out, arguments=arguments, network=network, environment=environment
        )

    chosen = start(CHOICE, "dp-auto")
    yield chosen
    if chosen.error:
        return
    measured = folder / "dp-auto" / f"round{run.round}"
    profile, cluster = (read(measured / name) for read, name in FILES)
    for name, variant in VARIANTS.items():
        plan = Plan.data_parallel(profile.num_layers, 2, 2).running([variant])
        predicted = predict(plan, profile, cluster)[1].minibatch_seconds
        row = start(name, f"dp-{variant.zero}{'-scatter' * variant.scatter}")
        yield Row(group, name, run.round, {**row.figures, "predicted": predicted}, row.error, row.load)


FILES = ((read_profile, "profile.json"), (read_cluster, "cluster.json"))


def report(rows: Sequence[Row]) -> str:
    """Return a table of times, measured and predicted."""
    return results.table(times(rows))


def times(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a line for each model, network and way; ratios are to `dp`."""
    for group in results.groups(rows):
        for way in results.ways(rows, group):
            predicted, plain = (results.median(rows, group, each, "predicted") for each in (way, DP))
            latest = results.last(rows, group, way)
            yield {
                "model, network": group,
                "way": way + (f" ({latest['zero']})" if way == CHOICE else ""),
                "ms a minibatch": milliseconds(results.median(rows, group, way)),
                "× dp": number(times_as_fast(rows, group, way, DP)),
                "predicted": milliseconds(predicted),
                "× dp, predicted": number(plain / predicted if plain and predicted else None),
                "loss": number(latest["loss"], 5),
            }
