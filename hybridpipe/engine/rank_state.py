"""Rank state: the training state of one rank, taken at a resume point and put back.

Knows the executor, whose parts hold the state; no files and no other rank.
Invariant: tensors are named by keys of the whole model's `state_dict()`, so that any plan can load them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hybridpipe.engine.executor import Executor
from hybridpipe.model.held_part import held_part
from hybridpipe.model.stage_module import StageModule
from hybridpipe.model.tensors import overwrite
from hybridpipe.optim.loss_scale import LossScale
from hybridpipe.optim.shares import axes_of
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.resume_point import ResumePoint, num_updates, versions_in_use
from hybridpipe.stage.state import (
    BATCHES_AGREED,
    CENTRE,
    OF_GROUPS,
    SAMPLES_SEEN,
    TRAVELLING,
    Generators,
    OfParameter,
    StageState,
    name_of,
    pack,
    prefixed,
    put_optimizer,
    put_parts,
    take_optimizer,
)
from hybridpipe.stage.statistics import statistics


class RankState(NamedTuple):
    """The state of one rank; its tensors are the live ones, not copies.

    Args:
        stages: the state of each stage whose first replica the rank is, by stage.
        own: state that no other rank has: random states, and a further replica's buffers, versions and part
            of the optimizer's state.
        learnt: the keys of trained parameters and running statistics.
    """

    stages: dict[int, StageState]
    own: StageState
    learnt: frozenset[str]


class SchedulerState(NamedTuple):
    """A learning-rate scheduler's state.

    Args:
        name: its class.
        state: its `state_dict()`.
        num_groups: number of the optimizer's parameter groups; None in older checkpoints.
        given: its state when it was made; None in older checkpoints.
    """

    name: str
    state: dict[str, Any]
    num_groups: int | None
    given: dict[str, Any] | None


@dataclass
class NewState:
    """The state that a rank loads.

    Args:
        model: the model's tensors, by key.
        parameters: the optimizer's state of each parameter, by key.
        num_minibatches: minibatches trained on so far, for the learning rate.
        loss_scales: of the next minibatches, each with its value and the updates since it last changed; one
            under a synchronous schedule, empty: there was none.
        num_skipped: updates left out so far, for numbers that were not finite.
        newest: the version of the present weights, counted in updates of the stream.
        versions: older weights that microbatches in flight use, by version and key.
        random: states of the random generators; None leaves them as they are.
        samples_seen: samples since the replicas last averaged their statistics; None: they just have.
        batches_agreed: numbers of batches at that averaging, by key.
        is_fresh: options and scheduler are the ones that the training was given, not the checkpoint's.
        joins: the weights are another group's: the rank begins with what the groups have in common.
    """

    model: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, OfParameter] = field(default_factory=dict)
    scheduler: SchedulerState | None = None
    num_minibatches: int = 0
    loss_scales: tuple[LossScale, ...] = ()
    num_skipped: int = 0
    newest: int = 0
    versions: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    random: Generators | None = None
    samples_seen: int | None = None
    batches_agreed: dict[str, int] = field(default_factory=dict)
    is_fresh: bool = False
    joins: bool = False


def take(executor: Executor, plan: Plan, point: ResumePoint) -> RankState:
    """Return the state of this rank at a resume point.

    Raises:
        UserError: the optimizer or the scheduler holds a value that a checkpoint cannot hold.
    """
    stages: dict[int, StageState] = {}
    own, learnt = StageState(), set[str]()
    place, stashed = executor.place, executor.stashed
    before = None if stashed is None else stashed.oldest_forward_state()
    for s, layers in stage_modules(executor).items():
        learnt |= {key for parameter, key in layers.parameters().items() if parameter.requires_grad}
        learnt |= {layers.key(path) for path in statistics(layers.module)}
        buffers = layers.buffers()
        if before is not None:
            then = {layers.key(path): copy for path, copy in before.buffers.items()}
            buffers = {key: then.get(key, buffer) for key, buffer in buffers.items()}
        assert place is not None
        if place.is_first():
            stages[s] = _of_stage(executor, s, layers, buffers)
            _put_versions(executor, layers, versions_in_use(plan, place, point), stages[s])
            if plan.is_asynchronous:
                stages[s].meta["newest"] = num_updates(plan, place.stage, point)
        else:
            own.tensors |= prefixed("model", buffers)
            parts = in_parts(layers.tensors())
            put_parts(own, {key: t for key, t in parts.items() if place.is_first(axes_of(t, None))})
            _put_versions(executor, layers, _own_versions(plan, place, point), own)
    if place is not None and not place.is_first():
        held = [layers.owned_parameters().items() for layers in stage_modules(executor).values()]
        shares = executor.shares
        divided = {p: key for owned in held for p, key in owned if place.is_first(axes_of(p, shares))}
        if divided:
            _take_optimizer(executor, divided, own)
    if place is not None:
        own.meta[SAMPLES_SEEN] = executor.statistics.num_samples if before is None else before.num_samples
    random = Generators.now(executor.device).state()
    own.tensors |= random.tensors
    own.meta |= random.meta
    return RankState(stages, own, frozenset(learnt))


def put(executor: Executor, new: NewState) -> None:
    """Load a state into this rank's model, optimizer, scheduler, versions and generators."""
    layers = stage_modules(executor)
    for of_stage in layers.values():
        for key, tensor in of_stage.tensors().items():
            overwrite(tensor, new.model[key])
    executor.statistics.begin_anew()
    if new.samples_seen is not None:
        executor.statistics.num_samples = new.samples_seen
        executor.statistics.num_batches = [
            {path: new.batches_agreed.get(of_stage.key(path), own) for path, own in before.items()}
            for of_stage, before in zip(layers.values(), executor.statistics.num_batches, strict=True)
        ]
    _put_update(executor, new)
    _put_centre(executor, new)
    if executor.check is not None:
        executor.check.num_skipped = new.num_skipped
    if executor.stashed is not None:
        trained = {p: key for p, key in parameters(executor).items() if p.requires_grad}
        older = {
            number: {p: version[key].to(executor.device) for p, key in trained.items()}
            for number, version in new.versions.items()
        }
        executor.stashed.restore(new.newest, older)
    if new.random is not None:
        new.random.put(executor.device)


