import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpipe.planning.graph.linearise import narrow_order
from hybridpipe.planning.graph.pipedream_format import parse_graph
from hybridpipe.planning.profile import LayerProfile
from tests.planning.graphs import nasnet, straight, text_of

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "profiles"

GRAPH = """\
node2 -- Conv2d(3, 4, kernel_size=(3, 3)) -- forward_compute_time=2.000, backward_compute_time=4.000, \
activation_size=64.0, parameter_size=432.000
node3 -- ReLU(inplace) -- forward_compute_time=0.500, backward_compute_time=0.250, \
activation_size=64.0, parameter_size=0.000
node1 -- Input -- forward_compute_time=900.000, backward_compute_time=0.000, \
activation_size=16.0, parameter_size=0.000
node4 -- LSTM(4, 4) -- forward_compute_time=3.000, backward_compute_time=0.000, \
activation_size=[32.0; 8.0; 8.0], parameter_size=100.000
node5 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=32.0, parameter_size=0.000
\tnode3 -- node4
\tnode1 -- node2
\tnode2 -- node3
\tnode1 -- node5
\tnode4 -- node5"""
LINES = GRAPH.split("\n")
NODE = LINES[0]


def chain(text: str) -> tuple[LayerProfile, ...]:
    graph = parse_graph(text)
    return graph.profile(narrow_order(graph), 1, "published").layers


def test_a_graph_becomes_a_chain():
    assert chain(GRAPH) == (
        LayerProfile("node2 Conv2d", 0.002, 0.004, 432, 64 + 16, 64, gradient_bytes=64),
        LayerProfile("node3 ReLU", 0.0005, 0.00025, 0, 64 + 16, 0, gradient_bytes=64),
        LayerProfile("node4 LSTM", 0.003, 0.0, 100, 48 + 16, 48, gradient_bytes=48),
        LayerProfile("node5 __getitem__", 0.0, 0.0, 0, 0, 0, gradient_bytes=0),
    )


@pytest.mark.parametrize(
    "text",
    [
        GRAPH + "\n",
        GRAPH.replace("\n", "\r\n"),
        GRAPH.replace("\n", "\n\n \t\n"),
        GRAPH.replace("\t", "    "),
        GRAPH.replace("\n\t", " -- stage_id=1\n\t", 1),
        GRAPH + "\n\tnode4 -- node5",
        "\n".join(LINES[::-1]),
    ],
)
def test_what_does_not_matter(text):
    assert chain(text) == chain(GRAPH)


@pytest.mark.parametrize(
    "description, is_input",
    [
        ("Input", True),
        ("Input0", True),
        ("Input12", True),
        ("InputNorm(3)", False),
        ("hidden", False),
        ("MyInput", False),
    ],
)
def test_inputs_are_known_by_their_name(description, is_input):
    graph = parse_graph(GRAPH.replace("node1 -- Input --", f"node1 -- {description} --"))
    assert graph.inputs == ({2} if is_input else set())


@pytest.mark.parametrize(
    "description, kept",
    [
        ("ReLU(inplace)", 0),
        ("ReLU(inplace=True)", 0),
        ("Dropout(p=0.5, inplace=True)", 0),
        ("Dropout(p=0.5, inplace=False)", 64),
        ("Add(inplace)", 0),
        ("Hardtanh(min_val=0, max_val=6, inplace)", 0),
        ("Add", 64),
        ("View(-1)", 0),
        ("Viewer(3)", 64),
        ("__getitem__(1)", 0),
        ("Block(  (0): Conv2d(3, 3)  (1): ReLU(inplace))", 64),
        ("Block(  (0): Conv2d(3, 3)  (1): Dropout(p=0.5, inplace))", 64),
    ],
)
def test_views_and_layers_in_place_keep_nothing_of_their_own(description, kept):
    (layer,) = parse_graph(NODE.replace("Conv2d(3, 4, kernel_size=(3, 3))", description)).nodes
    assert (layer.output_bytes, layer.activation_bytes) == (64, kept)


