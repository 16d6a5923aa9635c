"""Interleave: plans whose ranks hold several stages each.

p groups of equally many ranks stand in a line (`placement.lines`) and hold v stages each. The chain of layers
is cut into p v stages that go round the groups v times, or down and up again, as the schedule places them.

The cuts are exact for given groups of ranks of one speed, and given v: no cuts have a faster slowest stage.
For each factor of `SLACKS`, no cuts whose slowest stage takes at most that factor longer send less. Where
speeds differ, stages greedily take as many layers as the bound allows. In a V the cuts of `fold`, for the
fastest slowest group, compete with these. Values of p and v and numbers of replicas are tried: `estimate`
ranks the results, and the simulator decides.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, product

import numpy as np

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import compute_share, stage_speed
from hybridpipe.planning.cost.layer_costs import LayerCosts
from hybridpipe.planning.cost.links import Floats, Ints
from hybridpipe.planning.plan import Plan, StageSpec, Variant, group_of
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.fold import folded_edges
from hybridpipe.planning.search.placement import lines, renumbered
from hybridpipe.planning.search.variants import fitted

# More are rarely worth their messages (Narayanan et al., SC 2021, section 5.3.2, use 2).
CHUNKS = {"loop": (2, 3, 4), "v": (2,)}
SLACKS = (1.0, 1.2)
SHARES = (0.6, 0.75)  # the most that one of a group's two stages in a V may take of the slowest group's time
FEW = 8  # groups: all numbers up to it are tried; beyond, replicas in powers of two
# Counting the stash of more takes long, and plans of more stages are not simulated.
MAX_GROUPS = {"loop": 128, "v": 32}
MAX_CELLS = 10**7  # stages times layers, where traffic is minimised: 80 MB
MANY = 2**17  # layers times ranks: beyond it only the first of `CHUNKS` and `SLACKS` are tried
NUM_BISECTIONS = 60
SAME = 1e-9  # relative: sums of layers are not exact


def interleaved_plans(
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    request: PlanRequest,
    ranks: Sequence[int],
    max_replicas: int | None = None,
) -> list[Plan]:
    """Return plans for these ranks, least `estimate` first; none where two groups of two stages do not fit.

    Where some fit into memory, these are all; else none fits. Where stages may recompute there are also the
    cuts that are the best where all do.

    Args:
        max_replicas: per stage. None: no limit.
    """
    costs = LayerCosts(profile, cluster, num_microbatches, request)
    if not costs.can_cut[1:-1].all():
        costs = costs.merged(np.flatnonzero(costs.can_cut | np.isin(costs.edges, (0, profile.num_layers))))
    plainly = dict.fromkeys(Variant(variant.recompute) for variant in request.variants)
    variants = list(plainly)[: None if cluster.memory_bytes is not None else 1]
    found: dict[Plan, None] = {}
    placement = request.traits.placement
    tried = 1 if profile.num_layers * len(ranks) > MANY else None
    for line in lines(cluster, ranks)[:2]:
        for replicas in _replicas(len(line), max_replicas or len(line)):
            works = [costs.mean_work(replicas, variant).tolist() for variant in variants]
            for chunks, work in product(CHUNKS[placement][:tried], works):
                num_groups = min(len(line) // replicas, costs.num_layers // chunks, MAX_GROUPS[placement])
                if num_groups < 2:
                    continue
                groups = [line[g * replicas : (g + 1) * replicas] for g in range(num_groups)]
                groups = list(renumbered(cluster, ranks, groups))
                share = compute_share(cluster, [rank for group in groups for rank in group])
                held = range(num_groups * chunks)
                ranks_of = [groups[group_of(s, num_groups, placement)] for s in held]
                speeds = [stage_speed(cluster, group, share) for group in ranks_of]
                cuts = _cuts(work, costs.moved, speeds, SLACKS[:tried])
                if placement == "v":
                    cuts = chain(cuts, _folded(work, speeds[:num_groups]))
                for edges in cuts:
                    layers = zip(pairwise(costs.edges[edges].tolist()), ranks_of, strict=True)
                    stages = (StageSpec(a, b, replicas, own) for (a, b), own in layers)
                    found[request.plan(stages, num_microbatches, chunks)] = None
    fitting = (fitted(plan, profile, cluster, request.variants) for plan in found)
    plans = list(dict.fromkeys(plan for plan in fitting if plan is not None)) or found
    return sorted(plans, key=lambda plan: (estimate(plan, profile, cluster), plan.num_ranks, plan.num_stages))


def _replicas(num_ranks: int, most: int) -> list[int]:
    few = {num_ranks // groups for groups in range(2, FEW + 1)}
    doubled = {2**k for k in range(num_ranks.bit_length())}
    return sorted(m for m in few | doubled if 1 <= m <= min(most, num_ranks // 2))


def _cuts(
    work: Sequence[float], moved: Floats, speeds: Sequence[float], slacks: Sequence[float]
) -> Iterator[list[int]]:
    """Yield edges of as many stages as there are speeds, for the fastest slowest stage and slower ones."""
    done = [0.0, *accumulate(work)]
    least = slowest_stage(done, speeds) * (1 + SAME)
    found: list[list[int]] = []
    for slack in slacks:
        bound = least * slack
        if len(speeds) * len(done) <= MAX_CELLS:
            edges = _least_traffic(np.array(done), moved, speeds, bound)
        else:
            edges = _reached(done, speeds, bound)
        if edges not in found:
            found.append(edges)
            yield edges


def _folded(work: Sequence[float], speeds: Sequence[float]) -> Iterator[list[int]]:
    """Yield edges of a V for the fastest slowest group, with stages of about one size and with others."""
    done = np.array([0.0, *accumulate(work)])
    each = (folded_edges(done, speeds, share) for share in SHARES)
    yield from (edges for edges in each if edges is not None)


def slowest_stage(done: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the least seconds of the slowest stage, with one stage for each speed (see the header).

    Args:
        done: work of the layers before each edge, at full speed.
    """
    low, high = done[-1] / sum(speeds), done[-1] / min(speeds)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _reached(done, speeds, middle)[-1] == len(done) - 1 else (middle, high)
    return high


