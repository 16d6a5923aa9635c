"""Linearise: the order in which the layers of a graph make a chain whose cuts carry little.

The planner needs many positions where cutting is cheap, so the sum of the bytes of all cuts is minimised. The
best order is NP-hard to find in general (minimum linear arrangement), so

1. a layer that depends on all before it and is needed by all after it stands at the same position in every
   order: the stretches between such layers are ordered separately, without loss;
2. the live tensors depend on the set of finished layers and not on their order, so the best order of a
   stretch is a shortest path through the sets of layers that can be finished first (Held and Karp, 1962).
   The search keeps the best sets of each size. Where it can keep all, as in residual blocks, it is exact;
   elsewhere it is a beam search. The given order hardly matters to it (within 1 % on graphs in the style of
   Inception and NASNet), and it never makes that order worse.

Pure and deterministic. The time is linear in layers and edges except for the search, whose steps are bounded.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby, islice, pairwise
from operator import attrgetter
from typing import NamedTuple

from hybridpipe.planning.graph.graph import LayerGraph

SEARCH_STEPS = 1_000_000  # moves tried, times edges they look at: a second or two in all
LONGEST_STRETCH = 2048  # layers searched together; a set of them is an integer with one bit a layer


def narrow_order(graph: LayerGraph) -> tuple[int, ...]:
    """Return all layers of the graph, each after those that it uses, in an order with narrow cuts.

    Inputs are left out.
    """
    order = [node for node in graph.sorted_nodes if node not in graph.inputs]
    position = {node: i for i, node in enumerate(order)}
    last_use = [max((position[user] for user in users), default=-1) for users in graph.successors]
    num_edges = sum(map(len, graph.predecessors))
    num_moves = max(1, SEARCH_STEPS // (len(order) + num_edges))
    for start, stop in _stretches(graph, order, position):
        order[start:stop] = _narrowest(graph, order[start:stop], stop, last_use, num_moves)
    return tuple(order)


def _stretches(
    graph: LayerGraph, order: Sequence[int], position: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield consecutive positions `[start, stop)` whose layers may change places.

    The layer at position i is fixed if all layers before lead to it and it leads to all layers behind. The
    first holds if no other layer up to i is without a user up to i, and the second likewise.
    """
    ends, beginnings = [0] * (len(order) + 1), [0] * (len(order) + 1)
    for i, node in enumerate(order):
        ends[i] += 1
        ends[min((position[user] for user in graph.successors[node]), default=len(order))] -= 1
        used = (position.get(used, -1) for used in graph.predecessors[node])
        beginnings[1 + max(used, default=-1)] += 1
        beginnings[i + 1] -= 1
    fixed = [a == b == 1 for a, b in zip(accumulate(ends[:-1]), accumulate(beginnings[:-1]))]
    for is_fixed, group in groupby(range(len(order)), key=fixed.__getitem__):
        if not is_fixed:
            start, *_, last = group
            yield from pairwise([*range(start, last + 1, LONGEST_STRETCH), last + 1])


_Way = tuple[int, "_Way"] | None  # the last layer, and the way to it


class _Prefix(NamedTuple):
    """Finished layers of a stretch, and the best way to them; sets of layers are bits."""

    done: int
    ready: int  # layers that can be next
    alive: int  # bytes made and still needed, relative to the stretch's start
    total: int  # the sum of `alive` after each layer so far
    way: _Way


def _narrowest(
    graph: LayerGraph, stretch: list[int], stop: int, last_use: Sequence[int], num_moves: int
) -> list[int]:
    """Return the stretch, which ends before position `stop`, in the order whose cuts carry least in sum.

    Args:
        last_use: for each node the last position that uses its result; -1 if none does.
        num_moves: layers that are tried at each position, after the sets with the narrowest cuts first.
    """
    index = {node: i for i, node in enumerate(stretch)}
    needs = [0] * len(stretch)
    followers: list[list[int]] = [[] for _ in stretch]
    users: dict[int, int] = {}
    for i, node in enumerate(stretch):
        for used in set(graph.predecessors[node]):
            users[used] = users.get(used, 0) | 1 << i
            if used in index:
                needs[i] |= 1 << index[used]
                followers[index[used]].append(i)
    made = [graph.nodes[node].output_bytes if last_use[node] >= 0 else 0 for node in stretch]
    # Results that a layer may be the last to use: one is freed once all its users in the stretch are done.
    frees = [
        [
            (users[used], graph.nodes[used].output_bytes)
            for used in set(graph.predecessors[node])
            if last_use[used] < stop
        ]
        for node in stretch
    ]

    ready = sum(1 << i for i, needed in enumerate(needs) if not needed)
    states = {0: _Prefix(0, ready, alive=0, total=0, way=None)}
    for i in range(len(stretch)):
        given = states[(1 << i) - 1], i  # the given order is never lost
        best_first = sorted(states.values(), key=attrgetter("total"))
        moves = islice(((state, layer) for state in best_first for layer in _bits(state.ready)), num_moves)
        states = {}
        for state, layer in chain([given], moves):
            done = state.done | 1 << layer
            if known := states.get(done):
                ready, alive = known.ready, known.alive
            else:
                ready = state.ready ^ 1 << layer
                ready |= sum(1 << j for j in followers[layer] if not needs[j] & ~done)
                freed = sum(size for all_users, size in frees[layer] if not all_users & ~done)
                alive = state.alive + made[layer] - freed
            total = state.total + alive
            if not known or total < known.total:
                states[done] = _Prefix(done, ready, alive, total, (layer, state.way))
    (state,) = states.values()
    return [stretch[layer] for layer in _way_to(state)]


def _way_to(state: _Prefix) -> list[int]:
    """Return the layers in the order in which they were finished."""
    layers = []
    way = state.way
    while way:
        layer, way = way
        layers.append(layer)
    return layers[::-1]


def _bits(mask: int) -> Iterator[int]:
    """Yield the highest bit first: a layer that has just become ready comes before those that have waited."""
    while mask:
        highest = mask.bit_length() - 1
        yield highest
        mask ^= 1 << highest
