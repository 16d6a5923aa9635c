"""Schedules: the order in which one rank visits its microbatches, and the weights that each of them uses.

Pure: stages, replicas and microbatches are integers here; tensors and ranks are not known. Invariant: every
schedule runs each microbatch's forward before its backward, once each. A synchronous one ends in a flush; an
asynchronous one updates as it goes. Sources: GPipe (Huang et al. 2019, section 2.3); 1F1B and its round robin
over replicas (PipeDream, SOSP 2019, sections 3.2 and 3.3); 1F1B with a flush, and double-buffered weights
(PipeDream-2BW, ICML 2021, sections 2.1 and 3.1); interleaved 1F1B (Narayanan et al., SC 2021, section 2.2.2);
ZB-H1, ZB-H2 and what lies between (Qi et al., ICLR 2024, section 2).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, zip_longest
from typing import NamedTuple

from hybridpipe.planning.plan import PassTimes, Place, Plan
from hybridpipe.planning.schedules.instructions import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Program,
    Step,
    add_communication,
    add_joins,
    add_sharding,
)
from hybridpipe.planning.schedules.registry import TRAITS
from hybridpipe.planning.schedules.v_shape import BUILDING_BLOCKS, v_passes

UPDATE: Program = (AllReduce(), Step())
UNLIMITED = 2**62
MOST_FORWARDS = 2**15  # of all groups that are counted where an order follows times: they take a second


class Stash(NamedTuple):
    """The microbatches that a rank holds at some time.

    Args:
        counts: by chunk, those whose backward, or the inputs' half of it, is to come or under way.
        halves: by chunk, those between the halves of their backward.
        backward: the chunk whose backward it then runs, if any.
    """

    counts: tuple[int, ...]
    halves: tuple[int, ...]
    backward: int | None


def ceil_div(a: int, b: int) -> int:
    """Return `a / b` rounded up."""
    return -(-a // b)


def round_div(a: int, b: int) -> int:
    """Return `a / b` rounded to the nearest integer, half up."""
    return (2 * a + b) // (2 * b)


def per_update(schedule: str, num_microbatches: int, replicas: int) -> int:
    """Return the most microbatches that one replica contributes to an update of its stage.

    Args:
        num_microbatches: of a minibatch.
    """
    return 1 if TRAITS[schedule].whole_minibatch else ceil_div(num_microbatches, replicas)


def in_flight(schedule: str, num_microbatches: int, replicas: int, behind: int, per_minibatch: int) -> int:
    """Return the most microbatches that one replica of a stage stashes.

    Without a warm-up these are all of its microbatches. Otherwise it stashes the one that it computes, and
    its share of those that the next stage holds, so that it never waits for a gradient while it could feed
    that stage. With one replica a stage this is the number of stages from here to the end. PipeDream's NOAM,
    which divides ranks by replicas, agrees there and for two stages, but starves a replicated stage between
    others: 1-4-1 took 1.9 times GPipe's time.

    Args:
        num_microbatches: of the minibatch or, under an asynchronous schedule, of the stream.
        replicas: of this stage.
        behind: microbatches that all replicas of the next stage hold together; 0 for the last stage.
        per_minibatch: microbatches of a minibatch.
    """
    traits = TRAITS[schedule]
    if not traits.has_warm_up:
        return ceil_div(num_microbatches, replicas)
    held = 1 + ceil_div(behind, replicas)
    if traits.versions == "two":  # at most two minibatches are in flight
        held = min(held, ceil_div(2 * per_minibatch, replicas))
    return held if traits.is_asynchronous else min(held, ceil_div(num_microbatches, replicas))


def in_flight_per_stage(plan: Plan, num_microbatches: int) -> tuple[int, ...]:
    """Return the most microbatches that a replica of each stage stashes.

    Where backwards are split, a microbatch is stashed until the weights' half.
    """
    if plan.traits.takes_pass_times:
        return (min(plan.room, ceil_div(num_microbatches, plan.replicas[0])),) * plan.num_stages
    if plan.traits.interleaves:
        return _interleaved_in_flight(plan, num_microbatches)
    held = until_backward(plan, num_microbatches)
    if plan.traits.splits_backward:
        each = zip(held, weight_lags(plan, held), plan.replicas, strict=True)
        return tuple(min(here + lag, ceil_div(num_microbatches, replicas)) for here, lag, replicas in each)
    return held


def until_backward(plan: Plan, num_microbatches: int) -> tuple[int, ...]:
    """Return the most microbatches of each stage's replica 0 that wait for their backward.

    These are the schedule's (`in_flight`), fewer within `max_in_flight`, or as the plan's `in_flight` says,
    for ranks that hold one stage. A split backward counts with its inputs' half.

    Args:
        num_microbatches: of the minibatch or, under an asynchronous schedule, of the stream.
    """
    if plan.in_flight is not None:
        counts = _by_schedule(plan, UNLIMITED)
        more, most = plan.in_flight - 1, max(max(counts) - 1, 1)
        wanted = _let_pass(plan, [1 + round_div((held - 1) * more, most) for held in counts])
        each = zip(wanted, plan.replicas, strict=True)
        return tuple(min(held, ceil_div(num_microbatches, replicas)) for held, replicas in each)
    counts, limit = _by_schedule(plan, num_microbatches), plan.max_in_flight
    if limit is None or limit >= max(counts):
        return counts
    # In proportion, so that none waits longer than the others. With the limit on the first stages alone, the
    # others would run ahead and then wait: 4 in flight in 8 equal stages took 2.5 times as long.
    return tuple(_let_pass(plan, [ceil_div(held * limit, max(counts)) for held in counts]))


def weight_lags(plan: Plan, held: Sequence[int]) -> tuple[int, ...]:
    """Return the microbatches by which the weights' half follows the inputs' half in each stage.

    By default no stage stashes more than the one that has most in flight. `Plan.weight_lag` is that of a
    stage with fewest in flight; the others lag in proportion.

    Args:
        held: `until_backward`.
    """
    if plan.weight_lag is None:
        return tuple(max(held) - here for here in held)
    counts = _by_schedule(plan, UNLIMITED)
    most, between = max(counts), max(max(counts) - min(counts), 1)
    return tuple(round_div((most - here) * plan.weight_lag, between) for here in counts)


def _by_schedule(plan: Plan, num_microbatches: int) -> tuple[int, ...]:
    """Return `in_flight` of each stage's replica 0."""
    counts: list[int] = []
    behind = 0
    for replicas in reversed(plan.replicas):
        counts.append(in_flight(plan.schedule, num_microbatches, replicas, behind, plan.num_microbatches))
        behind = replicas * counts[-1]
    return tuple(reversed(counts))


