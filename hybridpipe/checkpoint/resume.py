"""Resuming: every rank finds, verifies and reads a checkpoint before any state of the training changes.

Under the checkpoint's plan, ranks get back their whole state. Under another plan, weights, buffers (averaged
over replicas) and optimizer state go to their new ranks by name, and an asynchronous stream starts again from
the newest weights. Invariant: all ranks change their state, or none does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import Tensor, nn

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.joined_state import JoinedState, Wanted
from hybridpipe.checkpoint.manifest import MANIFEST, Manifest
from hybridpipe.checkpoint.names import step_of
from hybridpipe.checkpoint.plain import Weights
from hybridpipe.checkpoint.saved_model import SavedModel, keeps_averages
from hybridpipe.checkpoint.shard import read_shard
from hybridpipe.checkpoint.snapshot import plan_json, rank_file, stage_file
from hybridpipe.comm.mpi import MPI
from hybridpipe.engine.rank_state import (
    NewState,
    SchedulerState,
    parameters,
    ranges,
    stage_modules,
    updated,
)
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import UserError, shown
from hybridpipe.files import parse
from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.held_part import held_part, whole_forms, whole_shape
from hybridpipe.model.tensors import overwrite
from hybridpipe.optim.loss_scale import LossScale
from hybridpipe.optim.update import Update
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.parts import Piece, is_part_of, join, lacking
from hybridpipe.stage.state import (
    SAMPLES_SEEN,
    Generators,
    StageState,
    batches_agreed,
    check_fits,
    check_optimizer,
    described,
    differences,
    name_of,
    read_optimizer,
    read_parts,
    samples_seen,
    under,
    unpack,
)
from hybridpipe.stage.statistics import Replica, agreed, statistics

_Result = TypeVar("_Result")
OF_RATES = ("base_lrs", "_last_lr")  # learning rates in a scheduler's state


class Found(NamedTuple):
    """Verified checkpoint."""

    path: Path
    manifest: Manifest
    plan: Plan
    run: dict[str, Any]
    notes: list[str]  # a line for each checkpoint that was passed over

    @property
    def place(self) -> str:
        """Position of its training, as text."""
        manifest = self.manifest
        return f"step {manifest.step}, {manifest.position} minibatches into epoch {manifest.epoch + 1}"


class Nothing(NamedTuple):
    """Result of a search without a checkpoint to resume from."""

    notes: list[str]


def find(world: MPI.Comm, source: Path) -> Found | Nothing:
    """Find the checkpoint `source`, or the last good one in that folder. Rank 0 reads it. Collective.

    Raises:
        UserError: the checkpoint is damaged; raised on every rank.
    """
    return _on_rank_0(world, lambda: _find(source))


def _find(source: Path) -> Found | Nothing:
    notes: list[str] = []
    path: Path | None = source
    if not (source / MANIFEST).exists():
        if step_of(source) is not None:
            directory.read_manifest(source)  # reports the missing file
        path, notes = directory.last_good(source)
    if path is None:
        return Nothing(notes)
    manifest = directory.verify(path)
    where = str(path / MANIFEST)
    plan, run = parse(Plan, manifest.plan, f"{where}: plan"), unpack(manifest.run, {}, where)
    return Found(path, manifest, plan, run, notes)


def load_plain(world: MPI.Comm, model: nn.Module, source: Path, numbers: Numbers | None = None) -> None:
    """Load a `model.state_dict()` from a file or folder of weights into the model. Collective.

    Args:
        numbers: of tensors on the meta device, which are read when a rank gets them.

    Raises:
        UserError: the source does not fit the model, which stays unchanged (`Weights`); or a file is damaged
            or changes meanwhile, and a part of the model has its weights.
    """
    state, forms = model.state_dict(keep_vars=True), whole_forms(model)
    weights = _agreed(world, lambda: Weights(source, forms))

    def read() -> None:
        for key, tensor in state.items():
            part = held_part(tensor)
            if part is not None:
                overwrite(tensor.detach(), part.of(weights.read(key)))
            elif not tensor.is_meta:
                weights.overwrite(tensor.detach(), key)

    _agreed(world, read)
    if numbers is not None:
        absent = (key for key, tensor in state.items() if tensor.is_meta)
        numbers.given.update({key: partial(weights.read, key) for key in absent})


def load_validated(worker: Worker, folder: Path) -> None:
    """Load the weights that the last good checkpoint in a folder was validated with, and nothing else.

    They are the averages where `callbacks.EMA` keeps some. Collective.

    Raises:
        UserError: there is none, or it is of another model; raised on every rank, and no state has changed.
    """
    found = find(worker.control, folder)
    if isinstance(found, Nothing):
        raise UserError("; ".join([f"{folder}: holds no checkpoint to restore", *found.notes]))
    check_model(found, worker.model)
    layers = stage_modules(worker.executor).values()

    def read() -> list[tuple[Tensor, Tensor]]:
        saved = SavedModel(found.path, keeps_averages(found.manifest))
        tensors = (each for held in layers for each in held.tensors().items())
        return [(tensor, _of_rank(saved.read(key), tensor)) for key, tensor in tensors]

    for tensor, values in _agreed(worker.control, read):
        overwrite(tensor, values)
    worker.executor.statistics.begin_anew()
    worker.reset_centre()


def check_model(found: Found, model: nn.Module) -> None:
    """Raise UserError unless the checkpoint's model has the same names, shapes and types."""
    check_fits(found.run.get("model", {}), whole_forms(model), str(found.path))


