"""Partition: the cuts, replica counts and ranks that minimise `estimate.estimate`.

The formula is a sum over stages and cuts plus a maximum over them. A dynamic program (`stage_program`)
minimises the sum under an upper bound on the maximum; lowering the bound walks along the front of (sum,
maximum). Sums only grow on the way. After each plan the bound may therefore fall to the best total so far
less the plan's sum, since nothing beyond can be better, and the walk ends with the optimum. An asynchronous
schedule has no sum. A program over maxima alone finds its optimum at once (as PipeDream's, SOSP 2019,
section 3.1), unless its plans wait for gradients: then passes for bounds narrow the optimum down. Plans whose
ranks hold several stages are found by `interleave`.

Where stages may recompute, or shard their update, each stage of the program is run a way that fits and
that no other beats (`variants`), which depends on its layers, replicas and microbatches in flight. So the
program has hardly more plans to look at.

What no program over suffixes can know is in `estimates.closely`, by which the runners-up are ranked. For its
sake the front is walked again where updates take long, without them, and where the best plan is slow, with
messages alone on their cuts.

Exactness:
- Clusters with few enough kinds of ranks (`placement.every_placement`): the optimum over all cuts and all
  sets of ranks, used or not, each stage's ranks in the order of `placement.dealt`.
- Other clusters: the optimum over the lines of `placement.lines`, of which straight pipelines have fewer.
  Where ranks share a machine's processors, all ranks of the line count as computing, for every number of
  them on a machine.
- A front of more than `PATIENCE` plans is walked in steps, each less than 1 % of the optimum.
- The passes that narrow an asynchronous optimum down end within 2 % where bounds do not share a pass.
- On a line the ranks that a plan skips count as if they had microbatches on their way.
- Beyond `MAX_STEPS` or `placement.MAX_PAIRS` layers are merged and stages left out, and the best plan found
  is refined by programs over its neighbourhood: a good plan, not surely the best.
- Shared parameters: the program counts a layer's own copy and no exchange, `estimate` both as they are.
  Asynchronous schedules make no cut between layers that share one.
- Limited memory under zero-bubble, where a stage's peak depends on the most that any stage has in flight:
  the program is solved for each such number, on a line for the largest alone.
- Limited memory under vertical sync and `max_in_flight`, where it depends on the stages before: the search
  neglects this, and recomputes more than the program took or drops plans that do not fit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, zip_longest

import numpy as np

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import Estimates, estimates
from hybridpipe.planning.cost.formula import compute_share, measured_speed, stage_costs, stage_parts
from hybridpipe.planning.cost.layer_costs import LayerCosts
from hybridpipe.planning.cost.links import Ints
from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.schedules.generators import UNLIMITED
from hybridpipe.planning.search.placement import (
    Layout,
    SlotGraph,
    active_ranks,
    along,
    coarse,
    every_placement,
    every_stage,
    lines,
    near,
    renumbered,
    shares,
    slot_graph,
)
from hybridpipe.planning.search.stage_program import SAME, StagePath, StageProgram, just_above
from hybridpipe.planning.search.variants import fits_memory, fitted

# Assumed microbatches in flight on each rank behind a stage, tried in order until plans fit. None is the
# exact number, for which long lines have too many slots; there the last figure is the largest that occurs.
EXACTLY = (0.0, None)
ROUGHLY = (0.0, 1.0, 1.25, 1.5, 2.0)

MAX_PLANS = 32
MAX_STEPS = 2 * 10**8  # elementary steps of a pass, about a quarter of a second on one core of 2024
MAX_TABLE = 2 * 10**7  # figures kept of all kinds of stages: 320 MB
MAX_ROUNDS = 6  # of refinement
PATIENCE = 60  # passes along a front (8 to 40 are usual); each further one skips a longer piece of the front
IMPATIENCE = 1e-4  # growth of the skipped piece with each pass, relative to the maximum
# Where the updates of a plan that is best by one of the estimates take more than this part of a minibatch,
# plans are looked for whose updates take at most these parts of that.
WORTH_HURRYING, LATE = 0.05, (0.7, 0.5, 0.25)
WORTH_A_LOOK = 1.2  # factor by which the first plan of a placement may be worse than the best
SLACKS = (1.05, 1.2, 1.5)  # factors by which an asynchronous plan with a shorter way may be slower
TIE = 1e-13  # cost of a rank, relative to the best estimate: ties go to fewer ranks and not to rounding


def partition(
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    request: PlanRequest,
    *,
    ranks: Sequence[int] | None = None,
    max_replicas: int | None = None,
    closely: bool = False,
    variants: Sequence[Variant] = (),
    estimated: dict[Plan, Estimates] | None = None,
    briefly: bool = False,
) -> list[Plan]:
    """Return plans with the least `estimate` that fit into memory, the best one first; empty if none fits.

    The further plans are runners-up, for the simulator to compare. Equal estimates are ordered by fewer
    ranks, then fewer stages.

    Args:
        num_microbatches: of a minibatch.
        request: its schedule gives each rank one stage.
        ranks: ranks that may be used. None: all.
        max_replicas: per stage; 1 finds the best straight pipeline. None: no limit.
        closely: order them by `Estimates.closely`, by turns with the best of each number of stages.
        variants: the ways to run a stage by which cuts and ranks are chosen. Empty: the request's. What is
            found is run as it fits.
        estimated: estimates that are known, to which those of further plans are added.
        briefly: only along the front of the formula itself, in about half of the time.
    """
    usable = tuple(range(cluster.num_ranks) if ranks is None else sorted(ranks))
    with np.errstate(over="ignore"):  # times beyond the largest number are infinite
        search = _Search(
            profile, cluster, num_microbatches, request, usable, max_replicas, variants, estimated, briefly
        )
        search.run()
    return search.most_promising() if closely else search.best_plans()


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan, with the formula's value from the program and from `estimate`, and its stages on the line."""

    plan: Plan
    program_seconds: float
    seconds: float
    closely: float
    line: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()  # of its stages on the line

    @property
    def order(self) -> tuple[object, ...]:
        return float(f"{self.seconds:.11e}"), self.plan.num_ranks, self.plan.num_stages, self.plan.ranks

    @property
    def shape(self) -> tuple[object, ...]:
        return tuple(stage.stop for stage in self.plan.stages), self.plan.replicas, f"{self.seconds:.9e}"


