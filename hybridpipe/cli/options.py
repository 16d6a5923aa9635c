"""Usage: what each command can be given, and the help that tells it. Runs nothing."""

import argparse
from collections.abc import Callable
from pathlib import Path

from hybridpipe.cli.values import (
    bandwidth,
    count,
    factor,
    hang_timeout,
    hosts,
    names,
    plan_source,
    plan_sources,
    positive,
    ranks,
    seconds,
    sizes,
)
from hybridpipe.planning.cluster import COMPRESSIONS, NO_COMPRESSION
from hybridpipe.planning.schedules.registry import DEFAULT, SCHEDULES

Command = Callable[[str, str], argparse.ArgumentParser]  # adds one: its name, a line of help


def add_doctor(command: Command) -> None:
    command("doctor", "is this machine ready? alone, or under mpirun")


def add_setup(command: Command) -> None:
    command("setup", "install an MPI if there is none, and build Horovod against it and torch")


def add_profile(command: Command) -> None:
    profile = command("profile", "measure a model layer by layer, or take a published profile")
    source = profile.add_mutually_exclusive_group(required=True)
    source.add_argument("config", metavar="CONFIG", nargs="?", help="a TOML file")
    source.add_argument(
        "--from-pipedream", type=Path, metavar="graph.txt", help="measure nothing: read PipeDream's format"
    )
    profile.add_argument(
        "--samples", type=positive, help="the minibatch that graph.txt was measured with; default: 1"
    )
    _add_set(profile)
    profile.add_argument(
        "--microbatch",
        type=sizes,
        default=(),
        metavar="SAMPLES,...",
        help="the sizes to measure, for `plan` to choose among; default: the config's",
    )
    profile.add_argument("--out", type=Path, default=Path("profile.json"))


def add_probe(command: Command) -> None:
    probe = command("probe", "measure the links between ranks, under mpirun")
    probe.add_argument("--out", type=Path, default=Path("cluster.json"))
    probe.add_argument(
        "--flat", type=ranks, metavar="RANKS", help="measure nothing: equal ranks behind one switch"
    )
    probe.add_argument(
        "--bandwidth", type=bandwidth, default=1.25e9, help="with --flat: bytes per second, or 10Gbit"
    )
    probe.add_argument("--latency", type=seconds, default=5e-5, help="with --flat: seconds, or 50us")


def add_plan(command: Command) -> None:
    plan = command("plan", "choose stages and replicas from a profile and a cluster")
    plan.add_argument("--profile", type=Path, required=True)
    plan.add_argument("--cluster", type=Path, required=True)
    plan.add_argument("--ranks", type=ranks, help="use at most so many ranks")
    plan.add_argument(
        "--schedule",
        choices=("auto", *SCHEDULES),
        default=DEFAULT,
        help="default: 1f1b; auto: the fastest of the synchronous ones",
    )
    plan.add_argument(
        "--asynchronous",
        action="store_true",
        help="with auto: asynchronous ones, too, whose weights are stale",
    )
    plan.add_argument(
        "--minibatch", type=positive, help="samples; default: four microbatches a rank; pipedream: one"
    )
    plan.add_argument(
        "--microbatch", type=positive, help="samples; default: the best of those that were measured"
    )
    plan.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        default=NO_COMPRESSION,
        help="of float32 gradients on their way; default: none",
    )
    plan.add_argument("--memory", type=positive, metavar="BYTES", help="per rank; default: the cluster's")
    plan.add_argument(
        "--recompute", action="store_true", help="let stages recompute activations where it pays"
    )
    plan.add_argument(
        "--vertical-sync", action="store_true", help="pipedream: all stages use the input stage's version"
    )
    plan.add_argument(
        "--max-in-flight", type=positive, metavar="N", help="a rank stashes so many microbatches at most"
    )
    plan.add_argument(
        "--search", type=positive, default=0, metavar="N", help="simulate N more plans around the best one"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--out", type=Path)


def add_simulate(command: Command) -> None:
    simulate = command("simulate", "predict a plan's timeline")
    simulate.add_argument("--plan", type=Path, required=True)
    simulate.add_argument("--profile", type=Path, required=True)
    simulate.add_argument("--cluster", type=Path, required=True)
    simulate.add_argument("--trace", type=Path, help="write a Chrome trace, for Perfetto")
    simulate.add_argument("--plot", type=Path, help="write an SVG")
    simulate.add_argument("--json", action="store_true", help="print the figures as JSON")
    simulate.add_argument("--ranks", type=ranks, help="what if: so many ranks, with a plan chosen for them")
    simulate.add_argument(
        "--bandwidth", type=bandwidth, help="what if: of the outermost level, such as 100Gbit"
    )
    simulate.add_argument("--latency", type=seconds, help="what if: of the outermost level, such as 5us")


def add_train(command: Command) -> None:
    train = command("train", "train, under mpirun, horovodrun or srun")
    _add_config(train)
    train.add_argument(
        "--plan", type=plan_source, metavar="auto|dp|straight|FILE", help="default: the config's"
    )
    train.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="the machines as `probe` or another training (DIR/cluster.json) has measured them with as many "
        "ranks; default: measured now, in some seconds",
    )
    train.add_argument("--out", type=Path, metavar="DIR", help="default: runs/CONFIG's name")
    train.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="auto: from the last good checkpoint in DIR/checkpoints, or else anew; PATH: a checkpoint, "
        "a folder of them, or a safetensors file of weights",
    )
    train.add_argument(
        "--resume-changed",
        action="store_true",
        help="with --resume: settings may be others than the checkpoint's (a learning rate, a scheduler, a "
        "loss, the data); the new ones count, and are listed",
    )
    train.add_argument(
        "--trace",
        action="store_true",
        help="print where each rank's time goes; trace.json holds the last minibatches, not a typical one",
    )
    train.add_argument(
        "--hang-timeout",
        type=hang_timeout,
        default=300.0,
        metavar="SECONDS",
        help="without progress for so long, a rank tells what all are doing and ends the job; 0: never; "
        "default: 300",
    )


