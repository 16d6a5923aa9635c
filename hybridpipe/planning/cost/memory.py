"""Memory: what a rank must hold under a plan, at its peak and over time.

    weights x versions + gradients + optimizer state + Horovod's buffer
    + microbatches stashed x (received input + activations + output) + messages

summed over the stages that the rank holds. A synchronous schedule has one version of the weights, PipeDream
one for each microbatch in flight (SOSP 2019, section 3.3), with vertical sync one for each version that the
input stage still asks for, 2BW two (ICML 2021, section 3.1). With recomputation (GPipe, Huang et al. 2019,
section 2.3) a microbatch keeps its input only, until its backward begins. Where backwards are halved, a
microbatch keeps what it has until the weights' half.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules.generators import (
    ceil_div,
    in_flight_per_stage,
    interleaved_stash,
    per_update,
    until_backward,
    versions,
)
from hybridpipe.planning.schedules.instructions import Backward, BackwardInput, BackwardWeight, Forward, Step
from hybridpipe.planning.timeline import Event, Timeline

# Steps of a rank's memory over time: (seconds, bytes from then on), in order.
Curve = tuple[tuple[float, int], ...]

# Horovod copies what it joins into a fusion buffer, at most so much; `runtime.gradients` may allow it less.
FUSION_BYTES = 128 * 2**20

# Receives posted beyond the one that is waited for: enough that the next message of either neighbour moves
# while a rank computes, and no more, since each holds a buffer.
LOOK_AHEAD = 2

# Longer rounds of two stages are not walked through to count versions.
MAX_ROUND = 4096


class StageMemory(NamedTuple):
    """Bytes of one stage on one rank.

    Args:
        parameters: one version of the weights.
        resident: weights, gradients, what is kept for the products that make them, the optimizer's state, and
            messages on their way.
        stash: what each microbatch keeps from its forward on.
        working: what it keeps besides once its backward has begun.
    """

    parameters: int
    resident: int
    stash: int
    working: int


def stage_memory(
    profile: ModelProfile, start: int, stop: int, recompute: bool, schedule: str, num_microbatches: int
) -> StageMemory:
    """What the layers `[start, stop)` weigh; `num_microbatches`: of an update, on this rank."""
    layers = profile.layers[start:stop]
    parameters = sum(layer.parameter_bytes for layer in layers)
    received = profile.layers[start - 1].output_bytes if start else 0
    inside = sum(layer.activation_bytes for layer in layers) + layers[-1].output_bytes
    stash, working = (received, inside) if recompute else (received + inside, 0)
    resident = round(parameters * (2 + profile.state_factor))
    resident += sum(layer.kept(schedule, num_microbatches) for layer in layers)
    resident += message_bytes(received, layers[-1].output_bytes if stop < len(profile.layers) else 0)
    return StageMemory(parameters, resident, stash, working)


def message_bytes(received: int, sent: int) -> int:
    """What messages take besides the inputs that are stashed, where a stage receives and sends so much.

    Both gradients, as they are computed with; what is sent, packed; and what is received ahead.
    """
    return 2 * (received + sent) + LOOK_AHEAD * max(received, sent)


def _resident(stages: Iterable[StageMemory], replicated: bool) -> int:
    """What a rank always holds."""
    stages = list(stages)
    buffer = min(sum(stage.parameters for stage in stages), FUSION_BYTES) if replicated else 0
    return sum(stage.resident for stage in stages) + buffer


def peak_memory_bytes(profile: ModelProfile, plan: Plan) -> tuple[int, ...]:
    """Peak of each rank of the plan, in stage order."""
    if plan.traits.interleaves:
        each = [_interleaved_peak(profile, plan, group) for group in range(plan.num_groups)]
    else:
        stashed = in_flight_per_stage(plan, plan.num_microbatches)
        begun, kept = _begun(plan), versions_per_stage(plan)
        each = []
        for s, stage in enumerate(_stages(profile, plan, range(plan.num_stages))):
            resident = _resident([stage], plan.replicas[s] > 1)
            old = (kept[s] - 1) * stage.parameters
            each.append(resident + old + stashed[s] * stage.stash + begun[s] * stage.working)
    return tuple(peak for group, peak in enumerate(each) for _ in plan.stages[group].ranks)


def _stages(profile: ModelProfile, plan: Plan, numbers: Iterable[int]) -> list[StageMemory]:
    return [
        stage_memory(
            profile,
            plan.stages[s].start,
            plan.stages[s].stop,
            plan.recomputes(s),
            plan.schedule,
            per_update(plan.schedule, plan.num_microbatches, plan.replicas[s]),
        )
        for s in numbers
    ]


def _interleaved_peak(profile: ModelProfile, plan: Plan, group: int) -> int:
    stages = _stages(profile, plan, plan.held_stages(Place(group, 0)))
    most = max(
        sum(count * stage.stash for count, stage in zip(stash.counts, stages, strict=True))
        + (0 if stash.backward is None else stages[stash.backward].working)
        for stash in interleaved_stash(plan, group, plan.num_microbatches)
    )
    return _resident(stages, plan.replicas[group] > 1) + most


def _begun(plan: Plan) -> list[int]:
    """How many microbatches at most have begun their backward, of each stage: the one that is computed.

    Where backwards are halved, also those whose weights' half follows later.
    """
    if not plan.traits.splits_backward:
        return [1] * plan.num_stages
    held = until_backward(plan, plan.num_microbatches)
    return [
        min(max(held) - here + 1, ceil_div(plan.num_microbatches, replicas))
        for here, replicas in zip(held, plan.replicas, strict=True)
    ]


def versions_per_stage(plan: Plan) -> tuple[int, ...]:
    """The most versions of its weights that each stage holds at a time.

    One is held from its update until the last forward that asks for it has had its backward; the newest,
    always.
    """
    if not plan.is_asynchronous:
        return (1,) * plan.num_stages
    if plan.traits.versions == "two":
        return (2,) * plan.num_stages
    held = until_backward(plan, 1)
    if not plan.vertical_sync:
        return held
    return tuple(_synced_versions(plan, s, held) for s in range(plan.num_stages))


def _synced_versions(plan: Plan, stage: int, held: Sequence[int]) -> int:
    """Of a stage under vertical sync: counted while minibatches go through it, over a round and more."""
    first, replicas = plan.replicas[0], plan.replicas[stage]
    if first == replicas:
        return held[0]
    round_length = math.lcm(first, replicas)
    in_flight = held[0] * first
    if round_length > MAX_ROUND:
        return 2 + max(0, in_flight - 2) // replicas  # as if every version in between were asked for
    count = 2 * (in_flight + held[stage] * replicas + round_length)
    asks = versions(plan, stage)
    return max(_most_versions(range(r, count, replicas), asks) for r in range(replicas))


def _most_versions(minibatches: range, asks: Callable[[int], int]) -> int:
    """What a replica holds while these minibatches go through it, an update after each."""
    held = Versions(minibatches, asks)
    most = held.num_versions
    for m in minibatches:
        held.returned(m)
        held.update()
        most = max(most, held.num_versions)
    return most


class Versions:
    """The versions of a stage's weights that a replica holds, as its minibatches come and go."""

    def __init__(self, microbatches: Iterable[int], asks: Callable[[int], int]) -> None:
        self._asks = asks
        self._wanted = Counter(map(asks, microbatches))  # version: microbatches whose backward is to come
        self._newest = self._old = 0

    @property
    def num_versions(self) -> int:
        """Those that are wanted, and the newest."""
        return 1 + self._old

    def returned(self, microbatch: int) -> None:
        """A microbatch has had its backward."""
        version = self._asks(microbatch)
        self._wanted[version] -= 1
        self._old -= not self._wanted[version] and version < self._newest

    def update(self) -> None:
        """There is a new version."""
        self._old += self._wanted[self._newest] > 0
        self._newest += 1


