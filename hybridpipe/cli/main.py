"""Command line: parse the arguments and run one command.

A user's mistake is reported in one line with exit code 2, before MPI starts. Modules that load torch or
start MPI are imported by the command that needs them.
"""

import argparse
import gc
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hybridpipe.checkpoint.names import CHECKPOINTS
from hybridpipe.cli.options import COMMANDS
from hybridpipe.environment import launched_rank
from hybridpipe.errors import REMEDIES, UserError, suggest
from hybridpipe.health import exit_report, preemption
from hybridpipe.planning.checks import NO_COMPRESSION
from hybridpipe.planning.schedules.registry import TRAITS
from hybridpipe.version import __version__

if TYPE_CHECKING:
    from hybridpipe.config.file import Config
    from hybridpipe.launch.supervisor import LaunchOptions
    from hybridpipe.planning.request import PlanRequest

RANK0_SECONDS = 5.0  # long enough for rank 0 to print its mistake and for mpirun to end the other ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 after a failure, 2 after a mistake of the user."""
    options = _parser().parse_args(arguments)
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        return 1
    except UserError as error:
        exit_report.tell(error.exit_code, str(error), step=error.step)
        _print_mistake(f"hybridpipe: {error}")
        return error.exit_code
    except Exception as error:
        if sys.excepthook is sys.__excepthook__:  # without MPI nothing else reports this to the supervisor
            what = f"{type(error).__name__}: {error}"
            exit_report.tell(1, f"rank {launched_rank()}, before training: {what}", what)
        raise
    return code


def _run(options: argparse.Namespace) -> int:
    """Run the command. Raises UserError with the remedy if a package that it needs is missing."""
    try:
        code: int = options.run(options)
        return code
    except ModuleNotFoundError as error:
        if error.name not in REMEDIES:
            raise
        missing = f"{options.name} needs {error.name}, which is missing"
        raise UserError(f"{missing}: {REMEDIES[error.name]}") from None


