"""Cost: what a plan's stages and cuts cost on a cluster, in seconds and bytes.

Two users: the simulator takes a stage's pieces (`stage_costs`), the partitioner a closed formula
(`estimate`). The formula for a synchronous minibatch of M microbatches is

    sum over stages w  +  sum over cuts 2 c            fill and drain of the pipeline
    + max over stages (ceil(M/m) - 1) w + a + u        its slowest stage, or
      max over cuts   (ceil(M/m) - 1) x                its slowest link

with w = f + b + 2 k o a microbatch's forward and backward and the handling of its messages to and from k
neighbours; c its transfer with latency and x without, charged at both ends: m is the smaller replica count
of the two; a what the all-reduce takes beyond the backward that
hides it; u the optimizer's step. With p equal stages and nothing else it is (M + p - 1)(f + b), GPipe's
count (Huang et al. 2019); with one stage it is M/m microbatches and the all-reduce.
"""

from dataclasses import dataclass

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules import ceil_div, in_flight_per_stage

# One bucket of gradients is reduced at a time, while the backward computes the next. Horovod fuses what
# is ready within a cycle up to 128 MiB; smaller buckets start earlier, larger ones pay latency less often.
BUCKET_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients reduced together, ready once `fraction` of the last backward's work is done."""

    num_bytes: float
    fraction: float


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one rank at full speed; times and activations are per microbatch."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    output_bytes: float = 0.0
    buckets: tuple[GradientBucket, ...] = ()


def stage_costs(profile: ModelProfile, plan: Plan) -> tuple[StageCost, ...]:
    """The pieces of each stage that the simulator needs."""
    if profile.num_layers != plan.num_layers:
        raise ValueError(f"the plan cuts {plan.num_layers} layers, the profile has {profile.num_layers}")
    return tuple(_stage_cost(profile, stage) for stage in plan.stages)


def _stage_cost(profile: ModelProfile, stage: StageSpec) -> StageCost:
    layers = profile.layers[stage.start : stage.stop]
    return StageCost(
        forward_seconds=sum(layer.forward_seconds for layer in layers),
        backward_seconds=sum(layer.backward_seconds for layer in layers),
        update_seconds=sum(layer.update_seconds for layer in layers),
        output_bytes=layers[-1].output_bytes,
        buckets=_buckets(profile, stage),
    )


def _buckets(profile: ModelProfile, stage: StageSpec) -> tuple[GradientBucket, ...]:
    """Layers from last to first, as the backward visits them, gathered up to BUCKET_BYTES."""
    layers = profile.layers[stage.start : stage.stop][::-1]
    total = sum(layer.backward_seconds for layer in layers) or 1.0
    buckets, filled, done = [], 0, 0.0
    for layer in layers:
        filled += layer.parameter_bytes
        done += layer.backward_seconds
        if filled >= BUCKET_BYTES:
            buckets.append(GradientBucket(filled, min(done / total, 1.0)))
            filled = 0
    if filled:
        buckets.append(GradientBucket(filled, 1.0))
    return tuple(buckets)


def compute_share(cluster: Cluster, ranks: tuple[int, ...]) -> dict[int, float]:
    """The part of full speed that each rank gets while all of `ranks` compute at once."""
    on_node: dict[int, int] = {}
    for rank in ranks:
        on_node[cluster.node(rank)] = on_node.get(cluster.node(rank), 0) + 1
    return {
        rank: cluster.speed(rank) * min(1.0, cluster.slots / on_node[cluster.node(rank)]) for rank in ranks
    }


def peak_memory_bytes(profile: ModelProfile, plan: Plan) -> tuple[int, ...]:
    """Memory of each rank of the plan, in stage order: weights, gradients, optimizer state, stashes.

    Every microbatch in flight keeps its layers' activations and its received input, and has one
    output on its way.
    """
    peaks = []
    stashes = in_flight_per_stage(plan, plan.num_microbatches)
    for stage, num_in_flight in zip(plan.stages, stashes, strict=True):
        peaks += [stage_memory_bytes(profile, stage.start, stage.stop, num_in_flight)] * stage.replicas
    return tuple(peaks)


def stage_memory_bytes(profile: ModelProfile, start: int, stop: int, num_in_flight: int) -> int:
    """Memory of a rank that holds layers `[start, stop)` with that many microbatches in flight."""
    layers = profile.layers[start:stop]
    parameters = sum(layer.parameter_bytes for layer in layers)
    received = profile.layers[start - 1].output_bytes if start else 0
    stash = sum(layer.activation_bytes for layer in layers) + received
    return round(parameters * (2 + profile.state_factor)) + num_in_flight * stash + layers[-1].output_bytes


def estimate(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Seconds of a minibatch by the closed formula above; what `partition` minimises."""
    share = compute_share(cluster, plan.ranks)
    fill, slowest = 0.0, 0.0
    for s, stage in enumerate(plan.stages):
        cost = _stage_cost(profile, stage)
        speed = min(share[rank] for rank in stage.ranks)
        messages = 2 * ((s > 0) + (s + 1 < plan.num_stages))
        work = cost.forward_seconds + cost.backward_seconds + messages * cluster.message_seconds
        compute = work / speed
        parameters = sum(layer.parameter_bytes for layer in profile.layers[stage.start : stage.stop])
        allreduce = cluster.allreduce_seconds(parameters, stage.ranks) if parameters else 0.0
        exposed = max(0.0, allreduce - cost.backward_seconds / speed)
        rounds = ceil_div(plan.num_microbatches, stage.replicas)
        fill += compute
        slowest = max(slowest, (rounds - 1) * compute + exposed + cost.update_seconds / speed)
        if s + 1 < plan.num_stages:
            behind = plan.stages[s + 1]
            link = cluster.slowest_link(stage.ranks + behind.ranks)
            transfer = cost.output_bytes / link.bandwidth
            fill += 2 * (transfer + link.latency_seconds)
            in_a_row = ceil_div(plan.num_microbatches, min(stage.replicas, behind.replicas))
            slowest = max(slowest, (in_a_row - 1) * transfer)
    return fill + slowest