def curves(profile: ModelProfile, plan: Plan, timeline: Timeline) -> dict[int, Curve]:
    """What each rank holds over time, in stage order; never more than `peak_memory_bytes`.

    A microbatch's stash is there from the start of its forward to the end of its backward or of its weights'
    half; with recomputation the backward adds what it computes again. Under an asynchronous schedule an
    update makes a new version where a microbatch still uses the one before, and a version goes with the last
    microbatch that uses it.
    """
    return {
        rank: tuple(_steps(profile, plan, group, timeline.events[rank]))
        for group, stage in enumerate(plan.stages[: plan.num_groups])
        for rank in stage.ranks
        if rank in timeline.events
    }


def _steps(
    profile: ModelProfile, plan: Plan, group: int, events: tuple[Event, ...]
) -> Iterator[tuple[float, int]]:
    stages = _stages(profile, plan, plan.held_stages(Place(group, 0)))
    resident = _resident(stages, plan.replicas[group] > 1)
    kept: Versions | None = None
    if plan.is_asynchronous:
        forwards = [event.instruction for event in events if isinstance(event.instruction, Forward)]
        kept = Versions([forward.microbatch for forward in forwards], versions(plan, group))
    stash = 0

    def held() -> int:
        return resident + stash + ((kept.num_versions - 1) * stages[0].parameters if kept else 0)

    yield 0.0, resident
    for instruction, start, end in events:
        match instruction:
            case Forward(_, chunk):
                stash += stages[chunk].stash
                yield start, held()
            case Backward() | BackwardInput() if stages[instruction.chunk].working:
                stash += stages[instruction.chunk].working
                yield start, held()
            case Step() if kept:
                kept.update()
                yield start, held()
        if isinstance(instruction, Backward | BackwardWeight):
            stash -= stages[instruction.chunk].stash + stages[instruction.chunk].working
            if kept:
                kept.returned(instruction.microbatch)
            yield end, held()