def _put_update(executor: Executor, new: NewState) -> None:
    update = executor.update
    if update.optimizer is not None:
        put_optimizer(update.optimizer, updated(executor), new.parameters, not new.is_fresh)
        for state in update.optimizer.state.values():
            for name in OF_GROUPS:
                state.pop(name, None)
    if new.loss_scales:  # on all ranks alike, fresh or not
        if update.loss_scale.changes:
            update.loss_scale = new.loss_scales[-1]
        if executor.scales is not None:
            executor.scales.restore(new.loss_scales)
    if new.is_fresh:  # the new scheduler steps to where it would stand by now
        update.num_minibatches = 0
        update.catch_up(new.num_minibatches)
        return
    update.num_minibatches = new.num_minibatches
    if update.scheduler is not None and new.scheduler is not None:
        update.scheduler.load_state_dict(new.scheduler.state)


def _put_centre(executor: Executor, new: NewState) -> None:
    """Load the weights that groups have in common, where the checkpoint has such."""
    centre, keys = executor.centre, updated(executor)
    kept = {
        p: {name: t.to(p.device) for name, t in new.parameters[key].state.items() if name in OF_GROUPS}
        for p, key in keys.items()
        if key in new.parameters
    }
    if new.joins:
        for p, of_groups in kept.items():
            if CENTRE in of_groups:
                overwrite(p.detach(), of_groups[CENTRE].to(p.dtype))
            of_groups.pop(TRAVELLING, None)
        if executor.shares is not None:
            executor.shares.gather()
    if centre is not None:
        centre.load(kept)


