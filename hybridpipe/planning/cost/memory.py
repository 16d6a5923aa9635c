"""Memory: the bytes that a rank holds under a plan, at its peak and over time.

    weights x versions + gradients + optimizer state + all-reduce
    + microbatches stashed x (received input + activations + output) + workspace + messages

Summed over the stages that the rank holds; a parameter that several of them use counts once. A synchronous
schedule has one version of the weights. PipeDream has one for each microbatch in flight (SOSP 2019, section
3.3), with vertical sync one for each version that the input stage still uses. 2BW has two (ICML 2021, section
3.1). Where weights are predicted, those of microbatches in flight are held besides the newest. A version
counts as large as the parameters, also where precision keeps the half of it. With recomputation a microbatch
keeps only its input until its backward begins (GPipe, Huang et al. 2019, section 2.3). Replicas may shard the
optimizer's state and the gradients (`StageSpec.zero`); of whole gradients there are then those of a few
buckets. Of experts that replicas share, each has its part (`LayerProfile.shared_by`). Where backwards are
split, a microbatch keeps until the weights' half what gradients of weights are computed from, where the
profile says so (`LayerProfile.split_bytes`), or else its stash.

A start takes no more: while a rank makes or loads its weights, it has one parameter besides, no gradients.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cost.formula import BUCKET_BYTES
from hybridpipe.planning.cost.links import Floats, Ints
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.schedules.generators import (
    ceil_div,
    delay_of,
    interleaved_stash,
    per_update,
    until_backward,
    versions,
    weight_lags,
    weights_numbers,
)
from hybridpipe.planning.schedules.instructions import Backward, BackwardInput, BackwardWeight, Forward, Step
from hybridpipe.planning.shared_parameters import counted_bytes, exchanged_bytes, stage_layers
from hybridpipe.planning.timeline import TimedEvent, Timeline

# Steps of a rank's memory over time: (seconds, bytes from then on), in order.
Curve = tuple[tuple[float, int], ...]

# The largest fusion buffer, into which Horovod copies small gradients (`collectives.horovod` sets it).
FUSION_BYTES = BUCKET_BYTES

# Buckets whose gradients are whole where replicas shard gradients: two being reduced, one being filled.
IN_FLIGHT_BUCKETS = 3

# Receives posted beyond the one that a rank waits for: enough that the next message of either neighbour moves
# while the rank computes, and no more, since each holds a buffer.
LOOK_AHEAD = 2

# The longest round of two stages in which versions are counted one by one.
MAX_ROUND = 4096


class StageMemory(NamedTuple):
    """Bytes of stages on one rank each; arrays of one shape, whole numbers up to 2^53.

    Args:
        parameters: one version of the weights.
        resident: weights, gradients, inputs kept for deferred products, the optimizer's state, and messages.
        stash: bytes that each microbatch keeps from its forward on.
        working: further bytes that it has during its backward.
        split: bytes that it keeps between the halves of a split backward.
        largest: the largest parameter.
    """

    parameters: Floats
    resident: Floats
    stash: Floats
    working: Floats
    split: Floats
    largest: Floats

    def peak(
        self,
        replicas: Ints | int,
        versions: Ints | int,
        in_flight: Ints | int,
        late: Ints | int = 0,
        lag: Ints | int = 0,
    ) -> Floats:
        """Return the peak of a rank that holds one stage.

        Args:
            in_flight: the most microbatches that it stashes, one of which is in its backward.
            late: those that are then between the halves of theirs.
            lag: the most that are when another one's backward begins; as many fewer are stashed then.
        """
        held = in_flight * self.stash + late * self.split + self.working
        if np.any(self.split):
            later = (in_flight + late - lag) * self.stash + lag * self.split
            held = np.maximum(held, later + np.maximum(self.working, self.split - self.stash))
        peak: Floats = self.resident + _reduction_bytes(self.parameters, self.largest, replicas)
        return peak + (versions - 1) * self.parameters + held


def stage_memory(
    *,
    parameters: Floats,
    inside: Floats,
    received: Floats,
    sent: Floats,
    kept: Floats,
    state_factor: float,
    copied_factor: float,
    recompute: NDArray[np.bool_] | bool,
    split: Floats | float = 0.0,
    zero: Ints | int = 0,
    scatters: NDArray[np.bool_] | bool = False,
    replicas: Ints | int = 1,
    workspace: Floats | float = 0.0,
    largest: Floats | float = 0.0,
    own: Floats | float = 0.0,
) -> StageMemory:
    """Return the memory of stages; all arrays, of bytes, broadcast against each other.

    A stage sends and receives over both cuts. Its messages take, besides the inputs that are stashed, both
    gradients as they are computed with, both packed tensors that are sent, and `LOOK_AHEAD` receives. Further
    slots of GPUs that read each other's memory (`comm.mailbox`) are not counted.

    Args:
        inside: activations and output of a microbatch.
        received, sent: activations of a microbatch over the cuts before and behind; 0 where there is none.
        kept: frozen weights and inputs for deferred products (`LayerProfile.always`), and messages with
            gradients of shared parameters, one sent and one received for each other group of ranks.
        split: of a microbatch between the halves of a split backward.
        zero: what replicas shard (`Plan.zero_of`).
        scatters: they reduce by reduce-scatters, whose sums are new memory: a share of what is reduced.
        workspace: what passes have for a moment, beyond the stash (`workspace_bytes`).
        largest: the largest parameter.
        own: parameters that no other replica has, whose update nobody shards.
    """
    updating, adding = (np.where(np.greater_equal(zero, least), replicas, 1) for least in (1, 2))
    whole = np.minimum(parameters, IN_FLIGHT_BUCKETS * np.maximum(largest, BUCKET_BYTES))
    reduced = np.where(np.equal(zero, 2), whole, parameters - own)
    gradients = parameters / adding + whole * np.equal(zero, 2)
    gradients = gradients + reduced / updating * (np.asarray(scatters) & np.greater(zero, 0))
    messages = 2 * (received + sent) + LOOK_AHEAD * np.maximum(received, sent)
    return StageMemory(
        parameters,
        np.rint(
            parameters * (1 + copied_factor + state_factor / updating)
            + own * state_factor * (1 - 1 / updating)
            + gradients
        )
        + kept
        + messages,
        np.where(recompute, received, received + inside),
        np.where(recompute, inside, 0.0) + workspace,
        np.asarray(split, dtype=np.float64),
        np.asarray(largest, dtype=np.float64),
    )


def _reduction_bytes(parameters: Floats, largest: Floats, replicas: Ints | int) -> Floats:
    """Return what an all-reduce takes: Horovod's buffer, and MPI's room for what arrives.

    A parameter larger than the buffer is reduced by itself. MPI has room for all of it between two ranks, and
    in a ring of m for two parts of m.
    """
    most = np.maximum(largest, np.minimum(parameters, FUSION_BYTES))
    room = np.rint(2 * most / np.maximum(replicas, 2))
    return (np.minimum(parameters, FUSION_BYTES) + room) * (np.asarray(replicas) > 1)


def workspace_bytes(layers: Sequence[LayerProfile], schedule: str, num_microbatches: int) -> int:
    """Return the most bytes that a stage has for a moment in an update, beyond its stash.

    In a layer's backward what the later layers had kept is free already.
    """
    most = freed = 0
    for layer in reversed(layers):
        most = max(most, layer.workspace(schedule, num_microbatches) - freed)
        freed += layer.activation_bytes
    return most


def peak_memory_bytes(profile: ModelProfile, plan: Plan) -> tuple[int, ...]:
    """Return the peak of each rank of the plan, in bytes, in stage order."""
    peaks = group_peaks(profile, plan)
    return tuple(peak for group, peak in enumerate(peaks) for _ in plan.stages[group].ranks)


def group_peaks(profile: ModelProfile, plan: Plan) -> list[int]:
    """Return the peak of each group of ranks, in bytes; ranks that hold one stage are its group."""
    if plan.traits.interleaves:
        return [_interleaved_peak(profile, plan, group) for group in range(plan.num_groups)]
    counts = versions_per_stage(plan), *_most_held(plan)
    stages = _stages(profile, plan, range(plan.num_stages))
    return list(map(int, stages.peak(np.array(plan.replicas), *map(np.array, counts)).tolist()))


def _stages(profile: ModelProfile, plan: Plan, numbers: Sequence[int]) -> StageMemory:
    """Return the memory of these stages of a plan, shape (stages,)."""
    rows = []
    exchanged = exchanged_bytes(profile, plan) + [{}] * (plan.num_stages - plan.num_groups)  # once a rank
    for s in numbers:
        stage = plan.stages[s]
        layers = stage_layers(profile, plan, s)
        zero = plan.zero_of(s)
        shares = plan.hands_over(s - 1) and not plan.recomputes(s - 1)  # its input: the output kept there
        rounds = 1 if zero == 2 else per_update(plan.schedule, plan.num_microbatches, stage.replicas)
        rows.append(
            (
                sum(counted_bytes(profile, plan, s)),
                sum(layer.activation_bytes for layer in layers) + layers[-1].output_bytes,
                profile.layers[stage.start - 1].output_bytes if stage.start and not shares else 0,
                layers[-1].output_bytes if plan.sends(s) else 0,
                sum(layer.always(plan.schedule, rounds) for layer in layers) + 2 * sum(exchanged[s].values()),
                _split_bytes(layers) if plan.traits.splits_backward else math.nan,
                zero,
                plan.scatters(s),
                stage.replicas,
                workspace_bytes(layers, plan.schedule, rounds),
                max(layer.largest_parameter_bytes for layer in layers),
                sum(layer.own_bytes for layer in layers),
            )
        )
    parameters, inside, received, sent, kept, split, *others = np.array(rows, dtype=np.float64).T
    zero, scatters, replicas, workspace, largest, own = others
    return stage_memory(
        parameters=parameters,
        inside=inside,
        received=received,
        sent=sent,
        kept=kept,
        state_factor=profile.state_factor,
        copied_factor=profile.copied_factor,
        recompute=np.array([plan.recomputes(s) for s in numbers]),
        split=np.where(np.isnan(split), received + inside, split),
        zero=zero.astype(np.intp),
        scatters=scatters > 0,
        replicas=replicas.astype(np.intp),
        workspace=workspace,
        largest=largest,
        own=own,
    )


def _split_bytes(layers: Sequence[LayerProfile]) -> float:
    """Return the bytes that a microbatch keeps between the halves of its backward; NaN where not known."""
    return sum(math.nan if layer.split_bytes is None else layer.split_bytes for layer in layers)


def _interleaved_peak(profile: ModelProfile, plan: Plan, group: int) -> int:
    stages = _stages(profile, plan, plan.held_stages(Place(group, 0)))
    counts, halves, begun = zip(*interleaved_stash(plan, group, plan.num_microbatches), strict=True)
    working = np.append(stages.working, 0.0)[[plan.chunks if chunk is None else chunk for chunk in begun]]
    most = (np.array(counts) @ stages.stash + np.array(halves) @ stages.split + working).max()
    return int(_resident(stages, plan.replicas[group]) + most)


def _resident(stages: StageMemory, replicas: int) -> float:
    """Return the bytes that a rank with these stages always holds."""
    parameters, largest = np.asarray(stages.parameters.sum()), np.asarray(stages.largest.max())
    reduction = _reduction_bytes(parameters, largest, replicas)
    return float(stages.resident.sum() + reduction)


def _most_held(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    """Return `in_flight`, `late` and `lag` of `StageMemory.peak` for each stage."""
    held = until_backward(plan, plan.num_microbatches)
    if not plan.traits.splits_backward:
        return list(held), [0] * len(held), [0] * len(held)
    most = [ceil_div(plan.num_microbatches, replicas) for replicas in plan.replicas]
    lags = weight_lags(plan, held)
    late = [min(lag, count - here) for lag, count, here in zip(lags, most, held, strict=True)]
    return list(held), late, [min(lag, count - 1) for lag, count in zip(lags, most, strict=True)]


def versions_per_stage(plan: Plan) -> tuple[int, ...]:
    """Return the most versions of its weights that each stage holds at a time.

    A version is held from its update until the last microbatch that uses it has had its backward. The newest
    is always held.
    """
    if not plan.is_asynchronous:
        return (1,) * plan.num_stages
    held = until_backward(plan, 1)
    if not plan.vertical_sync:
        return tuple(plan.traits.num_versions(each, plan.predicts_weights) for each in held)
    return tuple(_synced_versions(plan, s, held) for s in range(plan.num_stages))


def _synced_versions(plan: Plan, stage: int, held: Sequence[int]) -> int:
    """Count a stage's versions under vertical sync, while minibatches of at least one round pass."""
    first, replicas = plan.replicas[0], plan.replicas[stage]
    if first == replicas:
        return held[0]
    round_length = math.lcm(first, replicas)
    in_flight = held[0] * first
    if round_length > MAX_ROUND:
        return 2 + max(0, in_flight - 2) // replicas  # as if every version in between were in use
    count = 2 * (in_flight + held[stage] * replicas + round_length)
    asks = versions(plan, stage)
    return max(_most_versions(range(r, count, replicas), asks) for r in range(replicas))


