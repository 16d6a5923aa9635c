"""Options: arguments and help texts of every command. Runs nothing."""

import argparse
from collections.abc import Callable
from pathlib import Path

from hybridpipe.checkpoint.names import FORMATS
from hybridpipe.cli.values import (
    bandwidth,
    count,
    factor,
    hang_timeout,
    hosts,
    memory_size,
    names,
    num_bytes,
    one_line,
    plan_source,
    plan_sources,
    positive,
    ranks,
    sbatch_option,
    seconds,
    sizes,
    time_limit,
    zero,
)
from hybridpipe.launch.batch import NOTICE_SECONDS
from hybridpipe.planning.checks import (
    AUTO_SYNC,
    BACKENDS,
    COMPRESSIONS,
    NO_COMPRESSION,
    NO_PREDICTION,
    PREDICTIONS,
)
from hybridpipe.planning.schedules.registry import DEFAULT, SCHEDULES

Command = Callable[[str, str], argparse.ArgumentParser]  # adds a command: its name, its help


def add_doctor(command: Command) -> None:
    """Add `doctor`."""
    command("doctor", "check that this machine can train, in one process or under mpirun")


def add_setup(command: Command) -> None:
    """Add `setup`."""
    setup = command(
        "setup", "install an MPI if there is none, and build Horovod against it and torch where it can"
    )
    setup.add_argument(
        "--horovod",
        choices=("required", "auto", "off"),
        help="auto: a Horovod that cannot be built is left out, and a line says why; off: builds none; "
        "default: as before, else auto",
    )
    setup.add_argument(
        "--cuda",
        choices=("off", "staged", "nccl"),
        help="Horovod without CUDA, or with it: all-reduces through host memory, or by NCCL; "
        "default: as before, else staged where torch has CUDA",
    )
    setup.add_argument(
        "--from", dest="bundle", metavar="DIR", help="no index and no network: a folder of launch/bundle"
    )


def add_inspect(command: Command) -> None:
    """Add `inspect`."""
    inspect = command("inspect", "say what is made of a model: layers, what crosses behind them, and why")
    _add_config(inspect)
    inspect.add_argument("--json", action="store_true", help="print the facts as JSON")


def add_profile(command: Command) -> None:
    """Add `profile`."""
    profile = command("profile", "measure a model layer by layer, or convert a published profile")
    source = profile.add_mutually_exclusive_group(required=True)
    source.add_argument("config", metavar="CONFIG", nargs="?", help="a TOML file")
    source.add_argument(
        "--from-pipedream", type=Path, metavar="graph.txt", help="convert PipeDream's format, measure nothing"
    )
    profile.add_argument("--samples", type=positive, help="samples of a minibatch in graph.txt; default: 1")
    _add_set(profile)
    profile.add_argument(
        "--microbatch",
        type=sizes,
        default=(),
        metavar="SAMPLES,...",
        help="microbatch sizes to measure, for `plan` to choose from; default: the config's",
    )
    profile.add_argument("--out", type=Path, default=Path("profile.json"))


def add_probe(command: Command) -> None:
    """Add `probe`."""
    probe = command("probe", "measure the links between ranks, under mpirun")
    probe.add_argument("--out", type=Path, default=Path("cluster.json"))
    probe.add_argument(
        "--flat", type=ranks, metavar="RANKS", help="equal ranks behind one switch, measure nothing"
    )
    probe.add_argument(
        "--bandwidth", type=bandwidth, default=1.25e9, help="with --flat: bytes per second, or 10Gbit"
    )
    probe.add_argument("--latency", type=seconds, default=5e-5, help="with --flat: seconds, or 50us")
    probe.add_argument(
        "--sync",
        choices=[AUTO_SYNC, *BACKENDS],
        default=AUTO_SYNC,
        help="what sums gradients over replicas; default: Horovod, unless another was measured to be faster",
    )


