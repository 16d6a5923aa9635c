"""Training of a config: the run, its printed report and its files.

Only rank 0 prints, and writes all files but the checkpoints.

DIR/run.json  plan.json  profile.json  cluster.json  machines.json
DIR/metrics.jsonl  summary.json  trace.json  model.safetensors  report.html
DIR/checkpoints/step-00000120/ ...
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from torch import nn

from hybridpipe import environment
from hybridpipe.callbacks.loggers import make_loggers
from hybridpipe.checkpoint.claim import Claim
from hybridpipe.checkpoint.directory import checkpoints, stand_on
from hybridpipe.checkpoint.names import CHECKPOINTS, step_of
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.checkpoint.whole import write_whole
from hybridpipe.cli.profile import build_model
from hybridpipe.comm.mpi import MPI
from hybridpipe.config.file import Config
from hybridpipe.config.options import DataOptions, RankOptions
from hybridpipe.errors import UserError
from hybridpipe.files import write_json, writing
from hybridpipe.health import failure
from hybridpipe.model.deferred_init.deferred import Factory
from hybridpipe.planning.request import AUTO
from hybridpipe.report.memory import beyond_limit, memory_table
from hybridpipe.report.rank_time import parts_table, ranks_table
from hybridpipe.report.tables import plan_details
from hybridpipe.report.words import rounded
from hybridpipe.run_folder.data import RunStart
from hybridpipe.run_folder.report import report_at_end
from hybridpipe.run_folder.start import run_start
from hybridpipe.run_folder.write import MetricsFile, gather_results, remove_results, write_plan
from hybridpipe.training.trainer import Trainer
from hybridpipe.types import Loss

MEMORY = ("peak_memory_bytes", "memory_before_bytes", "memory_limit_bytes", "memory_limit_origin")


@failure.refusing()
def train(config: Config, plan: str, out: Path, options: argparse.Namespace) -> int:
    """Run the training that `config` describes, write its files to `out`, return exit code 0. Collective.

    Args:
        plan: a plan's name or the path of a plan.json.
        options: of the command: `trace`, `hang_timeout`, `resume`, `resume_changed` and `cluster`.
    """
    failure.install()
    check_launcher()
    made, loss, resume = partial(build_model, config), config.loss.build(), options.resume
    model = made() if config.model.materialize == "all" else made
    try:
        dataset, validation = config.data.build(), config.data.build_validation()
    except (OSError, ModuleNotFoundError) as error:  # missing data is reported in one line
        failure.refuse(error)
    try:
        trainer = _trainer(config, model, loss, plan, out, options)
        trainer.claim(out)  # before anything is read or written there
        resumed = _resume(trainer, resume, out, options.resume_changed)
        if trainer.world.rank == 0:  # at once: measuring, and a search for another plan, take their time
            print("".join(f"{line}\n" for line in resumed), end="", flush=True)
        trainer.prepare(dataset, validation, folder=out)
    except (TypeError, ValueError) as error:
        failure.refuse(error)
    notes = list(_remarks(trainer, config))
    start = run_start(trainer, config.where, config.settings(), plan)
    if start is not None:
        _start_folder(trainer, out, resume, replace(start, notes=tuple(resumed)), notes)
    records = MetricsFile(trainer, out, _continues_own(out, resume))
    trainer.fit(
        dataset,
        0 if trainer.metrics.has_reached_target else max(0, config.train.most_epochs - trainer.epoch),
        max_steps=config.train.max_steps,
        validation=validation,
        eval_every=config.train.eval_every,
        shuffle=config.train.shuffle,
        drop_last=config.train.drop_last,
        on_minibatch=records.note,
        target_accuracy=config.train.target_accuracy,
        target_loss=config.train.target_loss,
        checkpoint=Checkpointing(out / CHECKPOINTS, config.checkpoint.every, config.checkpoint.keep),
    )
    records.close()
    _finish(trainer, out, options.trace)
    trainer.close()
    return 0


def _remarks(trainer: Trainer, config: Config) -> Iterator[str]:
    """Say what of the config the plan's schedule does not use, or cannot. Collective."""
    schedule, not_split = trainer.plan.schedule, trainer.not_split()
    if trainer.plan.traits.whole_minibatch and config.train.microbatch is not None:
        yield f"{schedule}: train.microbatch is not used, as a minibatch travels whole"
    if not_split:
        yield f"{schedule}: backward not split in {', '.join(not_split)}"


def _start_folder(
    trainer: Trainer, out: Path, resume: str | None, start: RunStart, notes: Sequence[str]
) -> None:
    """Begin the run's folder, settle whose its checkpoints are, print the plan and notes. Rank 0 only."""
    remove_results(out)
    _report_plan(trainer, out)
    told = (*notes, *_claim_checkpoints(out, resume))
    write_json(out / "run.json", replace(start, notes=(*start.notes, *told)))
    for line in told:
        print(line, flush=True)


