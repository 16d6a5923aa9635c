"""Choices: is the plan that `auto` takes the fastest? It and the next best, trained by turns in one job.

    python benchmarks/choices.py --out runs/choices       three models, two kinds of schedules; 15 minutes
    python benchmarks/choices.py --models vgg --turns 9
    python benchmarks/choices.py --networks 100mbit,1gbit,10gbit   four hosts (networks.py), ten minutes

One and the same plan differs by a tenth and more from job to job, so that two jobs cannot tell 3 %. Here one
job measures and chooses, among the synchronous schedules or under pipedream, and then trains its choice, the
plans predicted next best, data parallelism and the straight pipeline, unless they are predicted to take
twice as long, each in a trainer of its own, turn by turn, every other turn from last to first. Ranks of one
thread each, two on this machine or one a host; models, samples and optimizer of benchmarks/peers.py and
network.py. Times are of the slowest rank, medians over the turns; ratios are taken within a turn.
Writes DIR/choices.json, a table in DIR/choices.md and a plot in DIR/choices.svg.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import jobs
import networks
import plots
import turns
from peers import ENVIRONMENT, MODELS
from rounds import steady_seconds
from tabulate import tabulate

from hybridpipe import environment
from hybridpipe.files import write_json

SCHEDULES = ("auto", "pipedream")  # what `auto` may choose among: synchronous schedules, that one
RANKS_HERE, NUM_HOSTS = 2, 4
BETWEEN_HOSTS = ("vgg-digits",)
TIMEOUT_SECONDS = 900


def measure(model: str, schedule: str, network: str, num_turns: int, minibatches: int, file: Path) -> None:
    """What each rank does; rank 0 writes what was found."""
    sys.path.insert(0, str(Path(__file__).parent / "peer_programs"))
    import torch
    from common import SEED, TASKS

    from hybridpipe.comm.mpi import MPI
    from hybridpipe.training.trainer import Trainer

    torch.set_num_threads(1)
    task, world = TASKS[model], MPI.COMM_WORLD
    dataset = task.samples(task.minibatch * minibatches)

    def train(plan, **options):
        """A trainer that has trained, and what a minibatch took it."""
        torch.manual_seed(SEED)
        network, seconds = task.build(), []
        trainer = Trainer(
            network,
            loss=task.loss,
            optimizer=task.optimizer,
            plan=plan,
            minibatch_size=task.minibatch,
            **options,
        )
        trainer.fit(dataset, shuffle=False, on_minibatch=lambda record: seconds.append(record.seconds))
        trainer.close()
        return trainer, max(world.allgather(steady_seconds(seconds)))

    plans = turns.trained(train("auto", schedule=schedule)[0].choice.candidates)
    seconds = [[] for _ in plans]
    for turn in range(num_turns):
        for i in list(range(len(plans)))[:: -1 if turn % 2 else 1]:
            seconds[i].append(train(plans[i].plan)[1])
    if world.rank == 0:
        found = [
            {
                "model": model,
                "network": network,
                "told": schedule,
                "plan": f"{each.plan.name}, {each.plan.schedule}, {each.plan.num_microbatches}",
                "predicted": each.seconds,
                "seconds": of_plan,
            }
            for each, of_plan in zip(plans, seconds, strict=True)
        ]
        write_json(file, {"plans": found})


def plot(found: Sequence[Sequence[dict]], path: Path) -> None:
    """Each plan's times beside `auto`'s choice: a point a turn."""
    figure, axes = plots.svg_axes(figsize=(8, 5))
    labels = []
    for of_job in found:
        for each, by_turn in list(zip(of_job, turns.ratios(of_job), strict=True))[1:]:
            labels.append(f"{each['model']}, {each['network']}: {each['plan']}")
            axes.plot(by_turn, [len(labels)] * len(by_turn), ".", color="C0")
            axes.plot(statistics.median(by_turn), len(labels), "|", color="black", markersize=14)
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_yticks(range(1, len(labels) + 1), labels, fontsize=7)
    axes.set_xlabel("times as fast as auto's choice, by turn and in the median")
    figure.tight_layout()
    figure.savefig(path)


def jobs_of(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(network, model, schedule) of each."""
    for network in options.networks.split(","):
        models = options.models.split(",") if options.models else BETWEEN_HOSTS
        if network == networks.LOOPBACK and not options.models:
            models = MODELS
        yield from product([network], models, options.schedules.split(","))


def run(network: str, model: str, schedule: str, options: argparse.Namespace, out: Path) -> list[dict]:
    """One job."""
    ranks = RANKS_HERE if network == networks.LOOPBACK else NUM_HOSTS
    file = out / f"{network}-{model}-{schedule}.json"
    with networks.network(network, NUM_HOSTS) as hosts, file.with_suffix(".txt").open("w") as log:
        command = [*hosts.prefix, sys.executable, "-m", "hybridpipe.launch.mpirun", str(ranks), "--"]
        command += [sys.executable, __file__, "--out", str(file), "--networks", network, "--models", model]
        command += ["--schedules", schedule, "--turns", str(options.turns)]
        command += ["--minibatches", str(options.minibatches)]
        environment = {**ENVIRONMENT, **hosts.environment}
        done = jobs.finished(command, environment, TIMEOUT_SECONDS, stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}; see {log.name}")
    return json.loads(file.read_text())["plans"]


def main() -> None:
    """Command line; under mpirun, a rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/choices"))
    parser.add_argument("--networks", default=networks.LOOPBACK)
    parser.add_argument("--models", default="")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--minibatches", type=int, default=16, help="of a training; three are warm-up")
    options = parser.parse_args()
    out = options.out.resolve()
    if (environment.promised_ranks() or 1) > 1:  # a rank, whose --out is the file to write
        (network, model, schedule), *_ = jobs_of(options)
        measure(model, schedule, network, options.turns, options.minibatches, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for network, model, schedule in jobs_of(options):
        found.append(run(network, model, schedule, options, out))
        print(turns.verdict(found[-1]), flush=True)
    write_json(out / "choices.json", {"jobs": found})
    table = tabulate(list(turns.rows(found)), headers="keys", tablefmt="github", disable_numparse=True)
    text = "\n".join([table, "", *map(turns.verdict, found), "", f"{os.cpu_count()} cores"])
    (out / "choices.md").write_text(text + "\n")
    plot(found, out / "choices.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
