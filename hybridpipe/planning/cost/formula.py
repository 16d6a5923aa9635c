"""Cost: what a plan's stages and cuts cost on a cluster, in seconds.

Two users: the simulator takes a stage's pieces (`stage_costs`), the partitioner a closed formula
(`estimate`). For a synchronous minibatch of M microbatches the formula is

    sum over stages w  +  sum over cuts c                fill and drain of the pipeline
    + max over stages (ceil(M/m) - 1) w + e + u          its slowest stage, or
      max over cuts   x after the first                  its busiest link

with w = f + b + h the forward, backward and handling of messages of one microbatch; e the part of the
all-reduce that neither the backward nor the handling of the gradient sent behind it hides; u the optimizer's
step, and what the last backward leaves to be made (`Plan.defers_wgrad`; where the stage before waits for it,
it is in the sum instead); c the way of one microbatch over the cut and back, with latency; x the time that
the microbatches keep the busiest port or shared link of the cut occupied, in the direction that carries more,
charged at both ends. With p equal stages and nothing else it is (M + p - 1)(f + b), GPipe's count (Huang et
al. 2019); with one stage it is M/m microbatches and the all-reduce. Other synchronous schedules:

    zero-bubble     the sum has w - 2g, if positive, and the stage in the maximum ceil(M/m) w less that: with
                    equal stages M(f + b) + (p - 1)(f + b - 2g), ZB-H1's count (Qi et al., ICLR 2024, section
                    2.3). g is the part of b that makes the weights' gradients; only it hides an all-reduce
    interleaved     ranks hold v stages. W is the w of a rank's stages together: the sum is that of all w over
                    v, the maximum that of (ceil(M/m) - 1/v) W + e + u: with equal stages (M + (p - 1) / v) W,
                    the count of Narayanan et al. (SC 2021, section 2.2). Cuts between the same ranks share
                    their links, and microbatches are taken to come in whole groups of p

An asynchronous pipeline never drains; a minibatch takes

    max over stages (w + e + u) / m    and    max over cuts x for one minibatch

as in PipeDream (SOSP 2019, section 3.1), whose all-reduce is hidden whole. Under pipedream-2bw, which updates
once a minibatch of M microbatches, a stage takes ceil(M/m) w + e + u; with fewer microbatches than stages two
versions do not keep the pipeline full (PipeDream-2BW, ICML 2021, section 3.1), which is not counted. Nor is
what `max_in_flight` costs. The simulator sees both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.links import cut_figures
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.schedules.generators import ceil_div, per_update
from hybridpipe.planning.schedules.registry import TRAITS

# One bucket of gradients is reduced at a time, while the backward computes the next. Horovod fuses
# no more than that (optim/gradient_sync.py); smaller ones start earlier, larger ones pay latency less often
# (docs/log/all-reduce.md: 2 MiB is about as fast as 1 and 4 and faster than 8, also between hosts).
BUCKET_BYTES = 2 * 2**20

Seconds = TypeVar("Seconds", float, NDArray[np.float64])  # of one stage, or of many at once


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients reduced together, ready once `fraction` of the last backward's work is done."""

    num_bytes: float
    fraction: float


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one rank at full speed; times and sizes are per microbatch.

    With recomputation the backward contains a forward. `weight_seconds` are the half of the backward that
    makes the weights' gradients, which zero-bubble does by itself. `products_seconds` is what the last
    backward leaves to be made (`Plan.defers_wgrad`).
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    output_bytes: float = 0.0
    gradient_bytes: float = 0.0
    buckets: tuple[GradientBucket, ...] = ()
    weight_seconds: float = 0.0
    products_seconds: float = 0.0


def stage_costs(profile: ModelProfile, plan: Plan, load_speed: float = 1.0) -> tuple[StageCost, ...]:
    """The pieces of each stage that the simulator needs.

    Args:
        load_speed: how fast a rank was, relative to one alone, while the profile was taken
            (`measured_speed`); the costs are those of one alone.
    """
    if profile.num_layers != plan.num_layers:
        raise ValueError(f"the plan cuts {plan.num_layers} layers, the profile has {profile.num_layers}")
    return tuple(
        _stage_cost(
            profile.layers[stage.start : stage.stop],
            plan.schedule,
            per_update(plan.schedule, plan.num_microbatches, stage.replicas),
            plan.recomputes(s),
            load_speed,
        )
        for s, stage in enumerate(plan.stages)
    )


