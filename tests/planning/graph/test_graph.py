import re
from graphlib import CycleError
from itertools import pairwise

import pytest

from hybridpipe.planning.graph.graph import LayerGraph
from hybridpipe.planning.profile import LayerProfile
from tests.planning.graphs import Drawing

LAYER = LayerProfile("layer", 1.0, 2.0, 4, 8, 8)


@pytest.mark.parametrize(
    "nodes, predecessors, inputs, message",
    [
        ((), (), (), "nodes must hold at least one layer besides inputs, got none"),
        ((LAYER,), ((),), (0,), "nodes must hold at least one layer besides inputs, got none"),
        ((LAYER, LAYER), ((1,), ()), (0,), "predecessors of the input 'layer' must be none"),
    ],
)
def test_a_mistake_is_named(nodes, predecessors, inputs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LayerGraph(nodes, predecessors, frozenset(inputs))


@pytest.mark.parametrize("predecessors", [((0,),), ((1,), (0,)), ((), (0, 2), (1,))])
def test_a_cycle_is_told_node_by_node(predecessors):
    with pytest.raises(CycleError) as error:
        LayerGraph((LAYER,) * len(predecessors), predecessors)
    cycle = error.value.args[1]
    assert cycle[0] == cycle[-1]
    assert all(used in predecessors[user] for used, user in pairwise(cycle))


def test_a_tensor_is_carried_from_where_it_is_made_to_its_last_use_and_only_once():
    drawing = Drawing()
    a = drawing.node(1)
    b = drawing.node(10, a)
    c = drawing.node(100, a, b)
    d = drawing.node(1000, a, b, c)
    assert drawing.graph().cut_bytes([a, b, c, d]) == [1, 11, 111, 0]


def test_what_nobody_uses_is_not_carried():
    drawing = Drawing()
    a = drawing.node(1)
    b, c = drawing.node(10, a), drawing.node(100, a)
    assert drawing.graph().cut_bytes([a, b, c]) == [1, 1, 0]


def test_an_input_is_carried_from_the_start_and_without_a_gradient():
    drawing = Drawing()
    tokens, mask = drawing.input(1), drawing.input(10)
    a = drawing.node(100, tokens)
    b = drawing.node(1000, a)
    c = drawing.node(10_000, b, mask)
    profile = drawing.graph().profile([a, b, c], samples=4, device="x")
    assert [layer.output_bytes for layer in profile.layers] == [110, 1010, 0]
    assert [layer.gradient_bytes for layer in profile.layers] == [100, 1000, 0]
    assert (profile.samples, profile.device) == (4, "x")


def test_a_gradient_begins_at_a_layer_with_parameters_or_with_a_backward():
    drawing = Drawing()
    tokens = drawing.input()
    length = drawing.node(1, tokens, parameters=0, backward=0.0)
    weights = drawing.node(1, tokens, backward=0.0)
    active = drawing.node(1, tokens, parameters=0)
    after = drawing.node(1, length, weights, parameters=0, backward=0.0)
    neither = drawing.node(1, length, parameters=0, backward=0.0)
    assert drawing.graph().with_gradient() == {weights, active, after}
    assert not drawing.graph().with_gradient() & {tokens, length, neither}


def test_an_input_has_no_gradient_even_if_a_backward_was_measured():
    drawing = Drawing()
    loaded = drawing.node(1, parameters=4, backward=2.0)
    drawing.inputs.add(loaded)
    view = drawing.node(1, loaded, parameters=0, backward=0.0)
    assert drawing.graph().with_gradient().isdisjoint({loaded, view})


def test_the_chain_keeps_each_layers_own_figures():
    drawing = Drawing()
    a = drawing.node(7, parameters=3, backward=5.0)
    b = drawing.node(9, a)
    assert drawing.graph().profile([a, b], 1, "x").layers == (
        LayerProfile("n0", 1.0, 5.0, 3, output_bytes=7, activation_bytes=7, gradient_bytes=7),
        LayerProfile("n1", 1.0, 2.0, 4, output_bytes=0, activation_bytes=9, gradient_bytes=0),
    )