FIELDS = "forward_compute_time, backward_compute_time, activation_size, parameter_size"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "nodes must hold at least one layer besides inputs, got none"),
        (LINES[2], "nodes must hold at least one layer besides inputs, got none"),
        ("{}", "line 1: node must be 'NODE -- KIND -- forward_compute_time=…, …', got '{}'"),
        (
            "node1 -- node2",
            "line 1: node must be 'NODE -- KIND -- forward_compute_time=…, …', got 'node1 -- node2'",
        ),
        ("a -- b -- c", f"line 1: node must give {FIELDS} once each, got 'c'"),
        (
            NODE.replace(", parameter_size=432.000", ""),
            f"line 1: node must give {FIELDS} once each, got 'forward",
        ),
        (f"{NODE}, activation_size=1", f"line 1: node must give {FIELDS} once each, got 'forward"),
        (f"{NODE}, x=1", f"line 1: node must give {FIELDS} once each, got 'forward"),
        (f"{NODE}\n{NODE}", "line 2: node must be a new one, got 'node2' again"),
        (f"{NODE}\n\tnode2", "line 2: edge must be 'NODE -- NODE', got 'node2'"),
        (f"{NODE}\n\tnode2 -- ", "line 2: edge must be 'NODE -- NODE', got 'node2 -- '"),
        (
            f"{NODE}\n\tnode2 -- node2 -- node2",
            "line 2: edge must be 'NODE -- NODE', got 'node2 -- node2 -- n",
        ),
        (f"\tnode2 -- node7\n{NODE}", "line 1: edge must join nodes of the file, got 'node7'"),
        (f"\tnode2 -- node2\n{NODE}", "line 1: edge must not close a cycle, got 'node2' -- 'node2'"),
        (f"{GRAPH}\n\tnode4 -- node2", "edge must not close a cycle, got 'node"),
        (f"{GRAPH}\n\tnode4 -- node1", "line 11: edge must not lead to an input, got 'node1'"),
        *(
            (NODE.replace(old, new), f"line 1: {field} must be a number from 0 to 1e+12, got '{got}")
            for old, new, field, got in (
                ("2.000", "-1", "forward_compute_time", "-1'"),
                ("4.000", "nan", "backward_compute_time", "nan'"),
                ("432.000", "inf", "parameter_size", "inf'"),
                ("432.000", "1e300", "parameter_size", "1e300'"),
                ("432.000", "[1; 2]", "parameter_size", "[1; 2]'"),
                ("64.0", "9" * 1000, "activation_size", "999"),
                ("64.0", "[1; -1]", "activation_size", "[1; -1]'"),
                ("64.0", "[1; x]", "activation_size", "[1; x]'"),
                ("64.0", "[1e12; 1e12]", "activation_size", "[1e1"),
                ("64.0", "", "activation_size", "'"),
            )
        ),
        ("x" * 100_000, "line 1: node must be 'NODE -- KIND -- forward_compute_time=…, …', got 'xxx"),
    ],
)
def test_a_mistake_is_named(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_graph(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_cycle_is_found_at_one_of_its_edges():
    with pytest.raises(ValueError, match="edge must not close a cycle") as error:
        parse_graph(f"{GRAPH}\n\tnode4 -- node2")
    line = int(re.match(r"line (\d+)", str(error.value))[1])
    source, target = re.findall(r"'(node\d)'", str(error.value))
    assert f"{GRAPH}\n\tnode4 -- node2".split("\n")[line - 1] == f"\t{source} -- {target}"
    assert {source, target} <= {"node2", "node3", "node4"}


FIGURE = st.sampled_from(["0", "1.5", "-1", "nan", "1e999", "[1; 2]", "[]", "", "x", "1_0"])
NAME = st.sampled_from(["a", "b", "c", "d", "", " "])
JUNK_LINE = st.one_of(
    st.text(),
    st.builds("\t{} -- {}".format, NAME, NAME),
    st.builds(
        "{} -- {} -- forward_compute_time={}, backward_compute_time=1, "
        "activation_size={}, parameter_size=2".format,
        NAME,
        st.sampled_from(["Input", "Input1", "Conv", "x -- y", "("]),
        st.sampled_from(["1", "2.5"]) | FIGURE,
        st.sampled_from(["1", "[2; 3]"]) | FIGURE,
    ),
)


@given(st.lists(JUNK_LINE, max_size=12).map("\n".join))
@settings(deadline=None, derandomize=True, max_examples=500)
def test_any_text_is_a_profile_or_a_mistake_of_one_line(text):
    try:
        layers = chain(text)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert layers


@pytest.mark.timeout(30)
@pytest.mark.parametrize("graph", [nasnet(27), straight(100_000)], ids=["nasnet", "straight"])
def test_a_large_text(graph):
    layers = chain(text_of(graph))
    assert len(layers) == len(graph.nodes) - len(graph.inputs)
    assert sum(layer.forward_seconds for layer in layers) == len(layers)


# Model: layers, milliseconds forward and back, megabytes of parameters.
FIGURES = {
    "alexnet": (22, 44.8, 40.5, 244.4),
    "gnmt": (45, 33.5, 55.9, 775.1),
    "resnet18": (70, 107.4, 152.3, 46.8),
    "resnet50": (176, 182.5, 260.9, 102.2),
    "squeezenet1_0": (67, 113.2, 172.1, 5.0),
    "vgg16": (40, 233.9, 438.6, 553.4),
}


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published profiles are not here")
@pytest.mark.parametrize("model", FIGURES)
def test_the_published_profiles(model):
    layers = chain((PUBLISHED / model / "graph.txt").read_text())
    num_layers, forward, backward, parameters = FIGURES[model]
    assert len(layers) == num_layers
    assert sum(layer.forward_seconds for layer in layers) * 1e3 == pytest.approx(forward, abs=0.1)
    assert sum(layer.backward_seconds for layer in layers) * 1e3 == pytest.approx(backward, abs=0.1)
    assert sum(layer.parameter_bytes for layer in layers) / 1e6 == pytest.approx(parameters, abs=0.1)
