"""Cost: the seconds of a plan's stages and cuts on a cluster.

The simulator takes a stage's pieces (`stage_costs`), the partitioner a closed formula (`estimate`). For a
synchronous minibatch of M microbatches the formula is

    sum over stages w  +  sum over cuts c                fill and drain of the pipeline
    + max over stages (ceil(M/m) - 1) w + e + u          its slowest stage, or
      max over stages (ceil(M/m) - 1) y + e + u          its busiest port, or
      max over cuts   x after the first                  its busiest link, or
      max over stages (ceil(M/m) / h - 1) s              its longest wait for gradients

    w   forward, backward and handling of messages of one microbatch: f + b + h, with the exchanges of tokens
        where replicas split experts, and the sums where they have shards
    e   the part of the reduction that is hidden neither by the backward nor by the handling of the gradient
        sent after it
    u   the optimizer's step, the exchange of shared parameters' gradients, the all-gather of weights, and the
        deferred products of the last backward (`Plan.defers_wgrad`); products that the stage before waits for
        are in the sum instead
    c   the way of one microbatch over the cut and back, with latency, while those of the other replicas are
        on it: a receiver with fewer replicas gets several activations at once
    x   the time that the microbatches keep the busiest port or shared link of the cut occupied, in the
        direction that carries more, charged at both ends; under gpipe, whose gradients come after all
        activations, in both directions
    y   the time that one microbatch keeps a replica's port occupied, which carries activations of one cut and
        gradients of the other, at the bandwidth of the fastest level
    s   the part of the sum from the stage to the end: the way of a microbatch there and back
    h   the microbatches that a replica may have on that way (`round_trips`)

Where replicas shard their update (`StageSpec.zero`), a step takes a part of the time that the whole one
does. Where they also shard gradients, each microbatch has a reduction, and its backward all products: the
stage in the maximum has (ceil(M/m) - 1) (w + e).

The last line matters where links are slow: a replica of 1F1B that has h microbatches on their way computes no
further one until a gradient is back. Two equal stages take (w + c) / 2 + w / 2 a microbatch, not w.

With p equal stages and nothing else it is (M + p - 1)(f + b), GPipe's count (Huang et al. 2019). With one
stage it is M/m microbatches and the all-reduce. Other synchronous schedules:

    zero-bubble     The sum has w - 2g, if positive, and the stage in the maximum ceil(M/m) w less that. With
                    equal stages this is M(f + b) + (p - 1)(f + b - 2g), ZB-H1's count (Qi et al., ICLR 2024,
                    section 2.3). g is the part of b that computes weight gradients; only it hides an
                    all-reduce.
    interleaved     Ranks hold v stages. W is the w of a rank's stages together. The sum is that of all w over
                    v, the maximum that of (ceil(M/m) - 1/v) W + e + u. With equal stages this is
                    (M + (p - 1) / v) W, the count of Narayanan et al. (SC 2021, section 2.2). Cuts between
                    the same ranks share their links, and microbatches are taken to come in whole groups of p.

An asynchronous pipeline never drains. A minibatch takes

    max over stages (w + e + u) / m, y / m and s / (h m)    and    max over cuts x for one minibatch

as in PipeDream (SOSP 2019, section 3.1), whose all-reduce is hidden whole. Under pipedream-2bw, which updates
once a minibatch of M microbatches, a stage takes ceil(M/m) w + e + u, M y / m and M s / (h m).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import add, attrgetter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cluster import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Cluster, Ring
from hybridpipe.planning.cost.exchanges import pass_exchanges
from hybridpipe.planning.cost.links import Floats, Ints, cut_figures
from hybridpipe.planning.layer_parts import NO_SUMS, SumsProfile
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.schedules.generators import ceil_div, in_flight, per_update
from hybridpipe.planning.schedules.registry import TRAITS
from hybridpipe.planning.shared_parameters import (
    counted_bytes,
    exchange_of,
    exchanged_bytes,
    stage_layers,
)

# One bucket of gradients is reduced at a time, while the backward computes the next. Horovod fuses no more
# than that (optim/gradient_sync.py). Smaller buckets start earlier, larger ones pay latency less often: 2 MiB
# is about as fast as 1 and 4 and faster than 8, also between hosts (docs/log/all-reduce.md).
BUCKET_BYTES = 2 * 2**20

Seconds = TypeVar("Seconds", float, Floats)  # of one stage, or of many at once


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients reduced together, ready once `fraction` of the last backward's work is done."""

    num_bytes: float
    fraction: float


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one stage on one rank at full speed; seconds and bytes are per microbatch.

    Args:
        backward_seconds: with recomputation it contains a forward.
        weight_seconds: the half of the backward that computes weight gradients, a separate instruction under
            zero-bubble.
        products_seconds: the deferred products of the last backward (`Plan.defers_wgrad`).
        exchanged: bytes of shared parameters' gradients that the rank exchanges in an update, with the group
            of ranks; only in the first stage that the rank holds.
        token_bytes: of tokens that go to experts of all replicas in a forward, and come back; as many
            gradients do in a backward.
        num_exchanges: modules whose tokens are exchanged.
        experts_share: the part of a pass that is the experts' work.
        sums: over the shards of a replica.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    output_bytes: float = 0.0
    gradient_bytes: float = 0.0
    buckets: tuple[GradientBucket, ...] = ()
    weight_seconds: float = 0.0
    products_seconds: float = 0.0
    exchanged: tuple[tuple[int, int], ...] = ()
    token_bytes: float = 0.0
    num_exchanges: int = 0
    experts_share: float = 0.0
    sums: SumsProfile = NO_SUMS