def _reached(done: Sequence[float], speeds: Sequence[float], bound: float) -> list[int]:
    """Return the edges of stages that take layers up to the bound, one left for each later stage."""
    edges = [0]
    for s, speed in enumerate(speeds, 1):
        furthest = bisect_right(done, done[edges[-1]] + bound * speed) - 1
        furthest = min(furthest, len(done) - 1 - (len(speeds) - s))
        if furthest == edges[-1]:
            break  # not even one layer
        edges.append(furthest)
    return edges


def _least_traffic(done: Floats, moved: Floats, speeds: Sequence[float], bound: float) -> list[int]:
    """Return the edges that send least, with no stage slower than the bound; such edges must exist."""
    num_layers = len(done) - 1
    least = np.full(num_layers + 1, np.inf)  # bytes over all cuts up to the one at each edge
    least[0] = 0.0
    tables, firsts = [], []
    for speed in speeds:
        first = np.searchsorted(done, done - bound * speed)
        tables.append(least)
        firsts.append(first)
        reached = _window_minima(least, first) + moved
        reached[0] = np.inf
        least = reached
    edges = [num_layers]
    for table, first in zip(tables[::-1], firsts[::-1], strict=True):
        begin = int(first[edges[-1]])
        edges.append(begin + int(np.argmin(table[begin : edges[-1]])))
    return edges[::-1]


def _window_minima(values: Floats, first: Ints) -> Floats:
    """Return the least of `values[first[j]:j]` at `[j]`, infinite where that is empty."""
    ends = np.arange(len(values))
    lengths = ends - first
    found = np.full(len(values), np.inf)
    # A window is covered by two overlapping runs of 2^k values; runs[i] is the least of values[i:i + size].
    runs, size = values, 1
    while size <= lengths.max():
        here = (lengths >= size) & (lengths < 2 * size)
        found[here] = np.minimum(runs[first[here]], runs[ends[here] - size])
        longer = np.full(len(values), np.inf)
        longer[:-size] = np.minimum(runs[:-size], runs[size:])
        runs, size = longer, 2 * size
    return found