def measured_speed(profile: ModelProfile, cluster: Cluster) -> float:
    """Speed of a rank, relative to one alone, under the load that the profile was measured with.

    1.0 where the cluster does not say how ranks of a machine hamper each other: then the load stays in.
    """
    return 1.0 if cluster.compute_speeds is None else cluster.shared_speed(profile.load)


def _stage_cost(
    layers: Sequence[LayerProfile], schedule: str, rounds: int, recompute: bool, load_speed: float
) -> StageCost:
    """`rounds`: microbatches of an update, on one rank."""
    forward = sum(layer.forward_seconds for layer in layers) * load_speed
    backward = sum(layer.backward(schedule, rounds) for layer in layers) * load_speed
    return StageCost(
        forward_seconds=forward,
        backward_seconds=backward + recompute * forward,
        update_seconds=sum(layer.update_seconds for layer in layers) * load_speed,
        output_bytes=layers[-1].output_bytes,
        gradient_bytes=layers[-1].returned_bytes,
        buckets=_buckets(layers, schedule, rounds),
        weight_seconds=sum(layer.weights_backward(rounds) for layer in layers) * load_speed,
        products_seconds=sum(layer.products(schedule, rounds) for layer in layers) * load_speed,
    )


def _buckets(layers: Sequence[LayerProfile], schedule: str, rounds: int) -> tuple[GradientBucket, ...]:
    """Layers from last to first, as the last backward visits them, gathered up to BUCKET_BYTES."""
    seconds = [layer.backward(schedule, rounds) + layer.products(schedule, rounds) for layer in layers]
    total = sum(seconds) or 1.0
    buckets, filled, done = [], 0, 0.0
    for layer, of_layer in zip(reversed(layers), reversed(seconds), strict=True):
        filled += layer.parameter_bytes
        done += of_layer
        if filled >= BUCKET_BYTES:
            buckets.append(GradientBucket(filled, min(done / total, 1.0)))
            filled = 0
    if filled:
        buckets.append(GradientBucket(filled, 1.0))
    return tuple(buckets)


def compute_share(cluster: Cluster, ranks: Sequence[int]) -> dict[int, float]:
    """The part of full speed that each rank gets while all of `ranks` compute at once."""
    on_node = Counter(map(cluster.node, ranks))
    return {rank: cluster.speed(rank) * cluster.shared_speed(on_node[cluster.node(rank)]) for rank in ranks}


def stage_speed(cluster: Cluster, ranks: Sequence[int], share: Mapping[int, float]) -> float:
    """Speed of a stage's slowest rank, given the part of full speed that each rank gets."""
    return min(share[rank] for rank in ranks) * (cluster.replicated_speed if len(ranks) > 1 else 1.0)


class StageTerms(NamedTuple):
    """What a stage takes at the speed of its slowest rank, all ranks of the plan computing.

    Args:
        work_seconds: a microbatch's forward, backward and handling of messages; `weight_seconds` of them make
            the weights' gradients.
        allreduce_seconds: one all-reduce, alone; of it `exposed_seconds` are not hidden.
        update_seconds: the optimizer's step.
        products_seconds: what the last backward leaves to be made; `held_up_seconds` of them before the
            gradient is sent that the stage before waits for.
    """

    work_seconds: float
    allreduce_seconds: float
    exposed_seconds: float
    update_seconds: float
    weight_seconds: float
    products_seconds: float
    held_up_seconds: float

    @property
    def after_seconds(self) -> float:
        """What follows a minibatch's work."""
        return self.products_seconds - self.held_up_seconds + self.exposed_seconds + self.update_seconds


