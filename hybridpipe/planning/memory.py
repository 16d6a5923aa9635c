"""Memory: what a rank must hold under a plan, at its peak and over time.

    weights x versions + gradients + optimizer state + Horovod's buffer
    + microbatches in flight x (received input + activations + output)

PipeDream keeps a weight version for each microbatch in flight (SOSP 2019, section 3.3), synchronous schedules
one. With recomputation (GPipe, Huang et al. 2019, section 2.3) a microbatch in flight keeps its input only,
and the one being computed all of it.
"""

from collections.abc import Iterator

from hybridpipe.planning.instructions import Backward, Forward, Step
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules import in_flight_per_stage
from hybridpipe.planning.timeline import Event, Timeline

# Steps of a rank's memory over time: (seconds, bytes from then on), in order.
Curve = tuple[tuple[float, int], ...]

# Horovod copies what it reduces into a fusion buffer; HOROVOD_FUSION_THRESHOLD's default.
FUSION_BYTES = 128 * 2**20


def stage_memory_bytes(
    profile: ModelProfile,
    start: int,
    stop: int,
    num_in_flight: int,
    *,
    replicated: bool = False,
    stashes_weights: bool = False,
    recompute: bool = False,
) -> int:
    """Peak of a rank that holds layers `[start, stop)` with that many microbatches in flight.

    Args:
        replicated: its gradients go through Horovod.
        stashes_weights: each microbatch in flight has a weight version of its own.
    """
    resident, stash, working = stage_memory_parts(profile, start, stop, replicated, recompute)
    versions = num_in_flight if stashes_weights else 1
    return (
        resident + (versions - 1) * _parameter_bytes(profile, start, stop) + num_in_flight * stash + working
    )


def stage_memory_parts(
    profile: ModelProfile, start: int, stop: int, replicated: bool, recompute: bool
) -> tuple[int, int, int]:
    """Bytes that are always there, that each microbatch in flight adds, and that the one computed adds."""
    parameters = _parameter_bytes(profile, start, stop)
    resident = round(parameters * (2 + profile.state_factor)) + min(parameters, FUSION_BYTES) * replicated
    received = profile.layers[start - 1].output_bytes if start else 0
    inside = sum(layer.activation_bytes for layer in profile.layers[start:stop])
    inside += profile.layers[stop - 1].output_bytes
    return (resident, received, inside) if recompute else (resident, received + inside, 0)


def peak_memory_bytes(profile: ModelProfile, plan: Plan) -> tuple[int, ...]:
    """Peak of each rank of the plan, in stage order."""
    peaks = []
    stashes = in_flight_per_stage(plan, plan.num_microbatches)
    for stage, num_in_flight in zip(plan.stages, stashes, strict=True):
        peak = stage_memory_bytes(
            profile,
            stage.start,
            stage.stop,
            num_in_flight,
            replicated=stage.replicas > 1,
            stashes_weights=plan.is_asynchronous,
            recompute=plan.recompute,
        )
        peaks += [peak] * stage.replicas
    return tuple(peaks)


def curves(profile: ModelProfile, plan: Plan, timeline: Timeline) -> dict[int, Curve]:
    """What each rank holds over time, in stage order; never more than `peak_memory_bytes`.

    A microbatch's stash is there from the start of its forward to the end of its backward; with recomputation
    the backward adds what it computes again. Under an asynchronous schedule an update makes a new version
    where a microbatch still uses the newest, and a version goes with the last microbatch that uses it.
    """
    return {
        rank: tuple(_steps(profile, plan, stage, timeline.events[rank]))
        for stage in plan.stages
        for rank in stage.ranks
        if rank in timeline.events
    }


def _steps(
    profile: ModelProfile, plan: Plan, stage: StageSpec, events: tuple[Event, ...]
) -> Iterator[tuple[float, int]]:
    resident, stash, working = stage_memory_parts(
        profile, stage.start, stage.stop, stage.replicas > 1, plan.recompute
    )
    version_bytes = _parameter_bytes(profile, stage.start, stage.stop) if plan.is_asynchronous else 0
    newest = 0
    in_use: dict[int, int] = {}  # microbatch: the version of its forward

    def held() -> int:
        versions = len({newest, *in_use.values()}) if version_bytes else 1
        return resident + (versions - 1) * version_bytes + len(in_use) * stash

    yield 0.0, resident
    for instruction, start, end in events:
        match instruction:
            case Forward(m):
                in_use[m] = newest
                yield start, held()
            case Backward(m):
                if working:
                    yield start, held() + working
                in_use.pop(m, None)
                yield end, held()
            case Step() if version_bytes:
                newest += 1
                yield start, held()


def _parameter_bytes(profile: ModelProfile, start: int, stop: int) -> int:
    return sum(layer.parameter_bytes for layer in profile.layers[start:stop])