def _resume(trainer: Trainer, source: str | None, out: Path, allow_changed: bool = False) -> list[str]:
    """Resume from `source`, unless that is None; return lines about it for the user."""
    folder = out / CHECKPOINTS
    if source == AUTO:
        return trainer.resume(folder, or_anew=True, allow_changed=allow_changed)
    return [] if source is None else trainer.resume(source, allow_changed=allow_changed)


def _continues_own(out: Path, source: str | None) -> bool:
    """True if the training in OUT continues; False for a new one, or one from elsewhere."""
    if source is None or source == AUTO:
        return source == AUTO
    return Path(source).resolve().is_relative_to((out / CHECKPOINTS).resolve())


def _claim_checkpoints(out: Path, source: str | None) -> list[str]:
    """Reserve OUT's checkpoints for this training; return lines about it for the user."""
    if source is None or not _continues_own(out, source):
        return _set_aside(out / CHECKPOINTS)
    if source == AUTO:
        return []
    if step_of(Path(source)) is not None:  # a restart before the first save must resume here, too
        stand_on(Path(source))
    return []


def _set_aside(folder: Path) -> list[str]:
    """Rename another training's checkpoints, so that `--resume auto` never finds them and none is lost."""
    if not checkpoints(folder):
        return []
    names = (f"{folder.name}.old{'' if n == 1 else f'.{n}'}" for n in count(1))
    aside = next(path for path in map(folder.with_name, names) if not path.exists())
    claim = Claim(folder)  # a script may save there
    with writing(aside):
        folder.rename(aside)
    claim.release()
    return [f"{folder} was another training's and is now {aside}: --resume auto would have resumed it"]


def _trainer(
    config: Config, model: nn.Module | Factory, loss: Loss, plan: str, out: Path, options: argparse.Namespace
) -> Trainer:
    loggers = make_loggers(config.log.to, out, config.log.every, _continues_own(out, options.resume))
    return Trainer(
        model,
        loss=loss,
        optimizer=config.optimizer.bound(),
        minibatch_size=config.train.minibatch,
        microbatch_size=config.train.microbatch,
        plan=replace(config.plan, source=plan),
        lr_scheduler=None if config.lr_scheduler is None else config.lr_scheduler.build,
        update=config.train,
        data=DataOptions(seed=config.train.seed, num_workers=config.data.num_workers),
        ranks=RankOptions(
            cluster=options.cluster,
            sync=config.sync.backend,
            hang_timeout=options.hang_timeout,
            groups=config.groups,
        ),
        callbacks=[*(callback.build() for callback in config.callbacks), *loggers],
    )


def check_launcher() -> None:
    """Refuse to train if the launcher's processes each see a world of one rank."""
    if line := environment.apart(MPI.COMM_WORLD.size):
        failure.refuse(UserError(f"{line}: start it with srun --mpi=pmix; hybridpipe doctor gives details"))


def _report_plan(trainer: Trainer, out: Path) -> None:
    """Write the plan with the profile and cluster behind it; print the details of a plan that is new."""
    write_plan(trainer, out)
    choice = trainer.choice
    if choice is not None and not trainer.continues_plan:
        print(plan_details(choice.plan, choice.candidates, choice.profile, choice.cluster), flush=True)


def _finish(trainer: Trainer, out: Path, trace: bool) -> None:
    """Gather, print and write the results of the run."""
    results = gather_results(trainer, trace)
    write_whole(trainer.worker, out / "model.safetensors")
    if results is None:
        return
    results.write(out)
    summary, parts, traced, _ = results
    memory, rate = [summary[name] for name in MEMORY], summary["predicted_samples_per_second"]
    with_report = ", with report.html" if report_at_end(out) else ""
    epochs, seconds = summary["epochs_to_target"], summary["seconds_to_target"]
    figures = ", ".join(f"{name} {rounded(value)}" for name, value in summary["metrics"].items())
    print(
        (f"{parts_table(parts)}\n" if parts else "")
        + (f"{ranks_table(traced.per_minibatch())}\n" if trace and traced else "")
        + (f"{memory_table(trainer.plan, *memory)}\n" if trace else "")
        + "".join(f"{line}\n" for line in beyond_limit(*memory))
        + f"{summary['samples_per_second']:,.0f} samples/s measured"
        + (f", {rate:,.0f} predicted" if rate else "")
        + f"; last loss {summary['loss_last']:.5f}"
        + (f"; validation: {figures}" if figures else "")
        + (f"; target reached after {epochs} epochs, {seconds:,.1f} s of training" if epochs else "")
        + f"; written to {out}{with_report}",
        flush=True,
    )