def add_plan(command: Command) -> None:
    """Add `plan`."""
    plan = command("plan", "choose stages and replicas from a profile and a cluster")
    plan.add_argument("--profile", type=Path, required=True)
    plan.add_argument("--cluster", type=Path, required=True)
    plan.add_argument("--ranks", type=ranks, help="the most ranks to use; default: the cluster's")
    plan.add_argument(
        "--schedule",
        choices=("auto", *SCHEDULES),
        default=DEFAULT,
        help="default: 1f1b; auto: the fastest synchronous schedule",
    )
    plan.add_argument(
        "--asynchronous",
        action="store_true",
        help="with --schedule auto: also try asynchronous schedules, whose weights are stale",
    )
    plan.add_argument(
        "--minibatch", type=positive, help="samples; default: four microbatches a rank; pipedream: one"
    )
    plan.add_argument("--microbatch", type=positive, help="samples; default: the best of the measured sizes")
    plan.add_argument(
        "--groups", type=positive, help="also predict so many groups that exchange weights now and then"
    )
    plan.add_argument(
        "--every", type=positive, help="with --groups: minibatches between exchanges; default: 32"
    )
    plan.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        default=NO_COMPRESSION,
        help="compression of float32 gradients between replicas, and of shared parameters; default: none",
    )
    plan.add_argument(
        "--memory",
        type=num_bytes,
        metavar="BYTES",
        help="for the stage of each rank, such as 2GB; default: the cluster's",
    )
    plan.add_argument(
        "--recompute", action="store_true", help="let stages recompute activations where memory is short"
    )
    plan.add_argument(
        "--zero",
        type=zero,
        default=0,
        metavar="0|1|2|auto",
        help="replicas shard optimizer state (1), gradients, too (2); auto: for speed or memory",
    )
    plan.add_argument(
        "--vertical-sync", action="store_true", help="pipedream: all stages use the input stage's version"
    )
    plan.add_argument(
        "--prediction",
        choices=PREDICTIONS,
        default=NO_PREDICTION,
        help="asynchronous: compute with predicted weights, by momentum (spectrain) or Adam (xpipe)",
    )
    plan.add_argument(
        "--max-in-flight", type=positive, metavar="N", help="the most microbatches that a rank stashes"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--out", type=Path)


def add_simulate(command: Command) -> None:
    """Add `simulate`."""
    simulate = command("simulate", "predict a plan's timeline")
    simulate.add_argument("--plan", type=Path, required=True)
    simulate.add_argument("--profile", type=Path, required=True)
    simulate.add_argument("--cluster", type=Path, required=True)
    simulate.add_argument("--trace", type=Path, help="Chrome trace to write, for Perfetto")
    simulate.add_argument("--plot", type=Path, help="SVG to write")
    simulate.add_argument("--json", action="store_true", help="print the figures as JSON")
    simulate.add_argument(
        "--ranks",
        type=ranks,
        help="what if: this many ranks, with a plan chosen for them; more than one machine has are on others "
        "like it, with --bandwidth between them",
    )
    simulate.add_argument(
        "--bandwidth", type=bandwidth, help="what if: bandwidth of the outermost level, such as 100Gbit"
    )
    simulate.add_argument("--latency", type=seconds, help="what if: of the outermost level, such as 5us")


def add_train(command: Command) -> None:
    """Add `train`."""
    train = command("train", "train, under mpirun, horovodrun or srun")
    _add_config(train)
    train.add_argument(
        "--plan", type=plan_source, metavar="auto|dp|straight|FILE", help="default: the config's"
    )
    train.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="measurements of the machines by `probe` or an earlier training (DIR/cluster.json) with as many "
        "ranks; default: measured now, which takes some seconds",
    )
    train.add_argument(
        "--memory",
        type=num_bytes,
        metavar="BYTES",
        help="the most that each rank may have, such as 2GB; default: the config's, or what is found: the "
        "least of cgroups, Slurm's --mem, ulimit, RAM and the GPU's memory",
    )
    train.add_argument("--out", type=Path, metavar="DIR", help="default: runs/CONFIG's name")
    train.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="auto: from the last good checkpoint in DIR/checkpoints, or anew if none; PATH: from a "
        "checkpoint, a folder of checkpoints, or weights as for `import`",
    )
    train.add_argument(
        "--resume-changed",
        action="store_true",
        help="with --resume: settings may differ from the checkpoint's (learning rate, scheduler, loss, "
        "data); the new ones are used, and the differences are listed",
    )
    train.add_argument(
        "--trace",
        action="store_true",
        help="print how each rank spends its time; trace.json holds the last minibatches, not a typical one",
    )
    train.add_argument(
        "--hang-timeout",
        type=hang_timeout,
        default=300.0,
        metavar="SECONDS",
        help="after this long without progress, a rank reports the state of every rank and ends the job; "
        "0: never; default: 300",
    )


