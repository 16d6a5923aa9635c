"""Refine: the best of the simulated plans, and those that differ from them in one thing.

The estimate errs by about as much for a plan and for its neighbour. So a neighbour is expected to take its
estimate times a part of that error, and only those expected to be about as fast as the best are simulated.
Each is run as it fits (`variants`): with a cut or a rank, recomputation moves to where it is needed now. Of
plans whose ranks hold several stages only the recomputation changes.
Not known here: where the first plans come from. Invariant: every plan that is simulated fits into memory; at
most `MAX_EXPANDED` plans have their neighbours looked at, and `NUM_TRIED` neighbours of each are simulated.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.search.placement import renumbered
from hybridpipe.planning.search.problem import Problem

MAX_EXPANDED, NUM_TRIED = 8, 8
FAR = 1.15  # factor of the best plan's time; plans beyond it are not expanded, and not simulated to the end
WORTH_TRYING = 1.04  # factor of the best plan's time that a neighbour may be expected to take
NUM_IDLE, PROGRESS = 2, 1e-3  # plans in a row that bring less progress, after which it is enough


def refine(
    simulated: dict[Plan, float],
    problem: Problem,
    expect: Callable[[Plan], float],
    simulate: Callable[[Plan, float], float],
) -> None:
    """Simulate neighbours of the best plans.

    Args:
        simulated: seconds of plans that were simulated, to which those of neighbours are added.
        expect: returns the estimate of a plan.
        simulate: returns the seconds of a plan, or infinity where it takes longer than a limit.
    """
    expanded: set[Plan] = set()
    idle = 0
    while len(expanded) < MAX_EXPANDED and idle < NUM_IDLE:
        best = min(simulated.values())
        unseen = [plan for plan in simulated if plan not in expanded]
        here = min(unseen, key=lambda plan: simulated[plan], default=None)
        if here is None or simulated[here] > best * FAR:
            return
        expanded.add(here)
        error = math.sqrt(simulated[here] / (expect(here) or 1.0))
        near = run_otherwise(here, problem) if here.chunks > 1 else neighbours(here, problem)
        expected = {plan: error * expect(plan) for plan in near if plan not in simulated}
        for plan in sorted(expected, key=lambda plan: expected[plan])[:NUM_TRIED]:
            if expected[plan] > best * WORTH_TRYING:
                break
            simulated[plan] = simulate(plan, best * FAR)
        idle = 0 if min(simulated.values()) < best * (1 - PROGRESS) else idle + 1


@dataclass(frozen=True, slots=True)
class _Shape:
    """A plan's stages: edges between their layers, and the ranks of each."""

    edges: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    def with_groups(self, first: int, *groups: tuple[int, ...]) -> "_Shape":
        """Return the shape with other ranks for the stages from `first` on."""
        return replace(self, groups=self.groups[:first] + groups + self.groups[first + len(groups) :])


def neighbours(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """Yield the plans that fit and differ in one cut, one rank's stage, or one stage more or less."""
    layers, ranks = problem.profile.layers, range(problem.num_ranks)
    traffic = [0.0, *(float(layer.output_bytes + layer.returned_bytes) for layer in layers)]
    here = _Shape(
        (0, *(stage.stop for stage in plan.stages)),
        tuple(tuple(sorted(stage.ranks)) for stage in plan.stages),
    )
    idle = sorted(set(ranks).difference(plan.ranks))
    more = [] if plan.traits.takes_lags else idle  # such a plan says itself how many are in flight
    changes = _moved_cuts(here, traffic), _moved_ranks(here, idle), _merged(here), _split(here, more, traffic)
    for changed in changes:
        for shape in changed:
            placed = renumbered(problem.cluster, ranks, shape.groups)
            stages = tuple(
                StageSpec(start, stop, len(own), own)
                for (start, stop), own in zip(pairwise(shape.edges), placed, strict=True)
            )
            changed_plan = problem.fitted(replace(plan, stages=stages, predicted=None))
            if changed_plan is not None:
                yield changed_plan


def run_otherwise(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """Yield the plans that fit and run one stage another way; none where memory is not limited.

    Which of a rank's stages recompute decides when messages are on their way, which the formula does not see.
    """
    variants = list(map(Variant.of, plan.stages))
    again = {variant.recompute for variant in problem.request.variants} if problem.is_limited else ()
    for s, recompute in product(range(plan.num_stages), sorted(again)):
        each = [*variants[:s], variants[s]._replace(recompute=recompute), *variants[s + 1 :]]
        changed = problem.timed(plan.running(each))
        if changed != plan and problem.fits(changed):
            yield changed


def _moved_cuts(here: _Shape, traffic: Sequence[float]) -> Iterator[_Shape]:
    """Yield the shapes with a cut one layer further, at the cheapest edge two or three further, and so on."""
    edges = here.edges
    for i in range(1, len(edges) - 1):
        for way in (range(edges[i] - 1, edges[i - 1], -1), range(edges[i] + 1, edges[i + 1])):
            for k in range(len(way).bit_length()):
                goal = min(way[2**k - 1 : 2 ** (k + 1) - 1], key=lambda edge: traffic[edge])
                yield replace(here, edges=(*edges[:i], goal, *edges[i + 1 :]))


def _moved_ranks(here: _Shape, idle: Sequence[int]) -> Iterator[_Shape]:
    """Yield the shapes with a rank in the next stage or the one before, no longer used, or used."""
    for s, (one, other) in enumerate(pairwise(here.groups)):
        if len(one) > 1:
            yield here.with_groups(s, one[:-1], (*other, one[-1]))
        if len(other) > 1:
            yield here.with_groups(s, (*one, other[0]), other[1:])
    for s, group in enumerate(here.groups):
        if len(group) > 1:
            yield here.with_groups(s, group[:-1])
        if idle:
            yield here.with_groups(s, (*group, idle[0]))


def _merged(here: _Shape) -> Iterator[_Shape]:
    """Yield the shapes with two stages in a row made one."""
    for s, (one, other) in enumerate(pairwise(here.groups)):
        yield _Shape(
            here.edges[: s + 1] + here.edges[s + 2 :],
            (*here.groups[:s], one + other, *here.groups[s + 2 :]),
        )


def _split(here: _Shape, idle: Sequence[int], traffic: Sequence[float]) -> Iterator[_Shape]:
    """Yield the shapes with a stage in two, cut where little is sent in each third of it.

    Each half has half of the stage's ranks, or one of them all and the other two idle ranks: a stage that
    computes little lets those before it have more microbatches on their way.
    """
    for s, group in enumerate(here.groups):
        inside = range(here.edges[s] + 1, here.edges[s + 1])
        third, half, more = len(inside) // 3, (len(group) + 1) // 2, tuple(idle[:2])
        thirds = inside[:third], inside[third : len(inside) - third], inside[len(inside) - third :]
        shared = [(group[:half], group[half:]), (group, more), (more, group)]
        for part, (front, back) in product(thirds, shared):
            if part and front and back:
                yield _Shape(
                    (*here.edges[: s + 1], min(part, key=lambda edge: traffic[edge]), *here.edges[s + 1 :]),
                    (*here.groups[:s], front, back, *here.groups[s + 1 :]),
                )