def _let_pass(plan: Plan, wanted: Sequence[int]) -> Iterator[int]:
    """Yield the counts that are wanted in flight, reduced to those that the stages before let pass.

    With h in flight on each of r replicas, a stage forwards microbatch m before it has the gradient of
    m - (h - 1) r, and after that of m - h r. It must therefore hold no more than every stage before it lets
    pass, or nothing would advance. Where g neighbours end their backwards together, a gradient counts only
    with up to g - 1 later ones. Where k run every pass together, so does a forward; the stages before must
    then let as many pass, whatever is wanted.
    """
    room = UNLIMITED
    for s, (count, least, replicas) in enumerate(zip(wanted, _least(plan), plan.replicas, strict=True)):
        held = max(least, min(count, 1 + (room + 1 - plan.together(s)) // replicas))
        room = min(room, held * replicas - _ending_together(plan, s))
        yield held


def _least(plan: Plan) -> Sequence[int]:
    """Return the fewest in flight on each stage's replicas with which the stages behind can advance."""
    counts: list[int] = []
    room = 0  # microbatches that must pass, beside the one that a stage behind forwards
    for s, replicas in reversed([*enumerate(plan.replicas)]):
        counts.append(ceil_div(room + _ending_together(plan, s), replicas))
        room = max(room, (counts[-1] - 1) * replicas + plan.together(s) - 1)
    return counts[::-1]


def _ending_together(plan: Plan, stage: int) -> int:
    """Return how many neighbouring replicas of a stage complete their backwards together."""
    whole = plan.traits.whole_minibatch or plan.zero_of(stage) == 2
    return plan.replicas[stage] if whole else plan.together(stage)


def gpipe(microbatches: Sequence[int]) -> Iterator[Instruction]:
    """Yield all forwards, then all backwards in the same order, then the flush.

    The paper draws the backwards in reverse. In arrival order no replica waits for another's, and with a
    chain of stages both take the same time.
    """
    yield from map(Forward, microbatches)
    yield from map(Backward, microbatches)
    yield from UPDATE


def one_f_one_b(microbatches: Sequence[int], in_flight: int) -> Iterator[Instruction]:
    """Yield `in_flight - 1` forwards, then one forward and one backward in turn, and the flush."""
    yield from _alternate(microbatches, in_flight)
    yield from UPDATE


def zero_bubble(microbatches: Sequence[int], in_flight: int, lag: int) -> Iterator[Instruction]:
    """Yield 1F1B with split backwards, whose weights' half fills the bubble.

    ZB-H1 has 1F1B's microbatches in flight, ZB-H2 nearly twice as many; both lag as `weight_lags` does by
    default.

    Args:
        lag: microbatches by which the weights' half follows the inputs' half.
    """
    late: deque[int] = deque()
    for instruction in _alternate(microbatches, in_flight):
        if not isinstance(instruction, Backward):
            yield instruction
            continue
        yield BackwardInput(instruction.microbatch)
        late.append(instruction.microbatch)
        if len(late) > lag:
            yield BackwardWeight(late.popleft())
    yield from map(BackwardWeight, late)
    yield from UPDATE


def interleaved_1f1b(
    microbatches: Sequence[int], group: int, num_groups: int, chunks: int
) -> Iterator[Instruction]:
    """Yield 1F1B over `chunks` stages on each rank; microbatches take turns in groups of `num_groups`.

    The paper requires a multiple of `num_groups` microbatches. The remainder goes through the stages last,
    all forwards first. It is small enough to stash no more than the rest.

    Args:
        group: this rank's, 0 for the one that holds the first stage.
    """
    whole = len(microbatches) // num_groups * num_groups
    for part in (microbatches[:whole], microbatches[whole:]):
        forwards = list(_turns(part, num_groups, range(chunks)))
        backwards = list(_turns(part, num_groups, range(chunks)[::-1]))
        warm_up = 2 * (num_groups - group - 1) + (chunks - 1) * num_groups
        if len(part) < num_groups:
            warm_up = len(forwards)
        yield from (Forward(*each) for each in forwards[:warm_up])
        for ahead, back in zip_longest(forwards[warm_up:], backwards):
            if ahead is not None:
                yield Forward(*ahead)
            yield Backward(*back)
    yield from UPDATE


def _turns(microbatches: Sequence[int], size: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (microbatch, chunk): `size` microbatches through one chunk, then through the next, and so on."""
    for start in range(0, len(microbatches), size):
        for chunk in chunks:
            for m in microbatches[start : start + size]:
                yield m, chunk


def _interleaved_in_flight(plan: Plan, num_microbatches: int) -> tuple[int, ...]:
    """Return the most microbatches whose forward, but not backward, each stage has run."""
    held = [interleaved_stash(plan, group, num_microbatches) for group in range(plan.num_groups)]
    return tuple(
        max(each.counts[plan.chunk_of(s)] for each in held[plan.group_of(s)]) for s in range(plan.num_stages)
    )


def interleaved_stash(plan: Plan, group: int, num_microbatches: int) -> frozenset[Stash]:
    """Return every stash that a rank of a group has at some time.

    A replica with one microbatch less than the first may stash more of some chunk.
    """
    most, least = ceil_div(num_microbatches, plan.replicas[0]), num_microbatches // plan.replicas[0]
    p, chunks = plan.num_groups, plan.chunks
    stash = partial(_stash, plan.schedule, plan.room, plan.pass_times, group, p, chunks)
    return frozenset(chain.from_iterable(stash(count) for count in {most, least}))


@lru_cache(maxsize=4096)
def _stash(
    schedule: str,
    room: int,
    times: tuple[PassTimes, ...] | None,
    group: int,
    num_groups: int,
    chunks: int,
    count: int,
) -> frozenset[Stash]:
    passes: Iterable[Instruction]
    if TRAITS[schedule].takes_pass_times:
        count = min(count, MOST_FORWARDS // (chunks * num_groups))
        passes = v_passes(schedule, num_groups, count, room, times)[group]
    else:
        count = min(count, 4 * num_groups + count % num_groups)  # then the pipeline repeats itself
        passes = interleaved_1f1b(range(count), group, num_groups, chunks)
    counts, halves = [0] * chunks, [0] * chunks
    seen: set[Stash] = set()
    for instruction in passes:
        match instruction:
            case Forward(chunk=chunk):
                counts[chunk] += 1
                seen.add(Stash(tuple(counts), tuple(halves), None))
            case Backward(chunk=chunk) | BackwardInput(chunk=chunk):
                seen.add(Stash(tuple(counts), tuple(halves), chunk))
                counts[chunk] -= 1
                if isinstance(instruction, BackwardInput):
                    halves[chunk] += 1
                    seen.add(Stash(tuple(counts), tuple(halves), None))
            case BackwardWeight(chunk=chunk):
                halves[chunk] -= 1
    return frozenset(seen)


def pipedream(minibatches: Sequence[int], in_flight: int, total: int, replicas: int) -> Iterator[Instruction]:
    """Yield 1F1B without a flush: an update after each backward, with the mean over the stage's replicas.

    In a round each replica handles one minibatch. A replica without one in the last round still joins the
    all-reduce.

    Args:
        total: number of minibatches of the stream, those of the other replicas included.
    """
    reduce: Program = UPDATE[:1] if replicas > 1 else ()
    updates = ((*reduce, Step(min(replicas, total - start))) for start in range(0, total, replicas))
    for instruction in _alternate(minibatches, in_flight):
        yield instruction
        if isinstance(instruction, Backward):
            yield from next(updates)
    for update in updates:
        yield from update


def two_buffered(
    microbatches: Sequence[int],
    in_flight: int,
    per_minibatch: int,
    num_minibatches: int,
    room: int = UNLIMITED,
) -> Iterator[Instruction]:
    """Yield 1F1B without a flush: an update after each minibatch, first used by the next but one.

    A minibatch's forwards wait for that update, so two versions of the weights are enough.

    Args:
        room: microbatches that the stages before let pass ahead of a backward. A forward further ahead of the
            minibatch to be updated comes after that update.
    """
    ahead, held = deque(microbatches), deque[int]()
    updates = 0
    while updates < num_minibatches:
        end = (updates + 1) * per_minibatch
        if ahead and len(held) < in_flight and ahead[0] < end + min(per_minibatch, room):
            held.append(ahead.popleft())
            yield Forward(held[-1])
        elif held and held[0] < end:
            yield Backward(held.popleft())
        else:
            yield from UPDATE
            updates += 1


def _alternate(microbatches: Sequence[int], in_flight: int) -> Iterator[Instruction]:
    warm_up = min(max(in_flight - 1, 0), len(microbatches))
    yield from map(Forward, microbatches[:warm_up])
    for ahead, m in zip_longest(microbatches[warm_up:], microbatches):
        if ahead is not None:
            yield Forward(ahead)
        yield Backward(m)


class _GeneratorInput(NamedTuple):
    """The input of a generator.

    Args:
        total: microbatches of the minibatch or, under an asynchronous schedule, of the whole stream.
        in_flight: of each stage; empty where ranks hold several.
    """

    plan: Plan
    place: Place
    total: int
    in_flight: tuple[int, ...]

    @property
    def microbatches(self) -> range:
        """The microbatches that this rank computes, and those in whose place it joins other replicas."""
        return self.plan.microbatches_of(self.place, _with_joins(self.plan, self.place, self.total))

    @property
    def held(self) -> int:
        """The most microbatches of this rank in flight."""
        return self.in_flight[self.place.stage]


def _interleaved_of(rank: _GeneratorInput) -> Iterator[Instruction]:
    return interleaved_1f1b(rank.microbatches, rank.place.stage, rank.plan.num_groups, rank.plan.chunks)


def _v_shape_of(rank: _GeneratorInput) -> Iterator[Instruction]:
    plan, mine = rank.plan, rank.microbatches
    orders = v_passes(plan.schedule, plan.num_groups, len(mine), plan.room, plan.pass_times)
    for each in orders[rank.place.stage]:
        yield type(each)(mine[each.microbatch], each.chunk)
    yield from UPDATE


def _zero_bubble_of(rank: _GeneratorInput) -> Iterator[Instruction]:
    return zero_bubble(rank.microbatches, rank.held, weight_lags(rank.plan, rank.in_flight)[rank.place.stage])


def _pipedream_of(rank: _GeneratorInput) -> Iterator[Instruction]:
    replicas = rank.plan.replicas[rank.place.stage]
    return pipedream(rank.microbatches, rank.held, rank.total, replicas)


def _two_buffered_of(rank: _GeneratorInput) -> Iterator[Instruction]:
    plan = rank.plan
    counts = zip(rank.in_flight, plan.replicas[: rank.place.stage], strict=False)
    room = min((held * replicas for held, replicas in counts), default=UNLIMITED)
    size = plan.num_microbatches
    return two_buffered(rank.microbatches, rank.held, size, ceil_div(rank.total, size), room)


GENERATORS: dict[str, Callable[[_GeneratorInput], Iterator[Instruction]]] = {
    "1f1b": lambda rank: one_f_one_b(rank.microbatches, rank.held),
    "gpipe": lambda rank: gpipe(rank.microbatches),
    "zero-bubble": _zero_bubble_of,
    "interleaved-1f1b": _interleaved_of,
    **dict.fromkeys(BUILDING_BLOCKS, _v_shape_of),
    "pipedream": _pipedream_of,
    "pipedream-2bw": _two_buffered_of,
}


def _with_joins(plan: Plan, place: Place, count: int) -> int:
    """Return the microbatches that fill the last pass of replicas that run together."""
    together = plan.together(place.stage)
    return ceil_div(count, together) * together


def _computing(plan: Plan, count: int) -> Callable[[Place], Iterator[Instruction]]:
    """Return a function from a place to the computing instructions of its rank."""
    in_flight = () if plan.traits.interleaves else until_backward(plan, count)

    def of_rank(place: Place) -> Iterator[Instruction]:
        computing = GENERATORS[plan.schedule](_GeneratorInput(plan, place, count, in_flight))
        if plan.together(place.stage) > 1:
            computing = add_joins(computing, count)
        zero, rounds = plan.zero_of(place.stage), ceil_div(count, plan.replicas[place.stage])
        return add_sharding(computing, zero, plan.scatters(place.stage), rounds) if zero else computing

    return of_rank


def version_of(plan: Plan, stage: int, microbatch: int) -> int:
    """Return the version of the weights that a microbatch's forward and backward use.

    PipeDream uses the newest weights, which contain the rounds that came back before. Vertical sync uses the
    newest without a minibatch that the input stage's weights lack. 2BW is one update behind the newest.

    Raises:
        ValueError: the schedule has one version of the weights.
    """
    return versions(plan, stage)(microbatch)


def versions(plan: Plan, stage: int) -> Callable[[int], int]:
    """Return `version_of` of one stage as a function of the microbatch."""
    if plan.traits.versions == "two":
        return lambda microbatch: max(0, microbatch // plan.num_microbatches - 1)
    if plan.traits.versions == "one":
        raise ValueError(f"{plan.schedule} has one version of the weights at a time")
    source = plan.version_stage(stage)
    held, replicas, here = until_backward(plan, 1)[source], plan.replicas[source], plan.replicas[stage]
    return lambda microbatch: max(0, microbatch // replicas + 1 - held) * replicas // here


def weights_numbers(plan: Plan, stage: int) -> Callable[[int], int]:
    """Return a function from a microbatch to the number of the weights that it uses in a stage.

    The number is that of the version or, where weights are predicted, of the update that its gradient goes
    into: the updates before it.
    """
    if not plan.predicts_weights:
        return versions(plan, stage)
    per_update = plan.replicas[stage] if plan.traits.whole_minibatch else plan.num_microbatches
    return lambda microbatch: microbatch // per_update


def delay_of(plan: Plan, stage: int) -> int:
    """Return the least delay of a stage's gradients in updates, in a full pipeline; 0 under a flush."""
    if not plan.is_asynchronous:
        return 0
    per_update = plan.replicas[stage] if plan.traits.whole_minibatch else plan.num_microbatches
    late = 2 * per_update * math.lcm(*plan.replicas) * max(in_flight_per_stage(plan, UNLIMITED))
    return late // per_update - version_of(plan, stage, late)


def overflows_late(plan: Plan) -> int:
    """Return the minibatches between one and the first whose loss scale depends on its overflow.

    They are the most that are in flight: once a stage begins minibatch b, the stages before and all replicas
    have updated with b minus this number, so that no rank waits for one that waits for it.
    """
    if not plan.is_asynchronous or plan.traits.versions == "two":
        return 1 + plan.is_asynchronous
    held = in_flight_per_stage(plan, UNLIMITED)
    return max(a * b for a, b in zip(held, plan.replicas, strict=True))


def losses_late(plan: Plan) -> int:
    """Return the most minibatches between a minibatch and the wait for its loss.

    The number covers the microbatches in flight and a round more, so that no two ranks wait for each other.
    """
    if not plan.is_asynchronous:
        return 1
    held = in_flight_per_stage(plan, plan.num_microbatches)
    return max(a * b for a, b in zip(held, plan.replicas, strict=True)) + 2 * max(plan.replicas)


def resume_points_every(plan: Plan) -> int:
    """Return the number of minibatches between two resume points of a stream; its end is one as well.

    A checkpoint holds every stage's weights after the same minibatches. Under a flush that is any minibatch;
    under PipeDream a stage updates once a round.
    """
    return math.lcm(*plan.replicas) if plan.traits.whole_minibatch else 1


def programs(plan: Plan, num_microbatches: int | None = None) -> dict[int, Program]:
    """Return one program for each rank of the plan, sends and receives included.

    Args:
        num_microbatches: of this minibatch; defaults to those of a full one. A short last minibatch has
            fewer, and a replica without any still joins the all-reduce. Under an asynchronous schedule these
            are the microbatches of all minibatches that run one after the other without a flush.
    """
    count = plan.num_microbatches if num_microbatches is None else num_microbatches
    computing = _computing(plan, count)
    return {rank: _communicating(plan, place, computing(place)) for rank, place in _places(plan)}


def program(plan: Plan, place: Place, num_microbatches: int) -> Program:
    """Return the program of one rank. An asynchronous one can be as long as an epoch."""
    return _communicating(plan, place, _computing(plan, num_microbatches)(place))


def forward_program(plan: Plan, place: Place, num_microbatches: int) -> Program:
    """Return the program of one rank in an evaluation: forwards only, over the same routes."""
    mine = plan.microbatches_of(place, _with_joins(plan, place, num_microbatches))
    turns = _turns(mine, plan.num_groups, range(plan.chunks))
    return _communicating(plan, place, add_joins((Forward(*each) for each in turns), num_microbatches))


def _places(plan: Plan) -> Iterator[tuple[int, Place]]:
    """Yield the ranks of the plan in stage order, with their places."""
    for s, stage in enumerate(plan.stages[: plan.num_groups]):
        for index, rank in enumerate(stage.ranks):
            yield rank, Place(s, *divmod(index, stage.tensor))


def _communicating(plan: Plan, place: Place, computing: Iterable[Instruction]) -> Program:
    held = plan.held_stages(place)
    before, behind = ([plan.sends(stage + way) for stage in held] for way in (-1, 0))
    return tuple(add_communication(computing, before, behind))