def add_launch(command: Command) -> None:
    """Add `launch`."""
    launch = command("launch", "train on several ranks: starts mpirun or srun, and restarts after a failure")
    launch.usage = f"{launch.prog} [OPTIONS] -- train CONFIG ... | -- python train.py ..."
    launch.add_argument("--ranks", type=ranks, help="number of ranks; default: that of the Slurm allocation")
    launch.add_argument(
        "--hosts", type=hosts, default={}, metavar="h1:4,h2:4", help="hosts, with the most ranks of each"
    )
    launch.add_argument("--launcher", choices=("mpirun", "srun"), help="default: srun under Slurm")
    launch.add_argument(
        "--max-restarts",
        type=count,
        default=0,
        metavar="N",
        help="the most restarts, each from the last good checkpoint; default: 0",
    )
    launch.add_argument(
        "--min-ranks", type=ranks, metavar="N", help="fewest ranks after losing hosts; default: all"
    )
    launch.add_argument(
        "--groups", type=ranks, default=1, metavar="N", help="jobs of a group each, for [groups] count = N"
    )
    launch.add_argument(
        "--min-groups", type=ranks, metavar="N", help="fewest groups to go on with; default: all"
    )
    launch.add_argument(
        "--deadline",
        type=seconds,
        default=100.0,
        metavar="SECONDS",
        help="time to save a checkpoint after a signal to stop; default: 100",
    )
    launch.add_argument(
        "--requeue",
        action="store_true",
        help="return the Slurm job to the queue when it was asked to stop, and can continue",
    )
    _add_command(launch)


def add_slurm(command: Command) -> None:
    """Add `slurm`."""
    slurm = command("slurm", "print a batch script for Slurm that trains, resumes and requeues itself")
    slurm.usage = f"{slurm.prog} [OPTIONS] -- train CONFIG ... | -- python train.py ..."
    slurm.add_argument("--nodes", type=ranks, default=1, metavar="N", help="hosts; default: 1")
    slurm.add_argument(
        "--ntasks-per-node", type=ranks, metavar="N", help="ranks of each host; default: one a GPU"
    )
    slurm.add_argument("--gpus-per-node", type=ranks, metavar="N", help="GPUs of each host")
    slurm.add_argument(
        "--cpus-per-task", type=ranks, default=1, metavar="N", help="cores and threads of a rank; default: 1"
    )
    slurm.add_argument("--mem", type=memory_size, metavar="64G", help="memory of each host")
    slurm.add_argument("--time", type=time_limit, metavar="D-HH:MM:SS", help="default: the partition's limit")
    slurm.add_argument("--account", type=one_line, metavar="NAME")
    slurm.add_argument("--partition", type=one_line, metavar="NAME")
    slurm.add_argument(
        "--output", type=one_line, metavar="FILE", help="what the job prints; default: NAME-%%j.log"
    )
    slurm.add_argument(
        "--sbatch",
        type=sbatch_option,
        action="append",
        default=[],
        metavar="=--OPTION",
        help="any further option of sbatch, as in --sbatch=--qos=high; may be repeated",
    )
    slurm.add_argument(
        "--notice",
        type=positive,
        default=NOTICE_SECONDS,
        metavar="SECONDS",
        help=f"from the request to save until the time limit; default: {NOTICE_SECONDS}",
    )
    slurm.add_argument("--launcher", choices=("srun", "mpirun"), default="srun", help="default: srun")
    slurm.add_argument(
        "--max-restarts", type=count, default=3, metavar="N", help="restarts within the job; default: 3"
    )
    slurm.add_argument(
        "--modules", type=names, default=[], metavar="NAME,...", help="modules to load, such as gcc,openmpi"
    )
    slurm.add_argument(
        "--venv", type=Path, metavar="DIR", help="environment to activate; default: that of this command"
    )
    slurm.add_argument(
        "--container", type=one_line, metavar="IMAGE", help="image for apptainer, in which the ranks run"
    )
    slurm.add_argument("--submit", action="store_true", help="submit the script instead of printing it")
    _add_command(slurm)