def _most_versions(minibatches: range, asks: Callable[[int], int]) -> int:
    """Return the most versions that a replica holds during these minibatches, with an update after each."""
    held = Versions(minibatches, asks)
    most = held.num_versions
    for m in minibatches:
        held.returned(m)
        held.update()
        most = max(most, held.num_versions)
    return most


class Versions:
    """The versions of a stage's weights that a replica holds, as its minibatches come and go.

    Args:
        asks: the number of a microbatch's weights.
        predicts: the weights of microbatches in flight are predicted, and none of them the newest.
    """

    def __init__(
        self, microbatches: Iterable[int], asks: Callable[[int], int], predicts: bool = False
    ) -> None:
        self._asks, self._predicts, self._predicted = asks, predicts, set[int]()
        self._wanted = Counter(map(asks, microbatches))  # version: microbatches whose backward is to come
        self._newest = self._old = 0

    @property
    def num_versions(self) -> int:
        """The number of versions: those in use, and the newest."""
        return 1 + self._old + len(self._predicted)

    def begun(self, microbatch: int) -> None:
        """Note that a microbatch has its forward."""
        if self._predicts:
            self._predicted.add(self._asks(microbatch))

    def returned(self, microbatch: int) -> None:
        """Note that a microbatch has had its backward."""
        version = self._asks(microbatch)
        self._wanted[version] -= 1
        if not self._wanted[version]:
            self._predicted.discard(version)
        self._old -= not self._wanted[version] and version < self._newest

    def update(self) -> None:
        """Note a new version."""
        self._old += self._wanted[self._newest] > 0
        self._newest += 1


