"""Schedules: the order in which one replica of a stage visits its microbatches.

Pure: stages, replicas and microbatches are integers here; tensors and ranks are not known.
Every schedule runs Forward(m) before Backward(m), once each, for each microbatch of the replica, and
ends in a flush: all-reduce, step. Sources: GPipe (Huang et al. 2019, section 2.3); 1F1B and its round
robin over replicas (PipeDream, SOSP 2019, sections 3.2 and 3.3); 1F1B with a flush (PipeDream-2BW,
ICML 2021, section 2.1).
"""

from collections.abc import Iterator, Sequence

from hybridpipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Program,
    Step,
    add_communication,
)
from hybridpipe.planning.plan import Place, Plan


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
    return min(1 + ceil_div(behind, replicas), microbatches)


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
    warm_up = max(in_flight - 1, 0)
    yield from map(Forward, microbatches[:warm_up])
    for ahead, m in zip(microbatches[warm_up:], microbatches, strict=False):
        yield from (Forward(ahead), Backward(m))
    yield from map(Backward, microbatches[len(microbatches) - warm_up :])
    yield from (AllReduce(), Step())


def compute_program(plan: Plan, place: Place, num_microbatches: int) -> Iterator[Instruction]:
    """What the rank at `place` computes for a minibatch of `num_microbatches`, without communication."""
    mine = plan.microbatches_of(place, num_microbatches)
    if plan.schedule == "gpipe":
        return gpipe(mine)
    return one_f_one_b(mine, min(in_flight_per_stage(plan, num_microbatches)[place.stage], len(mine)))


def programs(plan: Plan, num_microbatches: int | None = None) -> dict[int, Program]:
    """One program for each rank of the plan, sends and receives included.

    Args:
        num_microbatches: of this minibatch; defaults to those of a full one. A short last minibatch
            has fewer, and a replica that gets none still takes part in the all-reduce.
    """
    count = plan.num_microbatches if num_microbatches is None else num_microbatches
    return {rank: _program(plan, rank, count) for rank in plan.ranks}


def _program(plan: Plan, rank: int, num_microbatches: int) -> Program:
    place = plan.place(rank)
    assert place is not None
    computing = compute_program(plan, place, num_microbatches)
    return tuple(add_communication(computing, place.stage, plan.num_stages))


def forward_programs(plan: Plan, num_microbatches: int) -> dict[int, Program]:
    """Programs of an evaluation: forwards only, over the same routes."""
    return {
        rank: tuple(
            add_communication(
                map(Forward, plan.microbatches_of(place, num_microbatches)), place.stage, plan.num_stages
            )
        )
        for rank in plan.ranks
        if (place := plan.place(rank)) is not None
    }
