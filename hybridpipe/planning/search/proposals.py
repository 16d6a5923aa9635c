"""Proposals: the plans that a search looks at first, from several sources, unpredicted.

They are plain data parallelism on all ranks and, where machines have several, on fewer of each; straight
pipelines; the plans of `partition`, and under interleaved-1f1b of `interleave`. Not known here: the
simulator. Invariant: the same problem gives the same plans in the same order.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise, zip_longest

import numpy as np

from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.layer_costs import LayerCosts
from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.request import AUTO
from hybridpipe.planning.search.interleave import interleaved_plans
from hybridpipe.planning.search.partition import partition
from hybridpipe.planning.search.placement import dealt
from hybridpipe.planning.search.problem import Problem

MAX_STRAIGHT = 256  # ranks of a straight pipeline; partition takes minutes for one of 1024
MAX_CUTS = 400  # straight pipelines of one number of stages, of which all are looked at
# The number of partition's plans that are simulated, without those that cannot be the best (`bound`). The
# formula sees neither the queues of asynchronous pipelines nor stages taking turns on a rank, so these need
# more: with 16 instead of 32, asynchronous plans of 240 problems were 3 % slower in the mean, one by 89 %.
NUM_EXACT, NUM_EXACT_ASYNCHRONOUS, NUM_INTERLEAVED = 12, 32, 6
NUM_EXACT_OF_LARGE = 6  # whose simulations take seconds each


def proposals(problem: Problem) -> Iterator[tuple[str, Plan]]:
    """Yield plans as they fit into memory (`Problem.fitted`), each with its origin (`search.Candidate`).

    A plan that shards updates though it need not is followed by the one that shards nothing: the
    formula adds up what the simulator overlaps.
    """
    for origin, plan in _proposed(problem):
        if (fitting := problem.fitted(plan)) is None:
            continue
        yield origin, fitting
        if problem.request.zero == AUTO:
            whole = fitting.running([Variant(stage.recompute) for stage in fitting.stages])
            if whole != fitting and problem.fits(whole):
                yield origin, whole


def _proposed(problem: Problem) -> Iterator[tuple[str, Plan]]:
    if problem.request.traits.interleaves:
        yield from (("interleaved", plan) for plan in _interleaved(problem))
        return
    for one_stage in _data_parallel_plans(problem):
        yield "dp", one_stage
    in_line = straight_plans(problem)
    yield from (("straight", plan) for plan in in_line[:1])
    count = NUM_EXACT_OF_LARGE if problem.is_large else NUM_EXACT
    count = NUM_EXACT_ASYNCHRONOUS if problem.request.traits.is_asynchronous else count
    for exact in partition_plans(problem, count) + in_line[1:]:
        yield "exact", exact


def partition_plans(
    problem: Problem, count: int, max_replicas: int | None = None, *, briefly: bool = False
) -> list[Plan]:
    """Return the first plans of `partition`, by turns with those that it finds if all stages recompute.

    All are run as they fit. The second ones are even in another way, where the formula errs differently: by
    the first alone 4 of some 60 plans under limits were 2 to 11 % slower. Large problems do without.
    """
    request, every = problem.request, problem.request.variants
    also = problem.is_limited and len(every) > 1 and not problem.is_large
    found = [
        partition(
            problem.profile,
            problem.cluster,
            problem.num_microbatches,
            request,
            ranks=range(problem.num_ranks),
            max_replicas=max_replicas,
            closely=True,
            variants=variants,
            estimated=problem.figures.estimated,
            briefly=briefly,
        )[:count]
        for variants in ((), (request.leanest,))[: 1 + also]
    ]
    in_turns = chain.from_iterable(zip_longest(*found))
    return list(dict.fromkeys(plan for plan in in_turns if plan is not None))


def _interleaved(problem: Problem, max_replicas: int | None = None) -> list[Plan]:
    """Return the best plans, where any fits only such."""
    if not problem.is_alternative and (problem.num_ranks < 2 or problem.profile.num_layers < 4):
        raise ValueError(
            f"schedule {problem.request.schedule} needs at least 2 ranks and 4 layers, "
            f"got {problem.num_ranks} and {problem.profile.num_layers}"
        )
    profile, cluster, ranks = problem.profile, problem.cluster, range(problem.num_ranks)
    plans = interleaved_plans(
        profile, cluster, problem.num_microbatches, problem.request, ranks, max_replicas
    )
    if not plans and not problem.is_alternative:
        raise ValueError(
            f"schedule {problem.request.schedule} needs 4 layers that a cut may separate, and "
            "layers that share tensors must stay together: use schedule 1f1b"
        )
    return plans[:NUM_INTERLEAVED]


def straight_plans(problem: Problem) -> list[Plan]:
    """Return the best pipeline with one replica a stage; a single stage only where there is nothing longer.

    For schedules of which the formula sees less, asynchronous ones and those in a V, these are the best few.
    """
    problem = replace(problem, num_ranks=min(problem.num_ranks, MAX_STRAIGHT))
    if problem.request.traits.interleaves:
        plans = _interleaved(problem, max_replicas=1)
        plans = [problem.timed(plan) for plan in plans if problem.fits(plan)]
    else:
        plans = partition_plans(problem, NUM_EXACT_ASYNCHRONOUS, max_replicas=1)
    longer = [plan for plan in plans if plan.num_stages > 1]
    traits = problem.request.traits
    few = NUM_INTERLEAVED if traits.takes_pass_times else 1
    return (longer or plans)[: NUM_EXACT_ASYNCHRONOUS if traits.is_asynchronous else few]


def _data_parallel_plans(problem: Problem) -> Iterator[Plan]:
    """Yield data parallelism on all ranks and, where machines have several, on the best number of each."""
    a_machine = min(problem.cluster.node_ranks or 1, problem.num_ranks)
    yield one_stage(problem, range(problem.num_ranks))
    fewer = [
        one_stage(problem, [rank for rank in range(problem.num_ranks) if rank % a_machine < count])
        for count in sorted({a_machine * i // 16 for i in range(1, 16)} - {0})  # every number, up to 16
    ]
    if fewer:
        yield min(fewer, key=lambda plan: estimate(plan, problem.profile, problem.cluster))


def one_stage(problem: Problem, ranks: Sequence[int]) -> Plan:
    """Return plain data parallelism on these ranks."""
    stage = StageSpec(0, problem.profile.num_layers, len(ranks), dealt(problem.cluster, ranks))
    return problem.request.plan([stage], problem.num_microbatches)


def every_straight(problem: Problem) -> Iterator[tuple[float, Plan]]:
    """Yield straight pipelines on the first ranks with seconds that they do not undercut, least first.

    Of each number of stages with at most `MAX_CUTS` ways to cut, these are all. A stage takes its work, a cut
    its messages in the direction that carries more, and 1F1B has as many microbatches on the way from a stage
    to the end and back as there are stages.
    """
    if problem.request.traits.interleaves:
        return
    costs = LayerCosts(problem.profile, problem.cluster, problem.num_microbatches, problem.request)
    done = np.concatenate([[0.0], np.cumsum(costs.mean_work())])
    seconds = 1 / max(level.bandwidth for level in problem.cluster.levels)
    count = 1 if problem.request.traits.whole_minibatch else problem.num_microbatches
    inner = np.flatnonzero(costs.can_cut).tolist()
    found: list[tuple[float, tuple[int, ...]]] = []
    for num_stages in range(2, min(problem.num_ranks, len(inner) + 1) + 1):
        if math.comb(len(inner), num_stages - 1) > MAX_CUTS:
            continue
        speed = max(map(problem.cluster.speed, range(num_stages)))
        cuts = np.array(list(combinations(inner, num_stages - 1)))
        edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, problem.profile.num_layers))
        edges[:, 0] = 0
        work = np.diff(done[edges], axis=1) / speed
        busiest = np.maximum(costs.output, costs.returned)[cuts] * seconds
        least = np.maximum(work.max(axis=1), busiest.max(axis=1))
        if problem.request.traits.has_warm_up and not problem.request.traits.splits_backward:
            ways = work.copy()
            ways[:, :-1] += costs.moved[cuts] * seconds
            to_the_end = np.cumsum(ways[:, ::-1], axis=1)
            least = np.maximum(least, (to_the_end / np.arange(1, num_stages + 1)).max(axis=1))
        found += zip((count * least).tolist(), map(tuple, edges.tolist()), strict=True)
    for least_seconds, ends in sorted(found):
        stages = [StageSpec(a, b, 1, (s,)) for s, (a, b) in enumerate(pairwise(ends))]
        plan = problem.fitted(problem.request.plan(stages, problem.num_microbatches))
        if plan is not None:
            yield least_seconds, plan