def stage_costs(profile: ModelProfile, plan: Plan, load_speed: float = 1.0) -> tuple[StageCost, ...]:
    """Return the costs of each stage of a plan.

    Args:
        load_speed: speed of a rank, relative to one alone, during the measurement of the profile
            (`measured_speed`). The costs are those of a rank alone.

    Raises:
        ValueError: plan and profile differ in layers.
    """
    if profile.num_layers != plan.num_layers:
        raise ValueError(f"the plan cuts {plan.num_layers} layers, the profile has {profile.num_layers}")
    costs = [_stage_cost(profile, plan, s, load_speed) for s in range(plan.num_stages)]
    for group, exchanged in enumerate(exchanged_bytes(profile, plan)):
        charged = tuple((other, num_bytes) for other, num_bytes in exchanged.items() if num_bytes)
        costs[group] = replace(costs[group], exchanged=charged)
    return tuple(costs)


def measured_speed(profile: ModelProfile, cluster: Cluster) -> float:
    """Return the speed of a rank, relative to one alone, under the load of the profile's measurement.

    It is 1.0 where the cluster does not say how ranks of a machine slow each other down. The load then stays
    in the profile's times.
    """
    if cluster.compute_speeds is None:
        return 1.0
    return cluster.shared_speed(profile.load, shards=1)


def _stage_cost(profile: ModelProfile, plan: Plan, s: int, load_speed: float) -> StageCost:
    """Return the costs of a stage, without the exchange of shared parameters' gradients."""
    stage, schedule, zero = plan.stages[s], plan.schedule, plan.zero_of(s)
    layers, counted = stage_layers(profile, plan, s), counted_bytes(profile, plan, s)
    reduced = [num_bytes - layer.own_bytes for layer, num_bytes in zip(layers, counted, strict=True)]
    rounds = per_update(schedule, plan.num_microbatches, stage.replicas)
    update = [
        layer.update_seconds * (num_bytes / layer.parameter_bytes if num_bytes < layer.parameter_bytes else 1)
        for layer, num_bytes in zip(layers, counted, strict=True)
    ]
    forward = sum(layer.forward_seconds for layer in layers) * load_speed
    if zero == 2:
        backward = [layer.whole_backward(schedule, rounds) for layer in layers]
        products = [0.0] * len(layers)
    else:
        backward = [layer.backward(schedule, rounds) for layer in layers]
        products = [layer.products(schedule, rounds) for layer in layers]
    return StageCost(
        forward_seconds=forward,
        backward_seconds=sum(backward) * load_speed + plan.recomputes(s) * forward,
        update_seconds=sum(update) * load_speed / (stage.replicas if zero else 1),
        output_bytes=0.0 if plan.hands_over(s) else layers[-1].output_bytes,
        gradient_bytes=0.0 if plan.hands_over(s) else layers[-1].returned_bytes,
        buckets=_buckets(reduced, list(map(add, backward, products))),
        weight_seconds=sum(layer.weights_backward(rounds) for layer in layers) * load_speed,
        products_seconds=sum(products) * load_speed,
        token_bytes=sum(layer.token_bytes for layer in layers),
        num_exchanges=sum(layer.num_exchanges for layer in layers),
        experts_share=_experts_share(layers),
        sums=_sums(layers, plan.recomputes(s)),
    )


