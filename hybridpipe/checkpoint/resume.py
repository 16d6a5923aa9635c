"""Resume: a checkpoint found, verified whole and read by every rank, before anything of the training changes.

Under the plan that it was taken with, ranks get back all that was theirs; under any other, each takes what
its layers need from the files of the stages that had them: weights, buffers (running statistics are the mean
over the replicas, as `Worker.average_statistics` makes it) and optimizer state are bit-equal by name, and an
asynchronous stream starts anew from the newest weights. Invariant: all ranks change or none does.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import Tensor, nn

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.manifest import MANIFEST, Manifest
from hybridpipe.checkpoint.names import step_of
from hybridpipe.checkpoint.plain import read_weights
from hybridpipe.checkpoint.shard import read_shard
from hybridpipe.checkpoint.snapshot import plan_json, rank_file, stage_file
from hybridpipe.comm.mpi import MPI
from hybridpipe.engine.rank_state import NewState, SchedulerState, parameters, stage_modules
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import UserError, shown
from hybridpipe.files import parse
from hybridpipe.model.tensors import overwrite
from hybridpipe.optim.update import Update
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.state import (
    SAMPLES_SEEN,
    Generators,
    State,
    batches_agreed,
    check_fits,
    check_optimizer,
    described,
    differences,
    name_of,
    read_optimizer,
    samples_seen,
    under,
    unpack,
)
from hybridpipe.stage.statistics import Replica, agreed, statistics

_Result = TypeVar("_Result")
OF_RATES = ("base_lrs", "_last_lr")  # of a scheduler's state


class Found(NamedTuple):
    """A checkpoint whose every byte is as its manifest says."""

    path: Path
    manifest: Manifest
    plan: Plan
    run: dict[str, Any]
    notes: list[str]  # one for each that was passed over

    @property
    def place(self) -> str:
        """Where its training stood."""
        manifest = self.manifest
        return f"step {manifest.step}, epoch {manifest.epoch}, {manifest.position} minibatches into it"


class Nothing(NamedTuple):
    """There is none to go on from."""

    notes: list[str]


def find(world: MPI.Comm, source: Path) -> Found | Nothing:
    """The checkpoint `source`, or the last good one in it; rank 0 reads it. Collective.

    Raises:
        UserError: it is damaged, on every rank.
    """
    return _on_rank_0(world, lambda: _find(source))


def _find(source: Path) -> Found | Nothing:
    notes: list[str] = []
    path: Path | None = source
    if not (source / MANIFEST).exists():
        if step_of(source) is not None:
            directory.read_manifest(source)  # says what is missing
        path, notes = directory.last_good(source)
    if path is None:
        return Nothing(notes)
    manifest = directory.verify(path)
    where = str(path / MANIFEST)
    plan, run = parse(Plan, manifest.plan, f"{where}: plan"), unpack(manifest.run, {}, where)
    return Found(path, manifest, plan, run, notes)


def load_plain(world: MPI.Comm, model: nn.Module, source: Path) -> None:
    """The weights of a `model.state_dict()` in a safetensors file. Collective.

    Raises:
        UserError: the file is none, or not of this model; the model is as it was.
    """

    def read() -> dict[str, Tensor]:
        tensors = read_weights(source, model.state_dict())
        check_fits(described(tensors), model.state_dict(), str(source))
        return tensors

    tensors = _agreed(world, read)
    for key, tensor in model.state_dict().items():
        overwrite(tensor, tensors[key])


def check_model(found: Found, model: nn.Module) -> None:
    """Raises UserError unless the checkpoint is of a model with the same names, shapes and types."""
    check_fits(found.run.get("model", {}), model.state_dict(), str(found.path))


def is_exact(found: Found, plan: Plan) -> bool:
    """Does the plan go on as the checkpoint's would have: versions, random states and all?"""
    return plan_json(plan) == plan_json(found.plan)