def add_replay(command: Command) -> None:
    """Add `replay`."""
    replay = command("replay", "run a plan with real messages and sleeps in place of computing, under mpirun")
    replay.add_argument("--profile", type=Path, required=True, help="profile.json, or PipeDream's graph.txt")
    replay.add_argument("--plan", type=Path, required=True)
    replay.add_argument("--cluster", type=Path, help="the machines at full size, for a prediction")
    replay.add_argument("--scale", type=factor, default=1.0, metavar="S", help="divide all bytes by S")
    replay.add_argument("--minibatches", type=positive, metavar="N", help="default: enough for a median")
    replay.add_argument("--no-overlap", action="store_true", help="all-reduce after the whole backward")
    replay.add_argument("--out", type=Path, metavar="DIR", help="default: runs/replay-PLAN's name")


def add_compare(command: Command) -> None:
    """Add `compare`."""
    compare = command("compare", "train under several plans and baselines in turn; starts mpirun itself")
    _add_config(compare)
    compare.add_argument("--ranks", type=ranks, required=True)
    compare.add_argument("--plans", type=plan_sources, default=["auto", "dp", "straight"])
    compare.add_argument(
        "--baselines", type=names, default=[], help="runs baseline_NAME.py beside CONFIG: horovod,ddp"
    )
    compare.add_argument("--rounds", type=positive, default=1, help="runs of each, interleaved; default: 1")
    compare.add_argument("--out", type=Path, metavar="DIR", help="default: runs/compare-CONFIG's name")


def add_report(command: Command) -> None:
    """Add `report`."""
    report = command("report", "write OUT/report.html from what a training or a comparison has left in OUT")
    report.add_argument("out", metavar="OUT", type=Path, help="the folder of `train` or `compare`")


def add_export(command: Command) -> None:
    """Add `export`."""
    export = command("export", "write the weights in a checkpoint as other programs read them")
    export.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a checkpoint's directory; of a folder of checkpoints, or of a training, the last good one",
    )
    export.add_argument("--out", type=Path, required=True, metavar="PATH", help="a file, or a new folder")
    export.add_argument(
        "--format",
        choices=FORMATS,
        default="safetensors",
        help="safetensors: one file; hf: a folder for from_pretrained; dcp: one of torch.distributed."
        "checkpoint; default: safetensors",
    )
    export.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG",
        help="with hf: whose config.json to write: CONFIG.toml of the training, or the config.json or folder "
        "that the model came from",
    )
    _add_set(export)
    export.add_argument(
        "--averages", action="store_true", help="the averages that the callback EMA keeps, not the weights"
    )


def add_import(command: Command) -> None:
    """Add `import`."""
    into = command("import", "make a checkpoint of step 0 from plain weights, for a training to start from")
    into.add_argument(
        "weights",
        metavar="WEIGHTS",
        type=Path,
        help="a safetensors file, or a folder of save_pretrained or of torch.distributed.checkpoint",
    )
    _add_config(into)
    into.add_argument("--out", type=Path, metavar="DIR", help="as for train; default: runs/CONFIG's name")


def _add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="train CONFIG ..., as for `hybridpipe train`, or a program, such as python train.py ...",
    )


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
    add_inspect,
    add_profile,
    add_probe,
    add_plan,
    add_simulate,
    add_train,
    add_launch,
    add_slurm,
    add_replay,
    add_compare,
    add_report,
    add_export,
    add_import,
)