def _sums(layers: Sequence[LayerProfile], recompute: bool) -> SumsProfile:
    """Return the sums of a stage, whose backward has those of its forward as well where it recomputes."""
    sums = sum((layer.sums for layer in layers if layer.sums), start=NO_SUMS)
    again = SumsProfile(0, sums.forward, 0, sums.forward_bytes)
    return sums + again if recompute else sums


def _experts_share(layers: Sequence[LayerProfile]) -> float:
    """Return the part of a stage's forward that its experts take."""
    each = [(layer.forward_seconds, layer.experts.share) for layer in layers if layer.experts is not None]
    total = sum(layer.forward_seconds for layer in layers)
    return sum(seconds * share for seconds, share in each) / total if total else 0.0


def _buckets(counted: Sequence[int], seconds: Sequence[float]) -> tuple[GradientBucket, ...]:
    """Gather layers up to BUCKET_BYTES, from last to first, as the last backward visits them."""
    total = sum(seconds) or 1.0
    buckets, filled, done = [], 0, 0.0
    for num_bytes, of_layer in zip(reversed(counted), reversed(seconds), strict=True):
        filled += num_bytes
        done += of_layer
        if filled >= BUCKET_BYTES:
            buckets.append(GradientBucket(filled, min(done / total, 1.0)))
            filled = 0
    if filled:
        buckets.append(GradientBucket(filled, 1.0))
    return tuple(buckets)


def compute_share(cluster: Cluster, ranks: Sequence[int]) -> dict[int, float]:
    """Return the part of full speed that each rank gets while all of `ranks` compute at once."""
    on_node = Counter(map(cluster.node, ranks))
    return {rank: cluster.speed(rank) * cluster.shared_speed(on_node[cluster.node(rank)]) for rank in ranks}


