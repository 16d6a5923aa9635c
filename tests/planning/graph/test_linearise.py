import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpipe.planning.graph import linearise
from hybridpipe.planning.graph.graph import LayerGraph
from hybridpipe.planning.graph.linearise import narrow_order
from hybridpipe.planning.profile import LayerProfile
from tests.planning.graphs import Drawing, inception, nasnet, parallel, straight


@st.composite
def graphs(draw: st.DrawFn, most_nodes: int) -> LayerGraph:
    """Any directed graph without a cycle, its nodes numbered in any order."""
    number = draw(st.permutations(range(draw(st.integers(1, most_nodes)))))
    earlier = {n: number[:i] for i, n in enumerate(number)}
    uses = {n: draw(st.lists(st.sampled_from(earlier[n]), max_size=3)) if earlier[n] else [] for n in number}
    sources = [n for n in number[:-1] if not uses[n]]
    inputs = draw(st.sets(st.sampled_from(sources))) if sources else set()
    size = st.integers(0, 9)
    nodes = [LayerProfile(f"n{n}", n, draw(size), draw(size), draw(size), 0) for n in range(len(number))]
    return LayerGraph(tuple(nodes), tuple(tuple(uses[n]) for n in range(len(number))), frozenset(inputs))


def carried(graph: LayerGraph, order: tuple[int, ...]) -> list[int]:
    """What cuts carry, counted tensor by tensor."""
    found = []
    for i in range(len(order)):
        behind = set(order[i + 1 :])
        used = {node for user in behind for node in graph.predecessors[user]}
        found.append(sum(graph.nodes[node].output_bytes for node in used - behind))
    return found


def all_orders(graph: LayerGraph, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    left = set(range(len(graph.nodes))) - graph.inputs - set(done)
    if not left:
        yield done
    for node in left:
        if left.isdisjoint(graph.predecessors[node]):
            yield from all_orders(graph, (*done, node))


def check(graph: LayerGraph) -> tuple[int, ...]:
    order = narrow_order(graph)
    position = {node: i for i, node in enumerate(order)}
    assert sorted(order) == [node for node in range(len(graph.nodes)) if node not in graph.inputs]
    for node in order:
        assert all(position[used] < position[node] for used in graph.predecessors[node] if used in position)
    return order


@given(graphs(7))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_no_order_of_a_small_graph_is_narrower(graph):
    best = min(sum(carried(graph, order)) for order in all_orders(graph))
    assert sum(carried(graph, check(graph))) == best


@given(graphs(40))
@settings(deadline=None, derandomize=True)
def test_any_graph_becomes_a_chain(graph):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linearise, "SEARCH_STEPS", 20_000)
        order = check(graph)
    assert graph.cut_bytes(order) == carried(graph, order)
    layers = graph.profile(order, 1, "x").layers
    assert sum(layer.forward_seconds for layer in layers) == sum(
        node.forward_seconds for i, node in enumerate(graph.nodes) if i not in graph.inputs
    )
    assert all(layer.gradient_bytes <= layer.output_bytes for layer in layers)


@given(graphs(40))
@settings(deadline=None, derandomize=True)
def test_with_hardly_any_search_the_chain_is_no_worse_than_what_it_began_with(graph):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linearise, "SEARCH_STEPS", 1)
        patch.setattr(linearise, "LONGEST_STRETCH", 5)
        order = check(graph)
    given = tuple(node for node in graph.sorted_nodes if node not in graph.inputs)
    assert sum(carried(graph, order)) <= sum(carried(graph, given))


def test_a_branch_that_shrinks_comes_before_one_that_grows():
    drawing = Drawing()
    first = drawing.node(10)
    large, small = drawing.chain(first, 50, 50), drawing.chain(first, 2, 2)
    last = drawing.node(1, large, small)
    assert narrow_order(drawing.graph()) == (first, small - 1, small, large - 1, large, last)


def test_a_side_input_is_embedded_when_it_is_needed():
    drawing = Drawing()
    source, target = drawing.input(1), drawing.input(1)
    embedded = drawing.node(20, target)
    encoded = drawing.chain(source, 20, 20, 20)
    drawing.node(5, encoded, embedded)
    assert narrow_order(drawing.graph()) == (3, 4, 5, embedded, 6)


def test_a_result_that_nobody_uses_does_not_keep_others_alive():
    drawing = Drawing()
    a = drawing.node(50)
    b, unused = drawing.node(5, a), drawing.node(50, a)
    drawing.chain(b, 5, 5)
    assert narrow_order(drawing.graph())[:3] == (a, unused, b)


def test_each_block_between_two_narrow_places_is_ordered_as_if_it_were_alone():
    def blocks(number: int) -> LayerGraph:
        drawing = Drawing()
        at = drawing.node(10, drawing.input())
        for _ in range(number):
            at = drawing.node(10, drawing.chain(at, 9, 1, 9), drawing.chain(at, 1, 8, 3), at)
        return drawing.graph()

    alone = min(sum(carried(blocks(1), order)) for order in all_orders(blocks(1)))
    assert sum(blocks(10).cut_bytes(check(blocks(10)))) == 10 * alone


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "graph, widest, narrowest_of_each",
    [
        (inception(54), 240, (23, 100)),
        (nasnet(27), 170, (45, 60)),
    ],
    ids=["inception", "nasnet"],
)
def test_the_largest_published_graphs(graph, widest, narrowest_of_each):
    assert len(graph.nodes) > 1200
    cuts = graph.cut_bytes(check(graph))
    cell, narrowest = narrowest_of_each
    assert max(cuts) <= widest
    assert all(min(cuts[i : i + 2 * cell]) <= narrowest for i in range(len(cuts) - 2 * cell))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "make", [lambda: straight(100_000), lambda: parallel(1000), lambda: parallel(10_000)]
)
def test_extreme_graphs_take_seconds(make):
    check(make())


@pytest.mark.timeout(30)
def test_dense_graphs_take_seconds():
    drawing = Drawing()
    above = [drawing.node(random.Random(0).randint(1, 9)) for _ in range(300)]
    for _ in range(300):
        drawing.node(1, *above)
    check(drawing.graph())


@pytest.mark.timeout(30)
def test_one_input_that_all_layers_use():
    drawing = Drawing()
    mask = drawing.input(3)
    at = drawing.node(1, mask)
    for _ in range(50_000):
        at = drawing.node(1, at, mask)
    graph = drawing.graph()
    assert set(graph.cut_bytes(check(graph))[:-1]) == {4}
