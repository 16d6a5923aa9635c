"""Resume points: positions in a stream of minibatches where a later run can continue.

Pure, as schedules are. Nothing is drained for a resume point: after `done` minibatches, a multiple of
`resume_points_every`, each rank has updated with all of them and with no later one, and later ones are in
flight. The later run takes the same programs without the finished part. Microbatches that were in flight run
forward again, with the versions of the weights that they had. Invariant: every rank leaves out both ends of
the same messages and the same all-reduces, so the rest of a program cannot deadlock where the whole cannot.
"""

from collections import Counter
from typing import NamedTuple

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.generators import ceil_div, program, versions, weights_numbers
from hybridpipe.planning.schedules.instructions import AllGather, Instruction, Program, Reduction, Step


class ResumePoint(NamedTuple):
    """A stream of `total` minibatches, of which `done` are in the weights of every stage."""

    done: int
    total: int

    @property
    def is_inside(self) -> bool:
        """True if microbatches are in flight."""
        return 0 < self.done < self.total


def num_updates(plan: Plan, stage: int, point: ResumePoint) -> int:
    """Return the number of updates of a stage that the finished minibatches have made."""
    per_update = plan.replicas[stage] if plan.traits.whole_minibatch else 1
    assert point.done == point.total or point.done % per_update == 0, (
        f"{point} parts an update of {per_update}"
    )
    return ceil_div(point.done, per_update)


def resumed_program(plan: Plan, place: Place, num_microbatches: int, point: ResumePoint) -> Program:
    """Return a rank's program after a resume point.

    Args:
        num_microbatches: of the whole stream.
    """
    whole = program(plan, place, num_microbatches)
    if not point.done:
        return whole
    first = point.done * plan.num_microbatches  # only a stream's last minibatch may have fewer
    updates = num_updates(plan, place.stage, point)
    passed = Counter[type]()
    rest: list[Instruction] = []
    for instruction in whole:
        if isinstance(instruction, Reduction | Step | AllGather):
            passed[type(instruction)] += 1
            if passed[type(instruction)] > updates:
                rest.append(instruction)
        elif instruction.microbatch >= first:
            rest.append(instruction)
    return tuple(rest)


def first_microbatch(plan: Plan, place: Place, point: ResumePoint) -> int:
    """Return a replica's first microbatch after a resume point."""
    first = point.done * plan.num_microbatches
    return first + (place.replica - first) % plan.replicas[place.stage]


def versions_in_use(plan: Plan, place: Place, point: ResumePoint) -> list[int]:
    """Return the older weights that this replica's microbatches still need.

    They are numbered as in `weights_numbers`, by the stage's updates since the stream began.
    """
    if not plan.is_asynchronous or not point.is_inside:
        return []
    newest, version = num_updates(plan, place.stage, point), versions(plan, place.stage)
    number_of, first = weights_numbers(plan, place.stage), first_microbatch(plan, place, point)
    found: list[int] = []
    for microbatch in range(first, point.total * plan.num_microbatches, plan.replicas[place.stage]):
        if version(microbatch) >= newest:  # versions never decrease
            break
        number = number_of(microbatch)
        if number not in found[-1:]:
            found.append(number)
    return found
