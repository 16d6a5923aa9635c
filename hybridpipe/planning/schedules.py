"""Schedules: the order in which one replica of a stage visits its microbatches.

Pure: stages, replicas and microbatches are integers here; tensors and ranks are not known.
Every schedule runs Forward(m) before Backward(m), once each, for each microbatch of the replica. A
synchronous one ends in a flush: all-reduce, step; an asynchronous one updates after each backward. Sources:
GPipe (Huang et al. 2019, section 2.3); 1F1B and its round robin over replicas (PipeDream, SOSP 2019,
sections 3.2 and 3.3); 1F1B with a flush (PipeDream-2BW, ICML 2021, section 2.1).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from hybridpipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Program,
    Step,
    add_communication,
)
from hybridpipe.planning.plan import ASYNCHRONOUS, Place, Plan


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


def in_flight(schedule: str, microbatches: int, replicas: int, behind: int) -> int:
    """How many microbatches one replica holds at most: what its memory must stash.

    1F1B: one that it works on, and its part of what the stage behind holds, so that it never waits for a
    gradient while it could feed that stage. With one replica a stage that is the number of stages from here
    to the end; PipeDream's NOAM, ranks from here to the end over replicas, is the same there and for two
    stages, but starves a replicated stage between others (1-4-1 took 1.9 times GPipe's time). GPipe: all.

    Args:
        microbatches: of this replica, in the minibatch.
        replicas: of this stage.
        behind: what all replicas of the stage behind hold together; 0 for the last stage.
    """
    if schedule == "gpipe":
        return microbatches
    held = 1 + ceil_div(behind, replicas)
    return held if schedule in ASYNCHRONOUS else min(held, microbatches)


def in_flight_per_stage(plan: Plan, num_microbatches: int) -> tuple[int, ...]:
    """`in_flight` of each stage's replica 0, which has the most microbatches."""
    counts: list[int] = []
    behind = 0
    for replicas in reversed(plan.replicas):
        counts.append(in_flight(plan.schedule, ceil_div(num_microbatches, replicas), replicas, behind))
        behind = replicas * counts[-1]
    return tuple(reversed(counts))


def gpipe(microbatches: Sequence[int]) -> Iterator[Instruction]:
    """All forwards, then all backwards in the same order, then the flush.

    The paper draws the backwards in reverse; in arrival order no replica waits for another's, and
    with a chain of stages both take the same time.
    """
    yield from map(Forward, microbatches)
    yield from map(Backward, microbatches)
    yield from (AllReduce(), Step())


def one_f_one_b(microbatches: Sequence[int], in_flight: int) -> Iterator[Instruction]:
    """Warm-up of `in_flight - 1` forwards, then one forward, one backward, then backwards, then the flush."""
    yield from _alternate(microbatches, in_flight)
    yield from (AllReduce(), Step())


def pipedream(
    minibatches: Sequence[int], in_flight: int, num_rounds: int, replicas: int
) -> Iterator[Instruction]:
    """1F1B without a flush: an update after each backward, with the mean over the stage's replicas.

    In a round each replica handles one minibatch; one that has none in the last round still joins the
    all-reduce.
    """
    update: Program = (AllReduce(), Step()) if replicas > 1 else (Step(),)
    yield from _alternate(minibatches, in_flight, update)
    for _ in range(len(minibatches), num_rounds):
        yield from update


def _alternate(
    microbatches: Sequence[int], in_flight: int, after_each: Program = ()
) -> Iterator[Instruction]:
    warm_up = min(max(in_flight - 1, 0), len(microbatches))
    yield from map(Forward, microbatches[:warm_up])
    for ahead, m in zip_longest(microbatches[warm_up:], microbatches):
        if ahead is not None:
            yield Forward(ahead)
        yield Backward(m)
        yield from after_each


def _computing(plan: Plan, place: Place, count: int, in_flight: int) -> Iterator[Instruction]:
    mine, replicas = plan.microbatches_of(place, count), plan.replicas[place.stage]
    match plan.schedule:
        case "gpipe":
            return gpipe(mine)
        case "1f1b":
            return one_f_one_b(mine, in_flight)
        case "pipedream":
            return pipedream(mine, in_flight, ceil_div(count, replicas), replicas)
    raise AssertionError(plan.schedule)


def programs(plan: Plan, num_microbatches: int | None = None) -> dict[int, Program]:
    """One program for each rank of the plan, sends and receives included.

    Args:
        num_microbatches: of this minibatch; defaults to those of a full one. A short last minibatch
            has fewer, and a replica that gets none still takes part in the all-reduce. Under an asynchronous
            schedule, how many minibatches to run one after the other without a flush.
    """
    count = plan.num_microbatches if num_microbatches is None else num_microbatches
    stashes = in_flight_per_stage(plan, count)
    return {
        rank: _communicating(plan, place, _computing(plan, place, count, stashes[place.stage]))
        for rank, place in _places(plan)
    }


def forward_programs(plan: Plan, num_microbatches: int) -> dict[int, Program]:
    """Programs of an evaluation: forwards only, over the same routes."""
    return {
        rank: _communicating(plan, place, map(Forward, plan.microbatches_of(place, num_microbatches)))
        for rank, place in _places(plan)
    }


def _places(plan: Plan) -> Iterator[tuple[int, Place]]:
    """The ranks of the plan in stage order, and where they stand."""
    for s, stage in enumerate(plan.stages):
        for replica, rank in enumerate(stage.ranks):
            yield rank, Place(s, replica)


def _communicating(plan: Plan, place: Place, computing: Iterable[Instruction]) -> Program:
    return tuple(add_communication(computing, place.stage, plan.num_stages))
