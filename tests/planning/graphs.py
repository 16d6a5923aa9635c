"""Layer graphs to reason about by hand, and large ones in the style of published models."""

from itertools import count

from hybridpipe.planning.graph.graph import LayerGraph
from hybridpipe.planning.profile import LayerProfile


class Drawing:
    """A graph drawn node by node; `node` and `chain` return the node that others can use."""

    def __init__(self) -> None:
        self.nodes: list[LayerProfile] = []
        self.predecessors: list[tuple[int, ...]] = []
        self.inputs: set[int] = set()

    def input(self, size: int = 1) -> int:
        self.inputs.add(len(self.nodes))
        return self.node(size, parameters=0, backward=0.0)

    def node(self, size: int, *used: int, parameters: int = 4, backward: float = 2.0) -> int:
        name = f"n{len(self.nodes)}"
        self.nodes.append(LayerProfile(name, 1.0, backward, parameters, size, size))
        self.predecessors.append(used)
        return len(self.nodes) - 1

    def chain(self, used: int, *sizes: int) -> int:
        for size in sizes:
            used = self.node(size, used)
        return used

    def graph(self) -> LayerGraph:
        return LayerGraph(tuple(self.nodes), tuple(self.predecessors), frozenset(self.inputs))


def straight(num_layers: int) -> LayerGraph:
    drawing = Drawing()
    drawing.chain(drawing.input(), *[5] * num_layers)
    return drawing.graph()


def parallel(num_branches: int) -> LayerGraph:
    drawing = Drawing()
    first = drawing.node(5, drawing.input())
    drawing.node(1, *(drawing.chain(first, 3, i % 7 + 1) for i in range(num_branches)))
    return drawing.graph()


def inception(num_cells: int) -> LayerGraph:
    """Four branches a cell, 23 layers: Szegedy et al. 2015."""
    drawing = Drawing()
    at = drawing.node(100, drawing.input())
    for _ in range(num_cells):
        branches = ((30, 30, 30), (20, 20, 20, 40, 40, 40), (10,) * 3 + (15,) * 6, (100, 15, 15, 15))
        at = drawing.node(100, *(drawing.chain(at, *sizes) for sizes in branches))
    return drawing.graph()


def nasnet(num_cells: int) -> LayerGraph:
    """Each cell uses the two cells before, 45 layers: Zoph et al. 2018."""
    drawing = Drawing()

    def separable(used: int) -> int:
        return drawing.chain(used, *[10] * 6)

    before = at = drawing.chain(drawing.input(), 60, 60)
    for _ in range(num_cells):
        left, right = drawing.chain(before, 60, 10, 10), drawing.chain(at, 60, 10, 10)
        sums = (
            drawing.node(10, separable(right), separable(left)),
            drawing.node(10, separable(left), separable(left)),
            drawing.node(10, drawing.chain(right, 10), left),
            drawing.node(10, drawing.chain(left, 10), drawing.chain(left, 10)),
            drawing.node(10, separable(right), right),
        )
        before, at = at, drawing.node(60, right, *sums)
    drawing.chain(at, 60, 1)
    return drawing.graph()


def text_of(graph: LayerGraph) -> str:
    """The graph as PipeDream writes it, nodes and edges in no helpful order."""
    numbers = count()
    nodes = [
        f"{node.name} -- {f'Input{next(numbers)}' if i in graph.inputs else 'Conv2d(3, 3)'} -- "
        f"forward_compute_time={node.forward_seconds * 1e3:.3f}, "
        f"backward_compute_time={node.backward_seconds * 1e3:.3f}, "
        f"activation_size={node.output_bytes:.3f}, parameter_size={node.parameter_bytes:.3f}"
        for i, node in enumerate(graph.nodes)
    ]
    edges = [
        f"\t{graph.nodes[used].name} -- {graph.nodes[user].name}"
        for user, all_used in enumerate(graph.predecessors)
        for used in all_used
    ]
    return "\n".join(nodes[::2] + nodes[1::2] + edges[::-1])