def load(worker: Worker, found: Found, allow_changed: bool = False) -> list[str]:
    """Let this rank's state be the checkpoint's. Collective.

    Args:
        allow_changed: options of the optimizer, or a scheduler, may be others than the checkpoint's training
            was given; then the new ones count.

    Returns:
        what has changed, in lines, the same on every rank.

    Raises:
        UserError: a part of it does not fit, on every rank; nothing has changed then.
    """
    reading = _Reading(worker, found, allow_changed)
    state = _agreed(worker.control, reading.all)
    changed = [line for lines in worker.control.allgather(reading.changed) for line in lines]
    worker.load_state(state)
    return list(dict.fromkeys(changed))


def changed_line(name: str, now: object, then: object) -> str:
    """A setting that is another one than the checkpoint's training had."""
    return f"{name}: the training has {shown(now)}, the checkpoint {shown(then)}"


def refuse_changed(where: str, line: str) -> NoReturn:
    """Raises UserError for a setting that has changed, with the way round."""
    raise UserError(f"{where}: {line}; --resume-changed (allow_changed=True) takes the training's")


class _Reading:
    """One rank's reading of a checkpoint; changes nothing."""

    def __init__(self, worker: Worker, found: Found, allow_changed: bool) -> None:
        self.worker, self.found, self.allow_changed = worker, found, allow_changed
        self.exact = is_exact(found, worker.plan)
        self.layers = stage_modules(worker.executor)
        self.wanted = {key: t for layers in self.layers.values() for key, t in layers.tensors().items()}
        self.result, self.changed, self.optimizers = NewState(), list[str](), set[str]()
        self.batches: dict[str, int] = {}

    def all(self) -> NewState:
        """Raises UserError for what does not fit."""
        for s in self.stages():
            self.of_stage(s)
        if self.exact:
            self.of_rank()
        else:
            self.result.model |= self.averages()
        self.check()
        return self.result

    def stages(self) -> list[int]:
        """Those of the checkpoint's plan that have layers of this rank's."""
        held = [self.worker.plan.stages[s] for s in self.layers]
        return [
            s
            for s, stage in enumerate(self.found.plan.stages)
            if any(stage.start < mine.stop and mine.start < stage.stop for mine in held)
        ]

    def read(self, name: str) -> State:
        entry = self.found.manifest.entry(name)
        if entry is None:
            raise UserError(f"{self.found.path / name}: is missing")
        state = State(*read_shard(self.found.path / name, entry))
        if not isinstance(state.meta, dict):
            raise UserError(f"{self.found.path / name}: cannot be understood")
        return state

    def of_stage(self, s: int) -> None:
        where, state = str(self.found.path / stage_file(s)), self.read(stage_file(s))
        result = self.result
        self.batches |= batches_agreed(state.meta, where)
        result.model |= {k: t for k, t in under("model", state.tensors).items() if k in self.wanted}
        mine = {k: own for k, own in read_optimizer(state, where).items() if k in self.wanted}
        result.num_minibatches = int(state.meta.get("num_minibatches", 0))
        if mine:
            result.parameters |= mine
            self.optimizers.add(str(state.meta.get("optimizer")))
            match state.meta.get("lr_scheduler"):
                case {"class": str(name), "state": held, **more}:
                    given = unpack(more.get("given"), state.tensors, where)
                    held = unpack(held, state.tensors, where)
                    found = SchedulerState(name, held, state.meta.get("num_groups"), given)
                    result.scheduler = result.scheduler or found
        if self.exact:
            result.newest = int(state.meta.get("newest", 0))
            self.versions(state)

    def versions(self, state: State) -> None:
        for number in state.meta.get("versions", []):
            self.result.versions[number] = under(f"version.{number}", state.tensors)

    def of_rank(self) -> None:
        name = rank_file(self.worker.control.rank)
        if self.found.manifest.entry(name) is None:  # of a larger world, whose last ranks are not used
            return
        state = self.read(name)
        own = under("model", state.tensors)
        if SAMPLES_SEEN in state.meta:
            self.result.samples_seen = samples_seen(state.meta, name)
            self.result.batches_agreed = self.batches
        else:  # an older checkpoint: what replicas saw is not known, so they agree now
            own |= self.averages()
        self.result.model |= own
        self.versions(state)
        self.result.random = Generators.of(state, str(self.found.path / name))

    def averages(self) -> dict[str, Tensor]:
        """The statistics that the replicas of each stage of the checkpoint agree on."""
        found: dict[str, Tensor] = {}
        wanted = {layers.key(path) for layers in self.layers.values() for path in statistics(layers.module)}
        # each once, though under an interleaved plan the same ranks hold several stages
        for ranks in dict.fromkeys(self.found.plan.stages[s].ranks for s in self.stages()):
            if wanted and len(ranks) > 1:
                replicas = [self.replica(rank) for rank in ranks]
                replicas[0] = replicas[0]._replace(tensors=self.result.model)
                found |= agreed(wanted, replicas, self.batches)
        return found

    def replica(self, rank: int) -> Replica:
        """What a rank of the checkpoint's had of its own."""
        state = self.read(rank_file(rank))
        return Replica(under("model", state.tensors), samples_seen(state.meta, rank_file(rank)))

    def check(self) -> None:
        """Everything that `_put` relies on."""
        where, result = str(self.found.path), self.result
        found = {key: result.model[key] for key in self.wanted if key in result.model}
        check_fits(described(found), self.wanted, where)
        update = self.worker.executor.update
        if update.optimizer is None:
            return
        names, now = parameters(self.worker.executor), name_of(update.optimizer)
        for other in self.optimizers - {now}:
            raise UserError(f"{where}: optimizer: the checkpoint has {other}, the training {now}")
        check_optimizer(update.optimizer, names, result.parameters, where)
        self.changed = list(dict.fromkeys(self.differences(update, names)))
        result.is_fresh = bool(self.changed)
        if not self.found.manifest.step:  # an imported one: nothing was trained by its settings
            self.changed = []
        if self.changed and not self.allow_changed:
            refuse_changed(where, self.changed[0])
        had, has = result.scheduler and result.scheduler.num_groups, len(update.optimizer.param_groups)
        if had not in (None, has) and not result.is_fresh:
            raise UserError(
                f"{where}: lr_scheduler: is of {had} parameter groups, this rank's optimizer has {has}: "
                "resume under the checkpoint's plan"
            )
        for number, version in result.versions.items():
            if version.keys() != {key for p, key in names.items() if p.requires_grad}:
                raise UserError(f"{where}: version {number}: must be of the stage's trained parameters")

    def differences(self, update: Update, names: Mapping[Tensor, str]) -> Iterator[str]:
        """What optimizer and scheduler were given then, and are given now."""
        assert update.optimizer is not None
        for group, given in zip(update.optimizer.param_groups, update.given.options, strict=True):
            for parameter in group["params"]:
                then = self.result.parameters.get(names[parameter])
                if then is not None and then.given is not None:
                    for name, *values in differences(given, then.given):
                        yield changed_line(f"optimizer: {name}", *values)
        before = self.result.scheduler
        was = None if before is None else before.name
        is_now = None if update.scheduler is None else name_of(update.scheduler)
        if was != is_now:
            yield changed_line("lr_scheduler", is_now or "none", was or "none")
        elif before is not None and before.given is not None:
            for name, *values in differences(update.given.scheduler or {}, before.given):
                if name not in OF_RATES:  # these follow from the optimizer's options
                    yield changed_line(f"lr_scheduler: {name}", *values)


def _on_rank_0(world: MPI.Comm, work: Callable[[], _Result]) -> _Result:
    """What rank 0 finds, or the mistake that it finds, on every rank."""
    found: Any = None
    if world.rank == 0:
        try:
            found = work()
        except UserError as error:
            found = error
    found = world.bcast(found)
    if isinstance(found, UserError):
        raise found
    result: _Result = found
    return result


def _agreed(world: MPI.Comm, work: Callable[[], _Result]) -> _Result:
    """This rank's result, if no rank finds a mistake; else the first rank's mistake, on every rank."""
    result: list[_Result] = []
    mistake = None
    try:
        result.append(work())
    except UserError as error:
        mistake = str(error)
    for other in world.allgather(mistake):
        if other is not None:
            raise UserError(other)
    return result[0]
