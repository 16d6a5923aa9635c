"""Gradient sync: a training with other sizes of buckets and other cycles of Horovod's thread, in turn.

    python benchmarks/gradient_sync.py examples/digits.toml             four ranks, data parallelism
    python benchmarks/gradient_sync.py examples/digits.toml --plan 2-2.json --network 1gbit

One job trains with every setting in every round, so that what else the machine does is the same for all; each
training starts Horovod anew. Milliseconds a minibatch on the slowest rank: of a training the median, and of
those the median over the rounds. Networks are those of networks.py, with a host for each rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path

import jobs
import networks
import rounds
from tabulate import tabulate

from hybridpipe.config import load_config
from hybridpipe.files import read_plan
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import ceil_div

MIB = 2**20
Setting = tuple[float, float]  # of HOROVOD_CYCLE_TIME in ms, 0: not set; of a bucket in MiB


def train(options: argparse.Namespace, setting: Setting) -> float:
    """On all ranks of an MPI job: a typical minibatch's seconds, of the slowest."""
    import torch
    from torch.utils.data import Subset

    from hybridpipe.comm.mpi import MPI
    from hybridpipe.optim import gradient_sync
    from hybridpipe.training.metrics import MinibatchRecord
    from hybridpipe.training.trainer import Trainer

    cycle, bucket = setting
    gradient_sync.BUCKET_BYTES = round(bucket * MIB)
    for name in (gradient_sync.CYCLE_TIME, gradient_sync.FUSION_THRESHOLD):
        os.environ.pop(name, None)
    if cycle:
        os.environ[gradient_sync.CYCLE_TIME] = str(cycle)
    config = load_config(options.config, options.set)
    torch.manual_seed(0)
    model, size, ranks = config.model.build(), config.train.minibatch, MPI.COMM_WORLD.size
    slices = ceil_div(size, config.train.microbatch or ceil_div(size, ranks))
    plan = read_plan(options.plan) if options.plan else Plan.data_parallel(len(model), ranks, slices, "1f1b")
    dataset = config.data.build()
    per_epoch = max(1, min(options.minibatches, len(dataset) // size))
    seconds: list[float] = []

    def note(record: MinibatchRecord) -> None:
        seconds.append(record.seconds)

    trainer = Trainer(
        model,
        loss=config.loss.build(),
        optimizer=config.optimizer.build,
        plan=plan,
        minibatch_size=size,
    )
    some = Subset(dataset, range(per_epoch * size))
    trainer.fit(some, epochs=ceil_div(options.minibatches, per_epoch), on_minibatch=note)
    trainer.close()
    return max(MPI.COMM_WORLD.allgather(rounds.steady_seconds(seconds)))


def settings(options: argparse.Namespace) -> list[Setting]:
    """All that are compared."""
    cycles, buckets = (
        [float(number) for number in text.split(",")] for text in (options.cycles, options.buckets)
    )
    return list(product(cycles, buckets))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value")
    parser.add_argument("--plan", type=Path, help="a plan file; by default data parallelism")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--network", default=networks.LOOPBACK)
    parser.add_argument("--cycles", default="1,3,5,10", help="ms; 0, by itself: Horovod's own")
    parser.add_argument("--buckets", default="2", help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minibatches", type=int, default=20)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        from hybridpipe.comm.mpi import MPI

        taken = [[train(options, setting) for setting in settings(options)] for _ in range(options.rounds)]
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(taken), flush=True)
        return
    with networks.network(options.network, options.ranks) as where:
        command = [sys.executable, "-m", "hybridpipe.launch.mpirun", str(options.ranks), "--", sys.executable]
        command += [__file__, *sys.argv[1:], "--rank"]
        done = jobs.finished(
            [*where.prefix, *command], where.environment, 1800, stdout=subprocess.PIPE, text=True
        )
        done.check_returncode()
    taken = list(zip(*json.loads(done.stdout.splitlines()[-1]), strict=True))
    lines = [
        [cycle or "Horovod's", bucket, 1e3 * statistics.median(each), 1e3 * min(each), 1e3 * max(each)]
        for (cycle, bucket), each in zip(settings(options), taken, strict=True)
    ]
    headers = ["cycle, ms", "bucket, MiB", "ms a minibatch", "least", "most"]
    print(tabulate(lines, headers, tablefmt="github", floatfmt=("g", "g", ".1f", ".1f", ".1f")))


if __name__ == "__main__":
    main()
