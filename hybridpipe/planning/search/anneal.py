"""Anneal: a randomised search in the space of plans, with the simulator as its cost.

The closed formula that `partition` minimises neglects interactions of stages: messages and all-reduces that
meet on a link, ranks that share processors only at times. Simulated annealing (Kirkpatrick et al. 1983)
starts from a plan, changes one thing at a time, and accepts improvements and, with a falling probability,
deteriorations. FlexFlow (Jia et al., MLSys 2019) searches the same way with a simulator as cost.

The search goes in rounds, each of which cools down and is twice as long as the one before. A longer search
therefore begins with all that a shorter one does.

Invariant: the returned plan fits into memory and is never slower than the first one, nor than that of a
shorter search; the same input gives the same plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from hybridpipe.planning.checks import non_negative_int
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import DEFAULT_REQUEST, PlanRequest
from hybridpipe.planning.schedules.registry import TRAITS
from hybridpipe.planning.search import search
from hybridpipe.planning.search.placement import renumbered
from hybridpipe.planning.search.search import Candidate
from hybridpipe.planning.search.variants import fitted

# First and last temperature relative to the first plan's time: a change that costs so much is accepted in one
# case of e.
HOT, COLD = 0.05, 0.0005
# A plan under one of these schedules is also a plan under the others.
ALIKE = tuple(name for name, each in TRAITS.items() if not (each.whole_minibatch or each.interleaves))
FIRST_ROUND = 50  # plans simulated in the first round
MAX_IDLE = 500  # changes in a row to plans that are known or do not fit, after which the search ends

Progress = Callable[[], object]


def anneal(
    start: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    evaluations: int,
    seed: int = 0,
    max_ranks: int | None = None,
    variants: Sequence[Variant] = (),
    schedules: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> Plan:
    """Return the best plan found, with its prediction; `start` if nothing is better.

    Args:
        profile: of one microbatch of `start`. Its other sizes that divide the minibatch are tried too. The
            result's microbatches have `profile.samples * start.num_microbatches / num_microbatches` samples.
        evaluations: the most plans that are simulated besides `start`.
        max_ranks: only ranks below it are used; defaults to all of the cluster's.
        variants: the ways to run a stage (`PlanRequest.variants`), of which each plan takes the fastest that
            fit. Empty: all stages run as in `start`.
        schedules: further schedules to try; interleaved plans keep schedule and groups.
        on_progress: called after each simulation.

    Raises:
        ValueError: `evaluations` is negative, `start` names ranks beyond `max_ranks` or does not fit into
            memory.
    """
    non_negative_int("evaluations", evaluations)
    space = _Space(start, profile, cluster, max_ranks, variants, schedules)
    if not search.fits(start, profile, cluster):
        raise ValueError(f"start must fit into memory, plan {start.name} does not")
    random = Random(seed)
    best = space.with_prediction(start)
    here = replace(start, predicted=None)
    first_seconds = least = search.seconds_of(best)
    seconds = {here: least}
    num_idle, begin, end = 0, 0, FIRST_ROUND
    while len(seconds) <= evaluations and num_idle < MAX_IDLE:
        if len(seconds) > end:
            here, begin, end = replace(best, predicted=None), end, 3 * end - 2 * begin
        num_idle += 1
        plan = space.fitting(space.neighbour(here, random))
        if plan is None:
            continue
        if plan not in seconds:
            num_idle = 0
            judged = space.with_prediction(plan)
            seconds[plan] = search.seconds_of(judged)
            if seconds[plan] < least * (1 - search.TIE):
                best, least = judged, seconds[plan]
            if on_progress is not None:
                on_progress()
        temperature = first_seconds * HOT * (COLD / HOT) ** ((len(seconds) - begin) / (end - begin))
        if seconds[plan] - seconds[here] <= temperature * random.expovariate(1.0):
            here = plan
    return best


def anneal_candidates(
    candidates: Sequence[Candidate],
    profile: ModelProfile,
    cluster: Cluster,
    evaluations: int,
    request: PlanRequest = DEFAULT_REQUEST,
    num_ranks: int | None = None,
    *,
    on_progress: Progress | None = None,
) -> list[Candidate]:
    """Return the candidates, best first, with the best found around the first one, of origin "search"."""
    best = candidates[0]
    ways = request.under(best.plan.schedule).variants
    found = anneal(
        best.plan,
        profile.scaled_to(best.samples),
        cluster,
        evaluations=evaluations,
        max_ranks=num_ranks,
        variants=() if ways == (Variant(),) else ways,
        schedules=request.schedules,
        on_progress=on_progress,
    )
    if found == best.plan:
        return list(candidates)
    samples = best.samples * best.plan.num_microbatches // found.num_microbatches
    return search.ranked([Candidate("search", found, samples), *candidates])


@dataclass
class _Draft:
    """A plan that can be changed.

    Args:
        groups: the ranks of each group in the order of the stages, and the unused ranks last. Where ranks
            hold several stages there are fewer groups than stages.
        variants: by stage.
    """

    edges: list[int]
    groups: list[list[int]]
    num_microbatches: int
    variants: list[Variant]
    schedule: str

    @property
    def num_stages(self) -> int:
        return len(self.edges) - 1


Change = Callable[[_Draft, Random], None]  # a change that is impossible leaves the draft as it is


def _shift_cut(draft: _Draft, random: Random) -> None:
    if draft.num_stages > 1:
        i = random.randrange(1, draft.num_stages)
        low, here, high = draft.edges[i - 1] + 1, draft.edges[i], draft.edges[i + 1] - 1
        draft.edges[i] = random.choice((max(low, here - 1), min(here + 1, high), random.randint(low, high)))


def _split_stage(draft: _Draft, random: Random) -> None:
    s = random.randrange(draft.num_stages)
    group, unused = draft.groups[s], draft.groups[-1]
    if len(group) == 1 and unused:
        group.append(unused.pop(random.randrange(len(unused))))
    if len(group) > 1 and draft.edges[s + 1] - draft.edges[s] > 1:
        random.shuffle(group)
        count = random.randrange(1, len(group))
        draft.groups[s : s + 1] = [group[:count], group[count:]]
        draft.variants.insert(s, draft.variants[s])
        draft.edges.insert(s + 1, random.randrange(draft.edges[s] + 1, draft.edges[s + 1]))


def _merge_stages(draft: _Draft, random: Random) -> None:
    if draft.num_stages > 1:
        s = random.randrange(draft.num_stages - 1)
        draft.groups[s : s + 2] = [draft.groups[s] + draft.groups[s + 1]]
        del draft.edges[s + 1], draft.variants[s + 1]


def _move_rank(draft: _Draft, random: Random) -> None:
    source, target = random.sample(draft.groups, 2)
    if len(source) > (source is not draft.groups[-1]):  # a stage keeps its last rank
        target.append(source.pop(random.randrange(len(source))))


def _swap_ranks(draft: _Draft, random: Random) -> None:
    one, other = random.sample(draft.groups, 2)
    if one and other:
        i, j = random.randrange(len(one)), random.randrange(len(other))
        one[i], other[j] = other[j], one[i]


class _Space:
    """The plans that may be visited, and the changes that lead from one to the next."""

    def __init__(
        self,
        start: Plan,
        profile: ModelProfile,
        cluster: Cluster,
        max_ranks: int | None,
        variants: Sequence[Variant],
        schedules: Sequence[str],
    ) -> None:
        self.cluster, self.start = cluster, start
        self.variants = variants
        self.ranks = range(cluster.num_ranks if max_ranks is None else min(max_ranks, cluster.num_ranks))
        start.check_world(len(self.ranks))
        minibatch = profile.samples * start.num_microbatches
        sizes = () if start.traits.whole_minibatch else profile.sizes
        fitting = {minibatch // size: profile.scaled_to(size) for size in sizes if minibatch % size == 0}
        self.profiles = fitting | {start.num_microbatches: profile}  # by number of microbatches
        zeros = [variant.zero for variant in variants or map(Variant.of, start.stages)]
        alike = [name for name in ALIKE if TRAITS[name].most_zero >= max(start.zero, *zeros)]
        self.schedules = [name for name in dict.fromkeys([start.schedule, *schedules]) if name in alike]
        self.changes: list[Change] = [_shift_cut, _swap_ranks]
        if start.chunks == 1:
            self.changes += [_split_stage, _merge_stages, _move_rank]
            self.changes += [self._reschedule] * (start.schedule in ALIKE and len(self.schedules) > 1)
        self.changes += [self._resize] * (len(self.profiles) > 1)

    def fitting(self, plan: Plan) -> Plan | None:
        """Return the plan as it fits into memory; None if it does not."""
        profile = self.profiles[plan.num_microbatches]
        if self.variants:
            return fitted(plan, profile, self.cluster, self.variants)
        return plan if search.fits(plan, profile, self.cluster) else None

    def with_prediction(self, plan: Plan) -> Plan:
        return search.with_prediction(plan, self.profiles[plan.num_microbatches], self.cluster)

    def neighbour(self, plan: Plan, random: Random) -> Plan:
        """Return the plan with one thing changed; of interchangeable ranks the first are used first."""
        unused = sorted(set(self.ranks).difference(plan.ranks))
        edges = [0, *(stage.stop for stage in plan.stages)]
        groups = [*(list(stage.ranks) for stage in plan.stages[: plan.num_groups]), unused]
        ways = [
            Variant(plan.recomputes(s), plan.zero_of(s), plan.scatters(s)) for s in range(plan.num_stages)
        ]
        draft = _Draft(edges, groups, plan.num_microbatches, ways, plan.schedule)
        random.choice(self.changes)(draft, random)
        placed = renumbered(self.cluster, self.ranks, draft.groups[:-1])
        stages = tuple(
            StageSpec(start, stop, len(ranks), ranks)
            for (start, stop), ranks in zip(pairwise(draft.edges), placed * self.start.chunks, strict=True)
        )
        start = self.start
        if not TRAITS[draft.schedule].splits_backward:
            start = replace(start, in_flight=None, weight_lag=None)
        changed = replace(
            start,
            stages=stages,
            schedule=draft.schedule,
            num_microbatches=draft.num_microbatches,
            recompute=False,
            zero=0,
            predicted=None,
        )
        return changed.running(draft.variants)

    def _resize(self, draft: _Draft, random: Random) -> None:
        draft.num_microbatches = random.choice(sorted(self.profiles))

    def _reschedule(self, draft: _Draft, random: Random) -> None:
        draft.schedule = random.choice(self.schedules)