def stage_terms(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> tuple[StageTerms, ...]:
    """One for each stage, given `stage_costs`."""
    share = compute_share(cluster, plan.ranks)
    over_cuts = [handling_seconds(cluster, cost.output_bytes + cost.gradient_bytes) for cost in costs[:-1]]
    terms = []
    for s, (cost, before, behind) in enumerate(zip(costs, [0.0, *over_cuts], [*over_cuts, 0.0], strict=True)):
        stage = plan.stages[s]
        speed = stage_speed(cluster, stage.ranks, share)
        last, inline = cost.backward_seconds, 0.0 if plan.defers_wgrad(s) else cost.products_seconds
        if plan.traits.splits_backward:
            last = cost.weight_seconds
        elif s:
            last += handling_seconds(cluster, costs[s - 1].gradient_bytes, 1)
        hidden = cluster.overlap * (last + inline) / speed
        weights = sum(bucket.num_bytes for bucket in cost.buckets)
        allreduce = cluster.allreduce_seconds(weights, stage.ranks) if weights else 0.0
        terms.append(
            StageTerms(
                work_seconds=(cost.forward_seconds + cost.backward_seconds + before + behind) / speed,
                allreduce_seconds=allreduce,
                exposed_seconds=allreduce - min(cluster.overlap * allreduce, hidden),
                update_seconds=cost.update_seconds / speed,
                weight_seconds=cost.weight_seconds / speed,
                products_seconds=cost.products_seconds / speed,
                held_up_seconds=inline / speed if s else 0.0,
            )
        )
    return tuple(terms)


def estimate(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Seconds of a minibatch by the closed formula above; what `partition` minimises.

    Every rank of the plan is taken to compute all the time, so ranks that share a machine's processors get
    the speed they have while all of them are active.
    """
    return estimate_from_costs(plan, stage_costs(profile, plan, measured_speed(profile, cluster)), cluster)


def estimate_from_costs(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> float:
    """`estimate`, given `stage_costs`."""
    terms = stage_terms(plan, costs, cluster)
    over_stages = _interleaved if plan.traits.interleaves else _straight
    fill, slowest = over_stages(plan, terms)
    busy = [0.0] * plan.num_groups  # the links behind each group of ranks
    for s, (latency, per_byte, busy_per_byte) in enumerate(plan_cut_figures(plan, cluster)):
        sent, returned = costs[s].output_bytes, costs[s].gradient_bytes
        busy[s % plan.num_groups] += busy_per_byte * max(sent, returned)
        fill += 2 * latency + per_byte * (sent + returned)
    slowest = max(slowest, *busy)
    return slowest if plan.is_asynchronous else fill + slowest


def plan_cut_figures(plan: Plan, cluster: Cluster, asynchronous: bool | None = None) -> list[list[float]]:
    """Return the `cut_figures` of each cut of a plan.

    Args:
        asynchronous: False counts only the messages after the first; None follows the schedule.
    """
    starts = np.arange(plan.num_stages - 1)
    asynchronous = plan.is_asynchronous if asynchronous is None else asynchronous
    ranks = [stage.ranks for stage in plan.stages]
    figures = cut_figures(cluster, ranks, np.stack([starts, starts + 1]), plan.num_microbatches, asynchronous)
    figures_of_cuts: list[list[float]] = figures.T.tolist()
    return figures_of_cuts


def _straight(plan: Plan, terms: Sequence[StageTerms]) -> tuple[float, float]:
    fill, slowest = 0.0, 0.0
    for m, term in zip(plan.replicas, terms, strict=True):
        filling, most = stage_parts(
            plan.schedule,
            plan.num_microbatches,
            m,
            term.work_seconds,
            term.weight_seconds,
            term.after_seconds,
        )
        fill, slowest = fill + float(filling) + term.held_up_seconds, max(slowest, float(most))
    return fill, slowest


def stage_parts(
    schedule: str, num_microbatches: int, replicas: int, work: Seconds, weight: Seconds, after: Seconds
) -> tuple[Seconds, Seconds]:
    """What a stage adds to the sum and to the maximum; for interleaved-1f1b see `_interleaved`.

    An asynchronous schedule has no sum; what is said for it is the way of a microbatch through the stage.

    Args:
        work, weight: a microbatch's work, and the part of it that makes the weights' gradients.
        after: what follows it, `StageTerms.after_seconds`.
    """
    rounds = ceil_div(num_microbatches, replicas)
    traits = TRAITS[schedule]
    if traits.whole_minibatch:
        return work, (work + after) / replicas
    if traits.is_asynchronous:
        return work, rounds * work + after
    if traits.splits_backward:
        filling = np.maximum(work - 2 * weight, 0.0)
        return filling, rounds * work - filling + after
    return work, (rounds - 1) * work + after


def _interleaved(plan: Plan, terms: Sequence[StageTerms]) -> tuple[float, float]:
    rounds = ceil_div(plan.num_microbatches, plan.replicas[0]) - 1 / plan.chunks
    slowest = 0.0
    for group in range(plan.num_groups):
        held = terms[group :: plan.num_groups]
        after = sum(term.after_seconds for term in held)
        slowest = max(slowest, rounds * sum(term.work_seconds for term in held) + after)
    filling = sum(term.work_seconds for term in terms) / plan.chunks
    return filling + sum(term.held_up_seconds for term in terms), slowest


def handling_seconds(cluster: Cluster, num_bytes: float, num_messages: int = 2) -> float:
    """Processor time, at one side of a cut, of a microbatch's messages: the one there and the one back."""
    return num_messages * cluster.message_seconds + num_bytes * cluster.message_seconds_per_byte