def _is_unread() -> bool:
    """True if the reader of standard output is gone, as after `| head`; further output is then discarded."""
    stdout, poll = sys.stdout.fileno(), select.poll()
    poll.register(stdout, 0)
    if not any(state & select.POLLERR for _, state in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True


def _print_mistake(mistake: str) -> None:
    """Print a mistake in one line.

    Rank 0 prints at once, and mpirun ends the other ranks once it has ended. A rank that still runs after
    RANK0_SECONDS prints as well, since the mistake may be of its host alone.
    """
    if launched_rank() > 0:
        time.sleep(RANK0_SECONDS)
    print(" ".join(mistake.splitlines()), file=sys.stderr, flush=True)


@contextmanager
def _loading() -> Iterator[None]:
    """Disable the garbage collector while torch is imported.

    Nearly all objects that the import makes are permanent. Collections among them took a quarter of its time
    (docs/log), so the objects are frozen: later collections leave them out as well.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _doctor(_: argparse.Namespace) -> int:
    from hybridpipe.launch import doctor

    return doctor.main()


def _setup(options: argparse.Namespace) -> int:
    for name in ("torch", "mpi4py"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    script = Path(__file__).parents[1] / "install/setup.sh"
    words = {"--horovod": options.horovod, "--cuda": options.cuda, "--from": options.bundle}
    given = [word for name, value in words.items() if value is not None for word in (name, value)]
    os.execvp("bash", ["bash", str(script), sys.executable, *given])


def _profile(options: argparse.Namespace) -> int:
    from hybridpipe.files import read_pipedream_graph, write_json

    if options.from_pipedream:
        if options.set or options.microbatch:
            raise UserError("profile: --set and --microbatch go with CONFIG, not with --from-pipedream")
        from hybridpipe.planning.graph.linearise import narrow_order

        graph = read_pipedream_graph(options.from_pipedream)
        write_json(options.out, graph.profile(narrow_order(graph), options.samples or 1, "published"))
        if options.samples is None:
            print("the file does not give the samples of a minibatch: 1 is assumed; --samples sets it")
    else:
        if options.samples is not None:
            raise UserError("profile: --samples goes with --from-pipedream; CONFIG has train.microbatch")
        config = _load(options)
        from hybridpipe.cli.profile import circumstances, profile_model

        profile = profile_model(config, options.microbatch)
        if launched_rank():
            return 0
        print(circumstances(profile))
        write_json(options.out, profile)
    print(f"written to {options.out}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    config = _load(options)
    from hybridpipe.cli.inspect import inspect_model, text_of

    text = text_of(inspect_model(config), options.json)
    if not launched_rank():
        print(text)
    return 0


def _probe(options: argparse.Namespace) -> int:
    from hybridpipe.files import write_json

    if options.flat is not None:
        from hybridpipe.planning.cluster import Cluster

        try:
            write_json(options.out, Cluster.flat(options.flat, options.bandwidth, options.latency))
        except ValueError as error:
            raise UserError(f"probe --flat: {error}") from None
        return 0
    from hybridpipe.collectives.backends import suited, usable
    from hybridpipe.comm.communicators import this_host
    from hybridpipe.comm.gpus import own_device
    from hybridpipe.comm.idle import share_cores
    from hybridpipe.comm.mpi import MPI
    from hybridpipe.comm.progress_thread import needs_progress_thread
    from hybridpipe.health import failure
    from hybridpipe.measure.probe import probe
    from hybridpipe.report.cluster import describe

    failure.install()
    share_cores(MPI.COMM_WORLD)
    device = own_device(MPI.COMM_WORLD, None)  # the default of training, too
    try:
        thread = needs_progress_thread(MPI.COMM_WORLD, device)
        backends = suited(usable(MPI.COMM_WORLD, device), options.sync)
        cluster = probe(MPI.COMM_WORLD, backends, progress_thread=thread, device=device)
    except ValueError as error:
        failure.refuse(error)
    num_cores = this_host(MPI.COMM_WORLD).num_cores if device.type == "cpu" else None
    if MPI.COMM_WORLD.rank == 0:
        write_json(options.out, cluster)
        print(f"{describe(cluster, num_cores)}\nwritten to {options.out}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from hybridpipe.config.options import GroupOptions
    from hybridpipe.files import read_cluster, read_profile, write_json
    from hybridpipe.planning.search.groups import first_ranks, forecast_groups
    from hybridpipe.planning.search.search import search_sizes
    from hybridpipe.report.tables import explain, groups_line

    if options.every and not options.groups:
        raise UserError("plan: --every goes with --groups")
    profile, cluster = read_profile(options.profile), read_cluster(options.cluster)
    if options.compression != NO_COMPRESSION:
        cluster = cluster.compressing(options.compression, profile.dtype)
    if options.memory is not None:
        cluster = replace(cluster, memory_bytes=options.memory)
    ranks = options.ranks or cluster.num_ranks
    if options.microbatch:
        profile = profile.scaled_to(options.microbatch).of_one_size
    minibatch = _minibatch(options, profile.samples, ranks)
    request = _request(options)
    try:
        found = search_sizes(profile, cluster, minibatch, request, ranks)
        told = []
        if options.groups:
            part, every = first_ranks(cluster, ranks), options.every or GroupOptions.every
            groups = forecast_groups(profile, part, minibatch, request, options.groups, every)
            told = [groups_line(groups, found[0].plan)]
    except ValueError as error:
        raise UserError(f"plan: {error}") from None
    best = found[0]
    if options.out:
        write_json(options.out, best.plan)
    if options.json:
        print(json.dumps(asdict(best.plan)))
    else:
        print("\n".join([explain(best.plan, found, profile.scaled_to(best.samples), cluster, ranks), *told]))
    return 0


def _request(options: argparse.Namespace) -> "PlanRequest":
    """Return the plan request that the options describe; UserError if they contradict each other."""
    from hybridpipe.planning.request import PlanRequest

    try:
        return PlanRequest(**{field.name: getattr(options, field.name) for field in fields(PlanRequest)})
    except ValueError as error:
        raise UserError(f"plan: {error}") from None


def _minibatch(options: argparse.Namespace, samples: int, ranks: int) -> int:
    """Return the samples of a minibatch; UserError if --microbatch does not fit it."""
    if options.schedule in TRAITS and TRAITS[options.schedule].whole_minibatch:
        minibatch: int = options.minibatch or samples
        if options.microbatch not in (None, minibatch):
            raise UserError(
                f"plan: --microbatch must be the minibatch of {minibatch} samples under {options.schedule}, "
                f"where it travels whole, got {options.microbatch}"
            )
        return minibatch
    # GPipe (section 2.3) finds the bubble negligible from four microbatches a stage on.
    minibatch = options.minibatch or 4 * ranks * samples
    if options.microbatch and options.microbatch > minibatch:
        raise UserError(f"plan: --microbatch must be <= --minibatch = {minibatch}, got {options.microbatch}")
    return minibatch


def _simulate(options: argparse.Namespace) -> int:
    from hybridpipe.cli.simulate import simulate

    return simulate(options)


def _train(options: argparse.Namespace) -> int:
    config, plan = _checked(options)
    with preemption.listening():
        with _loading():
            config.check()
            import torch._dynamo  # noqa: F401  else the first optimizer imports it during a measurement

            from hybridpipe.cli.train import train

        return train(config, plan, _out(options), options)


def _checked(options: argparse.Namespace) -> "tuple[Config, str]":
    """Return a training's config and plan source, after every check that needs no torch."""
    from hybridpipe.files import read_cluster, read_plan

    config: Config = _load(options)
    if options.memory is not None:
        config = replace(config, plan=replace(config.plan, memory=options.memory))
    plan: str = options.plan or config.plan.source
    if plan.endswith(".json"):
        read_plan(plan)  # for its checks only; the trainer reads it again
    if options.cluster is not None:
        read_cluster(options.cluster)  # for its checks only, too
    if options.resume not in (None, "auto") and not Path(options.resume).exists():
        raise UserError(f"{options.resume}: --resume: does not exist; must be auto or an existing path")
    if options.resume_changed and options.resume is None:
        raise UserError("train: --resume-changed goes with --resume auto or --resume PATH")
    return config, plan


def _launch(options: argparse.Namespace) -> int:
    """Report mistakes in the command before any rank starts, then supervise the job."""
    from hybridpipe.launch import supervisor

    ranks, slots = supervisor.places(options.ranks, options.hosts)
    if options.groups > 1:
        return _launch_groups(options, ranks, slots)
    if options.min_groups:
        raise UserError("launch: --min-groups goes with --groups")
    job = _of_command(options, ranks)
    return supervisor.supervise(
        replace(
            job,
            ranks=ranks,
            launcher=options.launcher or ("srun" if "SLURM_JOB_ID" in os.environ else "mpirun"),
            slots=slots,
            max_restarts=options.max_restarts,
            min_ranks=options.min_ranks or ranks,
            deadline_seconds=options.deadline,
            requeue=options.requeue,
        )
    )


def _launch_groups(options: argparse.Namespace, ranks: int, slots: Mapping[str, int]) -> int:
    """Supervise a job for each group, with these options."""
    from hybridpipe.launch.groups import GroupLaunch, supervise_groups

    if options.min_ranks or options.requeue:
        raise UserError("launch: --groups goes without --min-ranks and --requeue")
    job = _of_command(options, ranks // options.groups)
    each = ["--max-restarts", str(options.max_restarts), "--deadline", str(options.deadline)]
    each += ["--launcher", options.launcher] if options.launcher else []
    least = options.min_groups or options.groups
    return supervise_groups(GroupLaunch(options.groups, least, ranks, slots, each, job.words, job.out))


def _slurm(options: argparse.Namespace) -> int:
    """Report mistakes in the command now, not when the job begins, then print or submit its script."""
    from hybridpipe.cli.slurm import ntasks_per_node, slurm

    ranks = options.nodes * ntasks_per_node(options)
    words = _words(options)
    if options.container is None or words[:1] in ([], ["train"]):  # other programs are in the image
        _of_command(options, ranks)
    return slurm(options, words)


def _words(options: argparse.Namespace) -> list[str]:
    """Return the words of the command after --."""
    words: list[str] = options.command
    return words[1:] if words[:1] == ["--"] else words


def _of_command(options: argparse.Namespace, ranks: int) -> "LaunchOptions":
    """Return the supervisor's options for the command after --. Raises UserError if that cannot run."""
    from hybridpipe.launch import supervisor

    words = _words(options)
    if words[:1] == ["train"]:
        return _of_training(words, ranks)
    return supervisor.of_script(words, options.name)


def _of_training(words: Sequence[str], ranks: int) -> "LaunchOptions":
    """Return the supervisor's options for `train CONFIG ...`, after every check that needs no torch."""
    from hybridpipe.files import read_plan
    from hybridpipe.launch.supervisor import LaunchOptions

    training = _parser().parse_args(words)
    plan, out = _checked(training)[1], _out(training)
    is_file = plan.endswith(".json")
    if is_file:
        try:
            read_plan(plan).check_world(ranks)
        except ValueError as error:
            raise UserError(f"{plan}: {error}") from None
    resumes = training.resume == "auto"
    return LaunchOptions(tuple(words), out, out / CHECKPOINTS, ranks, fixed_plan=is_file, resumes=resumes)


def _out(options: argparse.Namespace) -> Path:
    """Return the folder that `train` writes to."""
    return options.out or Path("runs") / Path(options.config).stem


def _replay(options: argparse.Namespace) -> int:
    from hybridpipe.files import read_cluster, read_costs, read_plan

    plan = read_plan(options.plan)
    profile = read_costs(options.profile, plan.microbatch_samples)
    cluster = None if options.cluster is None else read_cluster(options.cluster)
    from hybridpipe.cli.replay import Replay, replay

    settings = Replay(profile, plan, cluster, options.scale, options.minibatches, not options.no_overlap)
    return replay(settings, options.out or Path("runs") / f"replay-{options.plan.stem}")


def _compare(options: argparse.Namespace) -> int:
    _load(options).check()
    from hybridpipe.cli.compare import compare

    out = options.out or Path("runs") / f"compare-{Path(options.config).stem}"
    return compare(
        Path(options.config),
        options.ranks,
        options.plans,
        options.baselines,
        options.set,
        options.rounds,
        out,
    )


def _report(options: argparse.Namespace) -> int:
    from hybridpipe.cli.report import report

    return report(options.out)


def _export(options: argparse.Namespace) -> int:
    from hybridpipe.cli.export import export

    print("\n".join(export(options)))
    return 0


def _import(options: argparse.Namespace) -> int:
    config = _load(options)
    config.check()
    from hybridpipe.cli.import_weights import import_weights

    print(f"written to {import_weights(config, options.weights, _out(options) / CHECKPOINTS)}")
    return 0


def _load(options: argparse.Namespace) -> "Config":
    from hybridpipe.config.file import load_config

    return load_config(options.config, options.set)


_RUNS = {
    "doctor": _doctor,
    "setup": _setup,
    "inspect": _inspect,
    "profile": _profile,
    "probe": _probe,
    "plan": _plan,
    "simulate": _simulate,
    "train": _train,
    "launch": _launch,
    "slurm": _slurm,
    "replay": _replay,
    "compare": _compare,
    "report": _report,
    "export": _export,
    "import": _import,
}


class _Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in one line, on rank 0 only, and says what was meant."""

    def parse_known_args(self, *given: Any, **kwargs: Any) -> Any:
        """Refuse what is not known here, so that a command points to its own help."""
        found, unknown = super().parse_known_args(*given, **kwargs)
        if unknown:
            options = [name for name in self._option_string_actions if name.startswith("--")]
            hint = suggest(unknown[0].partition("=")[0], options) if unknown[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = f"invalid choice: {value!r}{suggest(str(value), map(str, action.choices))}"
            raise argparse.ArgumentError(action, what)

    def error(self, message: str) -> NoReturn:
        _print_mistake(f"{self.prog}: {message}; see {self.prog} --help")
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hybridpipe", description="Pipeline and data parallelism for PyTorch, planned from measurements."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=_RUNS[name], name=name)
        return added

    for add in COMMANDS:
        add(command)
    return parser