def stage_speed(cluster: Cluster, ranks: Sequence[int], share: Mapping[int, float]) -> float:
    """Return the speed of a stage's slowest rank, given the part of full speed that each rank gets."""
    return min(share[rank] for rank in ranks) * (cluster.replicated_speed if len(ranks) > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class StageTerms(Generic[Seconds]):
    """Seconds of many stages, each at the speed of its slowest rank; arrays that broadcast.

    Args:
        work: a microbatch's forward, backward, handling of messages and `pass_exchanges`.
        weight: the part of `work` that computes the weights' gradients.
        reduction: one reduction, alone on its links.
        exposed: the part of `reduction` that nothing hides.
        between: `exposed` where each microbatch has a reduction, else 0.
        update: the optimizer's step.
        products: the deferred products of the last backward (`LayerProfile.products`).
        held_up: the part of `products` that precedes the gradient for the stage before.
        exchange: the exchange of shared parameters' gradients.
        gather: the all-gather of updated weights.
    """

    work: Seconds
    weight: Seconds
    reduction: Seconds
    exposed: Seconds
    between: Seconds
    update: Seconds
    products: Seconds
    held_up: Seconds
    exchange: Seconds
    gather: Seconds

    @property
    def after(self) -> Seconds:
        """Seconds from the end of a minibatch's work to the end of the update."""
        return self.products - self.held_up + self.exposed + self.exchange + self.update + self.gather

    def of_stage(self, stage: int) -> "StageTerms[float]":
        """Return the terms of one stage, where `self` holds those of a plan's stages."""
        return StageTerms(*(float(getattr(self, each.name)[stage]) for each in fields(self)))


def stage_terms(
    schedule: str,
    overlap: float,
    *,
    is_first: NDArray[np.bool_],
    replicas: Ints | int,
    speed: Floats | float,
    work: Floats,
    backward: Floats,
    weight: Floats,
    products: Floats,
    update: Floats,
    sending: Floats,
    reduction: Floats,
    exchange: Floats,
    gather: Floats,
    reduces_each: NDArray[np.bool_] | bool,
    exchanges: Floats | float = 0.0,
) -> StageTerms[Floats]:
    """Return the terms of stages from their costs; all arrays broadcast against each other.

    Args:
        overlap: the share of a reduction that computing can hide (`Cluster.overlap`).
        is_first: True for stages without a stage before.
        speed: of the slowest rank.
        work, backward, weight, products, update: seconds at full speed.
        sending: processor seconds of the last gradient that is sent, 0 in a first stage.
        reduction: seconds alone on its links.
        exchange: seconds of the exchange of shared parameters' gradients.
        gather: seconds of the all-gather of weights.
        reduces_each: True where each microbatch has a reduction.
        exchanges: seconds of a microbatch's `pass_exchanges`.
    """
    products = products / speed
    inline = products * (is_first | (np.asarray(replicas) > 1))  # else they are deferred: `Plan.defers_wgrad`
    last = weight if TRAITS[schedule].splits_backward else backward + sending
    exposed = reduction - overlap * np.minimum(reduction, last / speed + inline)
    return StageTerms(
        work / speed + exchanges,
        weight / speed,
        reduction,
        exposed,
        exposed * reduces_each,
        update / speed,
        products,
        inline * ~is_first,
        exchange,
        gather,
    )


def stage_parts(
    schedule: str,
    num_microbatches: int,
    replicas: Ints | int,
    work: Seconds,
    weight: Seconds,
    after: Seconds,
    between: Seconds | float = 0.0,
) -> tuple[Seconds, Seconds]:
    """Return the seconds that stages add to the sum and to the maximum; interleaved-1f1b has `_interleaved`.

    An asynchronous schedule has no sum. There the first figure is a microbatch's way through the stage.

    Args:
        work, weight: `StageTerms.work` and `StageTerms.weight`.
        after: seconds between the work and the end of the update.
        between: seconds between the work of two microbatches (`StageTerms.between`).
    """
    m: Any = replicas  # of one stage, or of each
    rounds = -(-num_microbatches // m)
    traits = TRAITS[schedule]
    if traits.whole_minibatch:
        return work, (work + after) / m
    if traits.is_asynchronous:
        return work, rounds * work + after
    if traits.splits_backward:
        filling: Seconds = np.maximum(work - 2 * weight, 0.0)
        return filling, rounds * work - filling + (rounds - 1) * between + after
    return work, (rounds - 1) * (work + between) + after


def cut_bytes(schedule: str, sent: Floats, returned: Floats) -> Floats:
    """Return the bytes of a microbatch over cuts that no others pass at the same time."""
    both: Floats = np.maximum(sent, returned) if TRAITS[schedule].has_warm_up else sent + returned
    return both


def port_seconds(
    schedule: str,
    num_microbatches: int,
    replicas: Ints | int,
    cluster: Cluster,
    outgoing: Floats,
    incoming: Floats,
) -> Floats:
    """Return the seconds that a minibatch keeps the busier port of each stage's replicas occupied.

    Args:
        outgoing, incoming: bytes of one microbatch that a replica sends and receives.
    """
    flushed = not TRAITS[schedule].is_asynchronous
    m: Any = replicas
    count = -(-num_microbatches // m) - 1 if flushed else num_microbatches / m
    bandwidth = max(level.bandwidth for level in cluster.levels)
    seconds: Floats = count / bandwidth * np.maximum(outgoing, incoming)
    return seconds


_FIGURES = attrgetter(
    "forward_seconds",
    "backward_seconds",
    "weight_seconds",
    "products_seconds",
    "update_seconds",
    "output_bytes",
    "gradient_bytes",
)


def plan_terms(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> StageTerms[Floats]:
    """Return the terms of a plan's stages, shape (stages,), while all ranks of the plan compute.

    Args:
        costs: those of `stage_costs`.
    """
    rows = np.array([_FIGURES(cost) for cost in costs]).T
    forward, backward, weight, products, update, sent, returned = rows
    gradients = [sum(bucket.num_bytes for bucket in cost.buckets) for cost in costs]
    share = compute_share(cluster, plan.ranks)
    handling = np.zeros(len(costs) + 1)
    are_sent = np.array([plan.sends(s) for s in range(len(costs) - 1)], dtype=np.bool_)
    handling[1:-1] = cluster.occupied_seconds((sent + returned)[:-1], 2) * are_sent
    sending = np.zeros(len(costs))
    sending[1:] = cluster.occupied_seconds(returned[:-1], 1) * are_sent
    zeros = np.array([plan.zero_of(s) for s in range(plan.num_stages)])
    reducing = [cluster.ring(stage.ranks, reduction_of(plan, s)) for s, stage in enumerate(plan.stages)]
    gathering = [cluster.ring(stage.ranks, ALL_GATHER) for stage in plan.stages]
    return stage_terms(
        plan.schedule,
        cluster.overlap,
        is_first=np.arange(len(costs)) == 0,
        replicas=np.array(plan.replicas),
        speed=np.array([stage_speed(cluster, stage.ranks, share) for stage in plan.stages]),
        work=forward + backward + handling[:-1] + handling[1:],
        backward=backward,
        weight=weight,
        products=products,
        update=update,
        sending=sending,
        reduction=np.array(list(map(Ring.seconds, reducing, gradients))),
        exchange=exchange_seconds(plan, costs, cluster),
        gather=np.array(list(map(Ring.seconds, gathering, gradients))) * (zeros > 0),
        reduces_each=zeros == 2,
        exchanges=np.array(
            [
                sum(pass_exchanges(cost, cluster.all_to_all(stage.ranks), cluster.summing))
                for cost, stage in zip(costs, plan.stages, strict=True)
            ]
        ),
    )


def reduction_of(plan: Plan, stage: int) -> str:
    """Return the collective that reduces a stage's gradients."""
    return REDUCE_SCATTER if plan.scatters(stage) else ALL_REDUCE


def exchange_seconds(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> Floats:
    """Return the seconds of each stage's exchange of shared parameters' gradients, shape (stages,).

    That is the time of the replica that sends or receives longest, alone on its links, with the latency and
    the processor time of its messages.
    """
    seconds = np.zeros(len(costs))
    for s, cost in enumerate(costs):
        for place in (Place(s, r) for r in range(plan.replicas[s]) if cost.exchanged):
            messages = exchange_of(plan, place, cost.exchanged, cluster.allreduce_factor)
            links = [cluster.link(each.sender, each.receiver) for each in messages]
            ways = {True: 0.0, False: 0.0}  # sent or received
            for each, link in zip(messages, links, strict=True):
                ways[each.sender in plan.stages[s].ranks] += each.num_bytes / link.bandwidth
            handling = cluster.handling_seconds(sum(each.num_bytes for each in messages), len(messages))
            latency = max(link.latency_seconds for link in links)
            seconds[s] = max(seconds[s], max(ways.values()) + latency + handling)
    return seconds


def plan_cut_figures(plan: Plan, cluster: Cluster, asynchronous: bool) -> Floats:
    """Return the `cut_figures` of a plan's cuts, shape (4, cuts); 0 where nothing is sent."""
    ranks = tuple(stage.ranks for stage in plan.stages)
    figures = _figures_between(cluster, ranks, plan.num_microbatches, asynchronous)
    return figures * [plan.sends(cut) for cut in range(plan.num_stages - 1)]


@lru_cache(maxsize=1024)  # a search looks at many cuts between the same ranks
def _figures_between(
    cluster: Cluster, ranks: tuple[tuple[int, ...], ...], num_microbatches: int, asynchronous: bool
) -> Floats:
    before = np.arange(len(ranks) - 1)
    return cut_figures(cluster, ranks, np.stack([before, before + 1]), num_microbatches, asynchronous)


def held_until_gradients(
    schedule: str, num_microbatches: int, replicas: int, behind: int, max_in_flight: int | None
) -> int:
    """Return the microbatches that a replica has on the way from its stage to the end and back.

    They are about as many as there are ranks from the stage to the end, divided among its replicas. That
    is `in_flight` without its rounding up at every stage.

    Args:
        behind: ranks of all later stages together.
    """
    held = in_flight(schedule, num_microbatches, replicas, behind, num_microbatches)
    return min(held, max_in_flight or held)


def round_trips(
    schedule: str, num_microbatches: int, replicas: int, behind: int, max_in_flight: int | None
) -> float:
    """Return how often the way of a microbatch from a stage to the end and back is in the maximum.

    Args:
        behind: ranks of all later stages together.
    """
    held = held_until_gradients(schedule, num_microbatches, replicas, behind, max_in_flight)
    if TRAITS[schedule].is_asynchronous:
        return num_microbatches / (held * replicas)
    return ceil_div(num_microbatches, replicas) / held - 1.0
