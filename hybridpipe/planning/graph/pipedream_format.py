"""PipeDream's layer graphs (graph.txt): from the text to a `LayerGraph`.

A line that is not indented is a node, an indented pair is an edge (PipeDream, SOSP 2019; its profiler):

    node2 -- Conv2d(3, 64, ...) -- forward_compute_time=2.5, backward_compute_time=4.0,
        activation_size=1048576.0, parameter_size=7168.000          (on one line)
    <tab>node1 -- node2

Times are milliseconds a minibatch, sizes bytes; a layer with several results lists their sizes, as in
`[64.0; 32.0]`. The file does not say how many samples a minibatch had. Nodes called `Input`, `Input0` and so
on are the model's inputs; their times are those of loading data.

The file lacks the bytes that a layer keeps for its backward. They are taken to be its result, which is too
much where a backward needs less. Views and layers that work in place have no memory of their own and count
nothing.
"""

import math
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError
from reprlib import Repr

from hybridpipe.planning.graph.graph import LayerGraph
from hybridpipe.planning.profile import LayerProfile

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_LARGEST = 1e12  # bytes or milliseconds of one layer; sums of millions of them still fit into 64 bits
_INPUT = re.compile(r"Input(?![A-Za-z])")
_OWNS_NO_MEMORY = re.compile(r"(View|__getitem__)\b|\w+\(([^:]*, )?inplace\b(?!=False)")

_SHOWN = Repr()
_SHOWN.maxstring = 60  # characters of a quoted mistake


def parse_graph(text: str) -> LayerGraph:
    """Return the graph of a graph.txt; layers are named by node and kind, such as `node2 Conv2d`.

    Raises:
        ValueError: the first mistake, with its line.
    """
    index: dict[str, int] = {}
    nodes: list[LayerProfile] = []
    inputs: set[int] = set()
    edges: dict[tuple[str, str], int] = {}  # and the line of each
    for number, line in enumerate(text.split("\n"), 1):
        parts = [part.strip() for part in line.split(" -- ")]
        try:
            if not line.strip():
                continue
            if line[0].isspace():
                edges.setdefault(_edge(parts), number)
            else:
                name, description, layer = _node(parts)
                if name in index:
                    raise ValueError(f"node must be a new one, got {_told(name)} again")
                if _INPUT.match(description):
                    inputs.add(len(nodes))
                index[name] = len(nodes)
                nodes.append(layer)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return _joined(index, nodes, frozenset(inputs), edges)


def _joined(
    index: Mapping[str, int],
    nodes: Sequence[LayerProfile],
    inputs: frozenset[int],
    edges: Mapping[tuple[str, str], int],
) -> LayerGraph:
    predecessors: list[list[int]] = [[] for _ in nodes]
    for (source, target), number in edges.items():
        for name in (source, target):
            if name not in index:
                raise ValueError(f"line {number}: edge must join nodes of the file, got {_told(name)}")
        if index[target] in inputs:
            raise ValueError(f"line {number}: edge must not lead to an input, got {_told(target)}")
        predecessors[index[target]].append(index[source])
    try:
        return LayerGraph(tuple(nodes), tuple(map(tuple, predecessors)), inputs)
    except CycleError as error:
        names = list(index)
        source, target = (names[node] for node in error.args[1][:2])
        number = edges[source, target]
        raise ValueError(
            f"line {number}: edge must not close a cycle, got {_told(source)} -- {_told(target)}"
        ) from None


def _edge(parts: list[str]) -> tuple[str, str]:
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"edge must be 'NODE -- NODE', got {_told(' -- '.join(parts))}")
    return parts[0], parts[1]


def _node(parts: list[str]) -> tuple[str, str, LayerProfile]:
    """Return a node's name, its description in the file, and its figures as those of a layer."""
    if parts[-1].startswith("stage_id="):  # PipeDream's planner adds the stage that it chose
        parts = parts[:-1]
    if len(parts) < 3 or not all(parts):
        raise ValueError(f"node must be 'NODE -- KIND -- {_FIELDS[0]}=…, …', got {_told(' -- '.join(parts))}")
    name, *kind, costs = parts
    description = " -- ".join(kind)
    fields = [field.strip().partition("=") for field in costs.split(",")]
    if sorted(field for field, _, _ in fields) != sorted(_FIELDS):
        raise ValueError(f"node must give {', '.join(_FIELDS)} once each, got {_told(costs)}")
    figures = {field: _figure(field, value) for field, _, value in fields}
    forward, backward, result, parameters = (figures[field] for field in _FIELDS)
    layer = LayerProfile(
        name=f"{name} {description.partition('(')[0]}".rstrip(),
        forward_seconds=forward / 1e3,
        backward_seconds=backward / 1e3,
        parameter_bytes=round(parameters),
        output_bytes=round(result),
        activation_bytes=0 if _OWNS_NO_MEMORY.match(description) else round(result),
    )
    return name, description, layer


def _figure(field: str, text: str) -> float:
    """Return a number, or the sum of a list of numbers."""
    is_list = field == "activation_size" and text.startswith("[") and text.endswith("]")
    try:
        values = [float(item) for item in (text[1:-1].split(";") if is_list else [text])]
    except ValueError:
        values = [math.nan]
    total = sum(values)
    if not (all(value >= 0 for value in values) and total <= _LARGEST):
        raise ValueError(f"{field} must be a number from 0 to {_LARGEST:g}, got {_told(text)}")
    return total


def _told(text: str) -> str:
    return _SHOWN.repr(text)