def add_launch(command: Command) -> None:
    launch = command("launch", "train on several ranks: starts mpirun or srun, and again after a failure")
    launch.add_argument("--ranks", type=ranks, help="default: those of the Slurm allocation")
    launch.add_argument(
        "--hosts", type=hosts, default={}, metavar="h1:4,h2:4", help="and how many ranks each can take"
    )
    launch.add_argument("--launcher", choices=("mpirun", "srun"), help="default: srun under Slurm")
    launch.add_argument(
        "--max-restarts",
        type=count,
        default=0,
        metavar="N",
        help="start again so often, from the last good checkpoint",
    )
    launch.add_argument(
        "--min-ranks", type=ranks, metavar="N", help="with hosts gone, go on with so many; default: all"
    )
    launch.add_argument(
        "--deadline",
        type=seconds,
        default=100.0,
        metavar="SECONDS",
        help="asked to stop, the job has so long to save; default: 100",
    )
    launch.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- train CONFIG ...", help="as `hybridpipe train`"
    )


def add_replay(command: Command) -> None:
    replay = command("replay", "run a plan with real messages, computing by sleeping, under mpirun")
    replay.add_argument("--profile", type=Path, required=True, help="profile.json, or PipeDream's graph.txt")
    replay.add_argument("--plan", type=Path, required=True)
    replay.add_argument("--cluster", type=Path, help="for a prediction, at full size")
    replay.add_argument("--scale", type=factor, default=1.0, metavar="S", help="bytes are divided by S")
    replay.add_argument("--minibatches", type=positive, metavar="N", help="default: enough for a median")
    replay.add_argument("--no-overlap", action="store_true", help="all-reduce after the whole backward")
    replay.add_argument("--out", type=Path, metavar="DIR", help="default: runs/replay-PLAN's name")


def add_compare(command: Command) -> None:
    compare = command("compare", "train under several plans and baselines in turn; starts mpirun itself")
    _add_config(compare)
    compare.add_argument("--ranks", type=ranks, required=True)
    compare.add_argument("--plans", type=plan_sources, default=["auto", "dp", "straight"])
    compare.add_argument(
        "--baselines", type=names, default=[], help="runs baseline_NAME.py beside CONFIG: horovod,ddp"
    )
    compare.add_argument("--rounds", type=positive, default=1, help="how often; runs are interleaved")
    compare.add_argument("--out", type=Path, metavar="DIR", help="default: runs/compare-CONFIG's name")


def add_export(command: Command) -> None:
    export = command("export", "write the weights in a checkpoint as a plain safetensors file")
    export.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="its directory, or a folder: the last good one in it",
    )
    export.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors")


def add_import(command: Command) -> None:
    into = command("import", "make a checkpoint of a plain safetensors file, for a training to start from")
    into.add_argument("file", metavar="FILE.safetensors", type=Path, help="what model.state_dict() holds")
    _add_config(into)
    into.add_argument("--out", type=Path, metavar="DIR", help="as of train; default: runs/CONFIG's name")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    _add_set(parser)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="override a field of CONFIG"
    )


COMMANDS = (
    add_doctor,
    add_setup,
    add_profile,
    add_probe,
    add_plan,
    add_simulate,
    add_train,
    add_launch,
    add_replay,
    add_compare,
    add_export,
    add_import,
)