def stage_modules(executor: Executor) -> dict[int, StageModule]:
    """Return the layers of each stage that this rank holds."""
    return {s: stage.layers for s, stage in zip(executor.held, executor.stages, strict=True)}


def parameters(executor: Executor) -> dict[Tensor, str]:
    """Return the key of each parameter that this rank holds."""
    return {p: key for stage in executor.stages for p, key in stage.layers.parameters().items()}


def updated(executor: Executor) -> dict[Tensor, str]:
    """Return the key of the parameter behind each tensor that this rank's optimizer updates."""
    held = parameters(executor)
    parts = {p: p for p in held} if executor.shares is None else executor.shares.parts
    return {parts[p]: key for p, key in held.items() if p in parts}


def ranges(executor: Executor) -> dict[str, range]:
    """Return the elements that this rank updates of parameters whose update replicas divide, by key.

    A parameter that it updates as a whole is left out.
    """
    found = {} if executor.shares is None else executor.shares.cut
    return {key: found[p] for p, key in parameters(executor).items() if p in found}


def in_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those tensors of which a rank has a part."""
    return {key: tensor for key, tensor in tensors.items() if held_part(tensor) is not None}


def _take_optimizer(executor: Executor, names: Mapping[Tensor, str], state: StageState) -> None:
    """Add the optimizer's state of these parameters, as far as this rank updates them."""
    update, shares = executor.update, executor.shares
    if update.optimizer is None:
        return
    parts = {p: p for p in names} if shares is None else shares.parts
    mine = {parts[p]: key for p, key in names.items() if p in parts}
    of_part = {} if shares is None else {parts[p]: part for p, part in shares.cut.items() if p in parts}
    held = {parts[p]: part for p in names if p in parts and (part := held_part(p)) is not None}
    beside = {} if executor.centre is None else executor.centre.kept()
    take_optimizer(update.optimizer, mine, state, update.given.options, of_part, held, beside)


def _of_stage(executor: Executor, s: int, layers: StageModule, buffers: Mapping[str, Tensor]) -> StageState:
    update, tensors = executor.update, layers.tensors()
    parts = in_parts(tensors)
    whole = {key: tensor for key, tensor in tensors.items() if key not in parts}
    state = StageState(prefixed("model", {**whole, **buffers}))
    put_parts(state, parts)
    state.meta["num_minibatches"] = update.num_minibatches
    state.meta["num_skipped"] = executor.num_skipped
    scales = (update.loss_scale,) if executor.scales is None else executor.scales.window()
    state.meta["loss_scales"] = [[scale.value, scale.updates] for scale in scales if scale.changes]
    batches = executor.statistics.num_batches[executor.held.index(s)]
    state.meta[BATCHES_AGREED] = {layers.key(path): number for path, number in batches.items()}
    _take_optimizer(executor, layers.owned_parameters(), state)
    if update.scheduler is not None:
        held = pack(update.scheduler.state_dict(), "lr_scheduler", state.tensors)
        given = pack(update.given.scheduler, "lr_scheduler.given", state.tensors)
        state.meta["lr_scheduler"] = {"class": name_of(update.scheduler), "state": held, "given": given}
    return state


def _own_versions(plan: Plan, place: Place, point: ResumePoint) -> list[int]:
    """Return the versions that this replica needs and the first replica does not write.

    There are some only under vertical sync.
    """
    written = versions_in_use(plan, Place(place.stage, 0), point)
    return [number for number in versions_in_use(plan, place, point) if number not in written]


def _put_versions(executor: Executor, layers: StageModule, numbers: list[int], state: StageState) -> None:
    state.meta["versions"] = numbers
    if not numbers:
        return
    assert executor.stashed is not None
    for number, weights in executor.stashed.kept(numbers).items():
        state.tensors |= prefixed(f"version.{number}", layers.weights(weights))