def is_exact(found: Found, plan: Plan) -> bool:
    """True if the plan is the checkpoint's, so that versions and random states are kept as well.

    The way in which gradients are reduced, which a start may measure, changes no state.
    """
    return plan_json(_without_reduction(plan)) == plan_json(_without_reduction(found.plan))


def _without_reduction(plan: Plan) -> Plan:
    stages = tuple(replace(stage, scatter=False) for stage in plan.stages)
    return replace(plan, stages=stages, sync=None)


def load(worker: Worker, found: Found, allow_changed: bool = False) -> list[str]:
    """Load the checkpoint into this rank's worker. Collective.

    Args:
        allow_changed: allow options of optimizer and scheduler that differ from the checkpoint's; the new
            ones are then used.

    Returns:
        A line for each changed setting, the same on every rank.

    Raises:
        UserError: a part of the checkpoint does not fit; raised on every rank, and no state has changed.
    """
    reading = _Reading(worker, found, allow_changed)
    state = _agreed(worker.control, reading.all)
    changed = [line for lines in worker.control.allgather(reading.changed) for line in lines]
    state.joins = any(worker.group.everyone.allgather(state.joins))  # all begin with the centre, or none
    worker.load_state(state)
    return list(dict.fromkeys(changed))


def changed_line(name: str, now: object, then: object) -> str:
    """Line about a setting that differs from the checkpoint's."""
    return f"{name}: the training has {shown(now)}, the checkpoint {shown(then)}"


def refuse_changed(where: str, line: str) -> NoReturn:
    """Raise UserError for a changed setting, with the option that allows it."""
    allowed = "--resume-changed, or trainer.resume(folder, allow_changed=True), uses the training's"
    raise UserError(f"{where}: {line}; {allowed}")