class _Search:
    """The plans found so far, and the order in which placements are tried."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        num_microbatches: int,
        request: PlanRequest,
        ranks: tuple[int, ...],
        max_replicas: int | None,
        variants: Sequence[Variant] = (),
        estimated: dict[Plan, Estimates] | None = None,
        is_brief: bool = False,
    ) -> None:
        self.profile, self.cluster, self.ranks = profile, cluster, ranks
        self.num_microbatches, self.request = num_microbatches, request
        self.max_replicas = min(max_replicas or len(ranks), len(ranks))
        self.costs = LayerCosts(profile, cluster, num_microbatches, request, variants)
        self.estimates, self.is_brief = {} if estimated is None else estimated, is_brief
        self.closest = Estimates(math.inf, math.inf, math.inf)  # the one that is best when looked at closely
        self.found: dict[object, _Found] = {}
        self.best: _Found | None = None
        alike = len({(cluster.speed(rank), cluster.memory(rank)) for rank in ranks}) == 1
        self.compares_lines = alike and request.traits.whole_minibatch  # see `walk_asynchronous`
        self.reached = self.beaten = math.inf  # least maximum of plans on all lines, on earlier ones
        self.too_few = 0  # counts of microbatches in flight that let plans pass which do not fit

    @property
    def best_seconds(self) -> float:
        return self.best.seconds if self.best else math.inf

    def best_plans(self) -> list[Plan]:
        ordered = sorted(self.found.values(), key=lambda found: found.order)
        return [found.plan for found in ordered[:MAX_PLANS]]

    def most_promising(self) -> list[Plan]:
        """Return by turns the best plans by the closer estimate, of each number of stages, by the formula."""
        ordered = sorted(self.found.values(), key=lambda found: (found.closely, found.order))
        first = {found.plan.num_stages: found.plan for found in reversed(ordered)}
        plans = [found.plan for found in ordered]
        best_of_each = sorted(first.values(), key=plans.index)
        in_turns = chain.from_iterable(zip_longest(plans, best_of_each, self.best_plans()))
        return list(dict.fromkeys(plan for plan in in_turns if plan is not None))

    def run(self) -> None:
        self.add_equal_stages()
        layout = every_placement(self.cluster, self.ranks, self.max_replicas)
        if layout is not None:
            for share, starts in shares(layout, self.cluster, self.ranks):
                self.search(layout, share, starts, EXACTLY)
            return
        for active in active_ranks(self.cluster, self.ranks):
            if self.least_seconds(active) > self.best_seconds:
                continue
            self.reached = math.inf
            for line in lines(self.cluster, active, self.max_replicas > 1):
                self.search_line(line)

    def least_seconds(self, active: Sequence[int]) -> float:
        """Return seconds that no plan on these ranks undercuts: those in which all of them compute."""
        work = float(self.costs.of_update("least", self.costs.per_update(1)).sum())
        count = 1 if self.request.traits.whole_minibatch else self.num_microbatches
        return count * work / sum(compute_share(self.cluster, active).values())

    def search_line(self, line: tuple[int, ...]) -> None:
        self.beaten = self.reached
        every = every_stage(len(line), self.max_replicas)
        few = coarse(self.cluster, len(line), self.profile.num_layers, self.max_replicas)
        held_a_rank = EXACTLY if every else ROUGHLY
        layout = along(self.cluster, line, every or few, self.max_replicas)
        share = compute_share(self.cluster, line)
        is_complete = self.search(layout, share, layout.starts, held_a_rank, line)
        for _ in range(0 if every and is_complete else MAX_ROUNDS):
            before = self.best
            if before is None or before.line != line:
                break
            stages = every or near(before.spans, len(line))
            layout = along(self.cluster, line, stages, self.max_replicas)
            self.search(layout, share, layout.starts, held_a_rank, line)
            if self.best is before:
                break

    def add_equal_stages(self) -> None:
        """Add pipelines of stages with equal replicas and similar work, which give a first bound."""
        done = np.concatenate([[0.0], np.cumsum(self.costs.mean_work())])
        n = self.profile.num_layers
        for line in lines(self.cluster, self.ranks, self.max_replicas > 1)[:2]:
            for m in {self.max_replicas, *(2**k for k in range(self.max_replicas.bit_length()))}:
                stages = min(len(line) // m, n)
                goals = np.searchsorted(done, done[-1] * np.arange(1, stages) / stages).tolist()
                edges = [0]
                for s, goal in enumerate(goals, 1):  # at least one layer for each stage
                    edges.append(min(max(goal, edges[-1] + 1), n - stages + s))
                spans = [(s * m, s * m + m) for s in range(stages)]
                self.add([*edges, n], [line[a:b] for a, b in spans], math.nan, line, tuple(spans))

    def add(
        self,
        edges: Sequence[int],
        ranks: Sequence[Sequence[int]],
        program_seconds: float,
        line: tuple[int, ...] = (),
        spans: tuple[tuple[int, int], ...] = (),
        variants: Sequence[int] = (),
    ) -> bool:
        """Add the plan as it fits into memory (`fitted`). Return True if it fits as the program ran stages.

        Args:
            variants: the way to run each stage that the program took. Empty: any.
        """
        ranks = renumbered(self.cluster, self.ranks, ranks)
        spans_of_layers = zip(edges, edges[1:], ranks, strict=False)
        stages = (StageSpec(a, b, len(own), own) for a, b, own in spans_of_layers)
        given = self.request.plan(stages, self.num_microbatches)
        plan = fitted(given, self.profile, self.cluster, self.request.ways(self.profile.has_experts))
        if plan is None:
            return False
        taken = plan.running([self.costs.variants[number] for number in variants]) if variants else plan
        as_taken = taken == plan
        if variants and not as_taken:
            program_seconds = math.nan
        if plan not in self.estimates:
            costs = stage_costs(self.profile, plan, measured_speed(self.profile, self.cluster))
            self.estimates[plan] = estimates(plan, costs, self.cluster)
        own = self.estimates[plan]
        if own.closely < self.closest.closely:
            self.closest = own
        found = _Found(plan, program_seconds, own.seconds, own.closely, line, spans)
        known = self.found.get(found.shape)
        if known is None or math.isnan(known.program_seconds) or found.order < known.order:
            self.found[found.shape] = found
        if self.best is None or found.order < self.best.order:
            self.best = found
        return not variants or as_taken or fits_memory(taken, self.profile, self.cluster)

    def search(
        self,
        layout: Layout,
        share: dict[int, float],
        starts: Sequence[int],
        counts_held: Sequence[float | None],
        line: tuple[int, ...] = (),
    ) -> bool:
        """Walk along the front of one layout. Return True if no layer was merged."""
        *rough, closest = counts_held
        while self.too_few < len(rough):
            program = self.program_on(layout, share, starts, rough[self.too_few])
            if all(self.add_paths(program, layout, line)):
                return program.costs.num_layers == self.profile.num_layers
            self.too_few += 1
        program = self.program_on(layout, share, starts, closest)
        fit = list(self.add_paths(program, layout, line))
        if self.request.traits.splits_backward and not all(fit):
            held = sorted({kind.in_flight for kind in program.graph.kinds})
            for most_held in held if layout.is_exact else held[-1:]:
                program = self.program_on(layout, share, starts, closest, most_held)
                fit += self.add_paths(program, layout, line)
        return program.costs.num_layers == self.profile.num_layers

    def add_paths(self, program: StageProgram, layout: Layout, line: tuple[int, ...]) -> Iterator[bool]:
        """Walk along the front of a program, and yield `add_path` of each path."""
        return (self.add_path(path, layout, made, line) for made, path in self.walk(program))

    def add_path(self, path: StagePath, layout: Layout, program: StageProgram, line: tuple[int, ...]) -> bool:
        """Add the plan of a path. Return True if it fits with its stages run as the program took them."""
        slots = program.graph.slot[path.slots].tolist()
        starts = [len(line) - len(layout.left[slot]) for slot in slots]
        ranks = [layout.ranks[slot].tolist() for slot in slots]
        spans = tuple((a, a + len(own)) for a, own in zip(starts, ranks, strict=True))
        edges = program.costs.edges[path.edges].tolist()
        fits = self.add(edges, ranks, path.seconds, line, spans, path.variants)
        if fits and line and self.compares_lines:
            self.reached = min(self.reached, path.slowest)
        return fits

    def program_on(
        self,
        layout: Layout,
        share: dict[int, float],
        starts: Sequence[int],
        held_a_rank: float | None,
        most_held: int = 0,
    ) -> StageProgram:
        """Return the program over a layout; the arguments are those of `slot_graph`."""
        graph = slot_graph(
            layout,
            self.cluster,
            share,
            starts,
            num_microbatches=self.num_microbatches,
            schedule=self.request.schedule,
            max_in_flight=self.request.max_in_flight or UNLIMITED,
            held_a_rank=held_a_rank,
            most_held=most_held,
        )
        return self.program(graph)

    def program(self, graph: SlotGraph) -> StageProgram:
        """Return the program over the graph, with as many layers as `MAX_STEPS` allows."""
        bound = self.first_bound(graph)
        costs, n = self.costs, self.profile.num_layers
        widths = costs.longest(graph.kinds, bound)
        steps, table = n * int(np.array(widths)[graph.kind].sum()), n * sum(widths)
        part = min(1.0, math.sqrt(min(MAX_STEPS / steps, MAX_TABLE / table)))
        if part < 1:
            costs = costs.merged(self.cheap_edges(int(n * part)))
            widths = costs.longest(graph.kinds, bound)
        return StageProgram.of_stages(costs, graph, widths, bound, TIE * self.best_seconds)

    def first_bound(self, graph: SlotGraph) -> float:
        """Return the first bound on maxima: the best total with a margin, less the least possible sum."""
        return WORTH_A_LOOK * self.best_seconds * (1 + SAME) - self.least_sum(graph)

    def least_sum(self, graph: SlotGraph) -> float:
        least = 0.0
        if not self.request.traits.is_asynchronous:
            work = self.costs.of_update("least", 1).sum()
            weight = self.costs.of_update("weight", self.costs.per_update(1)).sum()
            least, _ = stage_parts(
                self.request.schedule, self.num_microbatches, 1, float(work), float(weight), 0.0
            )
            least /= max(kind.speed for kind in graph.kinds)
        return least

    def walk(self, program: StageProgram) -> Iterator[tuple[StageProgram, StagePath]]:
        """Yield plans along the front of sum and maximum, until none can be better than the best."""
        if self.request.traits.is_asynchronous:
            yield from self.walk_asynchronous(program)
            return
        yield from self.walk_front(program, lambda: self.best_seconds)
        if self.is_brief:
            return
        late = max(self.closest.late, self.estimates[self.best.plan].late if self.best else 0.0)
        limits = [part * late for part in LATE if late >= WORTH_HURRYING * self.closest.closely]
        if self.is_slow:
            for limit in (math.inf, *limits):
                yield from self.walk_hurried(program.with_messages_alone(), limit)
        for limit in limits:
            yield from self.walk_hurried(program, limit)

    def walk_hurried(self, program: StageProgram, limit: float) -> Iterator[tuple[StageProgram, StagePath]]:
        """Yield plans along the front whose updates take less than a limit and are not counted."""
        bound = self.closest.closely - self.least_sum(program.graph)
        hurried = program.updating_within(limit, bound)
        for made, path in self.walk_front(hurried, lambda: self.closest.closely):
            yield made, replace(path, seconds=math.nan)

    @property
    def is_slow(self) -> bool:
        """True if the best plan so far keeps its ranks busy less than half of the time."""
        return self.closest.closely > 2 * self.least_seconds(self.ranks)

    def walk_front(
        self, program: StageProgram, best: Callable[[], float]
    ) -> Iterator[tuple[StageProgram, StagePath]]:
        """Yield plans along the front until sum and maximum cannot be less than the best."""
        bound = program.bound
        for passes in count():
            [path] = program.least_sums([bound])
            if path is None:
                return
            yield program, path
            skipped = max(0, passes - PATIENCE) * IMPATIENCE * path.slowest
            bound = min(path.slowest - skipped, best() - path.total)

    def walk_asynchronous(self, program: StageProgram) -> Iterator[tuple[StageProgram, StagePath]]:
        """Yield the best plan, and the shortest ways through the pipeline that are nearly as good.

        The formula neglects the queues that form where everything is nearly busy, and a short way has fewer
        of them. The shortest way fixes the cuts. The replicas are then the best for these cuts, and as many
        as there are.

        On a line that is not faster than those before it only the best is yielded. On 120 clusters of equal
        ranks that saved 0.4 of the time and cost 0.2 % in the mean, 10 % at most. It cost 2 % where ranks
        differ and 1 % under pipedream-2bw, where every line is searched whole.
        """
        fastest = program.least_maximum()
        if not fastest:
            return
        if fastest[0].slowest > self.beaten * (1 - SAME):
            yield program, fastest[0]
            return
        # One stage has no queues, and in 2000 random problems no plan slower by the formula was better. No
        # shorter way is searched where the fastest plan has one stage, or one on fewer ranks is as fast.
        slacks = SLACKS if len(fastest[0].slots) > 1 else ()
        bounds = [just_above(fastest[0].slowest), *(slack * fastest[0].slowest for slack in slacks)]
        short = program.least_sums(bounds, [0.0] + [1.0] * len(slacks))
        fewest = next(short)  # ranks, as the weight of seconds is 0; as fast where no gradient is waited for
        yield from ((program, path) for path in (fewest, *fastest) if path)
        if self.is_slow:
            alone = program.with_messages_alone().least_maximum()
            yield from ((program, replace(path, seconds=math.nan)) for path in alone)
        if fewest is not None and len(fewest.slots) == 1:
            return
        programs: dict[tuple[int, ...], StageProgram] = {}
        tried: list[StagePath] = []
        for path in short:
            if path is None or path in tried:
                continue
            tried.append(path)
            edges = tuple(path.edges)
            if edges not in programs:
                programs[edges] = program.with_edges(np.array(edges))
            yield from ((programs[edges], each) for each in programs[edges].most_even(path.slowest))
            if len(path.slots) == 1:
                return

    def cheap_edges(self, count: int) -> Ints:
        """Return about `count` edges to cut at: even in work, with little sent, and near the best cuts."""
        n, work = self.profile.num_layers, self.costs.mean_work()
        done = np.concatenate([[0.0], np.cumsum(work)])
        cuts = [stage.stop for stage in self.best.plan.stages[:-1]] if self.best else []
        steps = [0, *(sign * 2**k for k in range(n.bit_length()) for sign in (1, -1))]
        steps = steps[: max(3, count // 2 // (len(cuts) + 1))]
        kept = {0, n} | {cut + step for cut in cuts for step in steps if 0 < cut + step < n}
        goals = np.searchsorted(done, done[-1] * np.arange(1, max(count // 2, 2)) / max(count // 2, 2))
        groups = np.unique(np.concatenate([[1], np.clip(goals, 1, n), [n]]))
        for low, high in zip(groups.tolist(), groups[1:].tolist(), strict=False):
            kept.add(low + int(np.argmin(self.costs.moved[low:high])))
        return np.array(sorted(kept))
