"""Shared parameters: those of several layers, under a plan: held once by a rank, exchanged between ranks.

Pure. Knows plans and profiles; no seconds and no tensors. Invariant: once an update, every rank receives the
gradients of each other group of ranks that holds a parameter, and receives them once.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.profile import LayerProfile, ModelProfile


class Peers(NamedTuple):
    """The ranks with which one rank exchanges gradients of another group of replicas.

    Args:
        source: the rank whose gradients it receives.
        targets: the ranks that receive its own.
    """

    source: int
    targets: tuple[int, ...]


def peers_of(plan: Plan, place: Place, group: int) -> Peers:
    """Return the peers of the rank at `place` in another group: all replicas of a group have equal gradients.

    A rank receives from one of the other group, whose replica and shard are its own modulo their counts. All
    shards have equal gradients of a whole parameter; of one in parts, both groups have as many.
    """
    own, other = plan.stages[place.stage], plan.stages[group]
    source = plan.rank_of(group, place.replica, place.shard % other.tensor)
    places = (divmod(index, other.tensor) for index in range(other.num_ranks))
    mine = (place.replica, place.shard)
    each = zip(other.ranks, places, strict=True)
    return Peers(source, tuple(k for k, (r, t) in each if (r % own.replicas, t % own.tensor) == mine))


class SharedMessage(NamedTuple):
    """A message of an exchange of shared parameters' gradients."""

    sender: int
    receiver: int
    num_bytes: int


def exchange_of(
    plan: Plan, place: Place, exchanged: Iterable[tuple[int, int]], factor: float = 1.0
) -> list[SharedMessage]:
    """Return the messages that the rank at `place` sends in an update, and then those that it receives.

    Args:
        exchanged: each other group, and the bytes of gradients exchanged with it.
        factor: bytes that travel for each of these (`Cluster.allreduce_factor`).
    """
    own = plan.rank_at(place)
    peers = [(peers_of(plan, place, group), round(factor * num_bytes)) for group, num_bytes in exchanged]
    sent = [SharedMessage(own, rank, num_bytes) for each, num_bytes in peers for rank in each.targets]
    return sent + [SharedMessage(each.source, own, num_bytes) for each, num_bytes in peers]


def shares_experts(profile: ModelProfile, plan: Plan, stage: int) -> bool:
    """True if a stage splits experts, has some, and its replicas divide them."""
    spec = plan.stages[stage]
    experts = [each.experts for each in profile.layers[spec.start : spec.stop] if each.experts is not None]
    divide = all(each.are_divided_by(spec.replicas) for each in experts)
    return plan.splits_experts(stage) and bool(experts) and divide


def stage_profile(profile: ModelProfile, plan: Plan, stage: int) -> ModelProfile:
    """Return the profile of a rank of a stage; ValueError if it was not measured."""
    tensor = plan.stages[stage].tensor
    return profile if tensor == 1 else profile.split_over(tensor)


def stage_layers(profile: ModelProfile, plan: Plan, stage: int) -> tuple[LayerProfile, ...]:
    """Return the layers of a stage as one of its ranks has them; ValueError if they were not measured."""
    spec = plan.stages[stage]
    layers = stage_profile(profile, plan, stage).layers[spec.start : spec.stop]
    if not plan.splits_experts(stage) or not shares_experts(profile, plan, stage):
        return layers
    return tuple(layer.shared_by(spec.replicas) for layer in layers)


def without_vain_experts(profile: ModelProfile, plan: Plan) -> Plan:
    """Return the plan in which only those stages split experts that have some to split."""
    wanted = [shares_experts(profile, plan, s) for s in range(plan.num_stages)]
    if wanted == [stage.experts for stage in plan.stages]:
        return plan
    each = zip(plan.stages, wanted, strict=True)
    return replace(plan, stages=tuple(replace(stage, experts=experts) for stage, experts in each))


def counted_bytes(profile: ModelProfile, plan: Plan, stage: int) -> list[int]:
    """Return the bytes of parameters that each of a stage's layers adds to its rank.

    A shared parameter counts in the first layer of the rank that uses it.
    """
    start, stop = plan.stages[stage].start, plan.stages[stage].stop
    counted = [layer.parameter_bytes for layer in stage_layers(profile, plan, stage)]
    for shared in stage_profile(profile, plan, stage).shared:
        held = [i for i in shared.layers if _group(plan, i) == plan.group_of(stage)]
        for i in held[1:]:
            if start <= i < stop:
                counted[i - start] -= shared.parameter_bytes
    return counted


def exchanged_bytes(profile: ModelProfile, plan: Plan) -> list[dict[int, int]]:
    """Return, for each group of ranks, the bytes that it exchanges with each other group in an update."""
    found: list[dict[int, int]] = [{} for _ in range(plan.num_groups)]
    for one in range(plan.num_groups):
        for shared in stage_profile(profile, plan, one).shared:
            groups = {_group(plan, i) for i in shared.layers}
            for other in groups - {one} if one in groups else ():
                found[one][other] = found[one].get(other, 0) + shared.parameter_bytes
    return found


def may_run(profile: ModelProfile, plan: Plan) -> bool:
    """True unless the plan separates layers that must stay in one stage.

    Under an asynchronous schedule these are all that share a parameter.
    """
    stays = (each.layers for each in profile.shared if plan.is_asynchronous or not each.separable)
    return all(_stage(plan, layers[0]) == _stage(plan, layers[-1]) for layers in stays)


def _group(plan: Plan, layer: int) -> int:
    return plan.group_of(_stage(plan, layer))


def _stage(plan: Plan, layer: int) -> int:
    return next(s for s, each in enumerate(plan.stages) if layer < each.stop)