def curves(profile: ModelProfile, plan: Plan, timeline: Timeline) -> dict[int, Curve]:
    """Return the bytes that each rank holds over time, in stage order; never more than `peak_memory_bytes`.

    A microbatch's stash exists from the start of its forward to the end of its backward. With recomputation
    the backward adds the recomputed activations. What is left after the inputs' half of a split backward is
    there until the end of the weights' half. Under an asynchronous schedule an
    update makes a new version where a microbatch still uses the one before, and a version ends with the last
    microbatch that uses it.
    """
    return {
        rank: tuple(_steps(profile, plan, group, timeline.events[rank]))
        for group, stage in enumerate(plan.stages[: plan.num_groups])
        for rank in stage.ranks
        if rank in timeline.events
    }


def _steps(
    profile: ModelProfile, plan: Plan, group: int, events: tuple[TimedEvent, ...]
) -> Iterator[tuple[float, int]]:
    stages = _stages(profile, plan, plan.held_stages(Place(group, 0)))
    resident = int(_resident(stages, plan.replicas[group]))
    parameters = int(stages.parameters[0])
    stash_of, working_of, split_of = (
        each.astype(int).tolist() for each in (stages.stash, stages.working, stages.split)
    )
    begun = [a + b for a, b in zip(stash_of, working_of, strict=True)]
    ended = {  # bytes that are freed
        Backward: begun,
        BackwardInput: [a - b for a, b in zip(begun, split_of, strict=True)],
        BackwardWeight: split_of,
    }
    kept: Versions | None = None
    if plan.is_asynchronous:
        forwards = [event.instruction for event in events if isinstance(event.instruction, Forward)]
        predicts = plan.predicts_weights and delay_of(plan, group) > 0
        numbers = weights_numbers(plan, group)
        kept = Versions([forward.microbatch for forward in forwards], numbers, predicts)
    stash = 0

    def held() -> int:
        return resident + stash + ((kept.num_versions - 1) * parameters if kept else 0)

    yield 0.0, resident
    for instruction, start, end in events:
        match instruction:
            case Forward(microbatch, chunk):
                stash += stash_of[chunk]
                if kept:
                    kept.begun(microbatch)
                yield start, held()
            case Backward() | BackwardInput() if working_of[instruction.chunk]:
                stash += working_of[instruction.chunk]
                yield start, held()
            case Step() if kept:
                kept.update()
                yield start, held()
        if isinstance(instruction, Backward | BackwardInput | BackwardWeight):
            stash -= ended[type(instruction)][instruction.chunk]
            if kept:
                kept.returned(instruction.microbatch)
            yield end, held()