class _Reading:
    """One rank's reading of a checkpoint, which changes no state."""

    def __init__(self, worker: Worker, found: Found, allow_changed: bool) -> None:
        self.worker, self.found, self.allow_changed = worker, found, allow_changed
        self.exact = is_exact(found, worker.plan)
        self.same_layers = found.plan.num_layers == worker.plan.num_layers  # else it was one layer, say
        self.layers = stage_modules(worker.executor)
        self.wanted = {key: t for layers in self.layers.values() for key, t in layers.tensors().items()}
        self.keys = set(parameters(worker.executor).values())
        self.result, self.changed, self.optimizers = NewState(), list[str](), set[str]()
        self.result.joins = found.run.get("group", [0, 1]) != [worker.group.index, worker.group.options.count]
        mine, of_rank = set(updated(worker.executor).values()), ranges(worker.executor)
        held = ((p, key) for p, key in parameters(worker.executor).items() if key in mine)
        self.joined = JoinedState(
            {key: Wanted(whole_shape(p), held_part(p), of_rank.get(key)) for p, key in held}
        )
        self.parts = defaultdict[str, list[Piece]](list)
        self.batches: dict[str, int] = {}

    def all(self) -> NewState:
        """Read everything this rank needs; UserError if it does not fit."""
        for s in sorted({*self.stages(), *self.owners()}):
            self.of_stage(s)
        self.of_replicas()
        self.of_parts()
        if self.exact:
            self.of_rank()
        else:
            self.result.model |= self.averages()
        self.check()
        return self.result

    def stages(self) -> list[int]:
        """Return the checkpoint's stages that contain layers of this rank; all, if it cuts others."""
        if not self.same_layers:
            return list(range(self.found.plan.num_stages))
        held = [self.worker.plan.stages[s] for s in self.layers]
        return [
            s
            for s, stage in enumerate(self.found.plan.stages)
            if any(stage.start < mine.stop and mine.start < stage.stop for mine in held)
        ]

    def owners(self) -> set[int]:
        """Return the stages of the checkpoint's plan that own parameters of this rank, as far as it says."""
        if not self.same_layers:
            return set()
        stages_of = self.worker.layers.holders(self.found.plan)
        return {stages_of[key][0] for key in self.keys}

    def read(self, name: str) -> StageState:
        entry = self.found.manifest.entry(name)
        if entry is None:
            raise UserError(f"{self.found.path / name}: is missing")
        state = StageState(*read_shard(self.found.path / name, entry))
        if not isinstance(state.meta, dict):
            where = self.found.path / name
            raise UserError(f"{where}: its metadata must be a JSON object, got {shown(state.meta)}")
        return state

    def of_stage(self, s: int) -> None:
        where, state = str(self.found.path / stage_file(s)), self.read(stage_file(s))
        result = self.result
        self.batches |= batches_agreed(state.meta, where)
        model = {k: t for k, t in under("model", state.tensors).items() if k in self.wanted}
        result.model |= {key: _of_rank(tensor, self.wanted[key]) for key, tensor in model.items()}
        self.add_parts(state, where)
        mine = self.joined.add(read_optimizer(state, where))
        result.num_minibatches = int(state.meta.get("num_minibatches", 0))
        result.num_skipped = max(result.num_skipped, int(state.meta.get("num_skipped", 0)))
        result.loss_scales = _loss_scales(state.meta.get("loss_scales", []), where)
        if "optimizer" in state.meta and (mine or s in self.owners()):
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

    def of_replicas(self) -> None:
        """Read what further replicas of the checkpoint's stages have in parts, and join it all."""
        plan, own = self.found.plan, self.worker.control.rank
        stages = {*self.stages(), *self.owners()}
        divided = (plan.stages[s] for s in stages if plan.zero_of(s) or plan.splits(s))
        ranks = {rank for stage in divided for rank in stage.ranks[1:]}
        for rank in sorted(ranks, key=lambda rank: (rank != own, rank)):  # its own is enough under one plan
            if self.joined.is_complete and self.lacks_no_part():
                break
            state = self.read(rank_file(rank))
            self.joined.add(read_optimizer(state, rank_file(rank)))
            self.add_parts(state, rank_file(rank))
        self.result.parameters = self.joined.joined(str(self.found.path))

    def add_parts(self, state: StageState, where: str) -> None:
        """Note what a file has of parameters that this rank wants."""
        for key, part in read_parts(state.meta, where).items():
            name = f"part.{key}"
            if key in self.wanted and name in state.tensors:
                piece, wanted = Piece(state.tensors[name], held=part), self.wanted[key]
                if is_part_of(piece, part.whole, held=held_part(wanted)):
                    self.parts[key].append(piece)

    def lacks_no_part(self) -> bool:
        """Return True if what is known of each parameter has all that is wanted of it."""
        in_parts = (key for key, t in self.wanted.items() if held_part(t) and key not in self.result.model)
        each = ((self.wanted[key], self.parts[key]) for key in {*in_parts, *self.parts})
        return not any(lacking(pieces, whole_shape(t), held=held_part(t)) for t, pieces in each)

    def of_parts(self) -> None:
        """Join the parts of parameters."""
        for key, pieces in self.parts.items():
            wanted = self.wanted[key]
            try:
                self.result.model[key] = join(pieces, whole_shape(wanted), held=held_part(wanted))
            except (LookupError, RuntimeError) as error:
                raise UserError(f"{self.found.path}: {key} cannot be joined: {error}") from None

    def versions(self, state: StageState) -> None:
        for number in state.meta.get("versions", []):
            self.result.versions[number] = under(f"version.{number}", state.tensors)

    def of_rank(self) -> None:
        name = rank_file(self.worker.control.rank)
        if self.found.manifest.entry(name) is None:  # this world is larger, and its last ranks are unused
            return
        state = self.read(name)
        own = under("model", state.tensors)
        if SAMPLES_SEEN in state.meta:
            self.result.samples_seen = samples_seen(state.meta, name)
            self.result.batches_agreed = self.batches
        else:  # an older checkpoint, without counts: replicas agree now
            own |= self.averages()
        self.result.model |= own
        self.versions(state)
        self.result.random = Generators.of(state, str(self.found.path / name))

    def averages(self) -> dict[str, Tensor]:
        """Return the running statistics averaged over the replicas of each stage of the checkpoint."""
        found: dict[str, Tensor] = {}
        wanted = {layers.key(path) for layers in self.layers.values() for path in statistics(layers.module)}
        # under an interleaved plan the same ranks hold several stages: read them once
        stages = [self.found.plan.stages[s] for s in self.stages()]
        for ranks_of, together in {stage.leaders: stage.sync_batchnorm for stage in stages}.items():
            if wanted and len(ranks_of) > 1:
                replicas = [self.replica(rank) for rank in ranks_of]
                replicas[0] = replicas[0]._replace(tensors=self.result.model)
                found |= agreed(wanted, replicas, self.batches, together)
        return found

    def replica(self, rank: int) -> Replica:
        """Return the own state of a rank of the checkpoint."""
        state = self.read(rank_file(rank))
        return Replica(under("model", state.tensors), samples_seen(state.meta, rank_file(rank)))

    def check(self) -> None:
        """Raise UserError for state that does not fit; `Worker.load_state` relies on these checks."""
        where, result = str(self.found.path), self.result
        found = {key: result.model[key] for key in self.wanted if key in result.model}
        check_fits(described(found), self.wanted, where)
        update = self.worker.executor.update
        if update.optimizer is None:
            return
        names, now = updated(self.worker.executor), name_of(update.optimizer)
        for other in self.optimizers - {now}:
            raise UserError(f"{where}: optimizer: the checkpoint has {other}, the training {now}")
        check_optimizer(update.optimizer, names, result.parameters, where)
        self.changed = list(dict.fromkeys(self.differences(update, names)))
        result.is_fresh = bool(self.changed)
        if not self.found.manifest.step:  # an imported checkpoint: its settings have trained nothing
            self.changed = []
        if self.changed and not self.allow_changed:
            refuse_changed(where, self.changed[0])
        had, has = result.scheduler and result.scheduler.num_groups, len(update.optimizer.param_groups)
        if had not in (None, has) and not result.is_fresh:
            raise UserError(
                f"{where}: lr_scheduler: has {had} parameter groups, this rank's optimizer {has}: "
                "resume under the checkpoint's plan"
            )
        for number, version in result.versions.items():
            if version.keys() != {k for p, k in parameters(self.worker.executor).items() if p.requires_grad}:
                raise UserError(f"{where}: version {number}: must hold the stage's trained parameters")

    def differences(self, update: Update, names: Mapping[Tensor, str]) -> Iterator[str]:
        """Yield a line for each option of optimizer and scheduler that differs from the checkpoint's."""
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


def _of_rank(whole: Tensor, tensor: Tensor) -> Tensor:
    """Return what a rank has of a whole tensor in the place of `tensor`."""
    part = held_part(tensor)
    return whole if part is None else part.of(whole)


def _loss_scales(found: Any, where: str) -> tuple[LossScale, ...]:
    """Return the scales of a stage's file; UserError if they are none."""
    match found:
        case [*pairs] if all(isinstance(pair, list) and [*map(type, pair)] == [float, int] for pair in pairs):
            return tuple(LossScale(value, updates, changes=True) for value, updates in pairs)
    what = "pairs of a scale and a number of updates"
    raise UserError(f"{where}: loss_scales: must be {what}, got {shown(found)}")


def _on_rank_0(world: MPI.Comm, work: Callable[[], _Result]) -> _Result:
    """Run `work` on rank 0; return its result, or raise its UserError, on every rank."""
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
    """Run `work` on every rank; if any raises UserError, raise the lowest rank's on all of them."""
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
