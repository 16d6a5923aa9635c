"""Layer graph: layers with the tensors between them, and their costs in the order of a chain.

A cut after a position of the chain carries every tensor that was made at or before it and is used after it:
once, however many layers use it there. The model's inputs exist from the start, so one that is used late is
carried over every cut before: only the first stage reads data. A tensor without a user is not carried. Not
known here: the choice of the chain (`hybridpipe.planning.graph.linearise`) and files
(`hybridpipe.planning.graph.pipedream_format`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import accumulate

from hybridpipe.planning.profile import LayerProfile, ModelProfile


@dataclass(frozen=True)
class LayerGraph:
    """Layers and the tensors between them.

    Args:
        nodes: the cost of each layer for one microbatch; `output_bytes` is here the layer's own result only.
        predecessors: for each node, the nodes whose results it uses.
        inputs: the nodes that are the model's inputs. They are no layers: their results exist from the start,
            they have no gradient, and their times do not count.

    Raises:
        ValueError: there are no layers, or an input uses something. For a cycle it is a graphlib.CycleError,
            whose second argument lists the cycle's nodes in order and the first one again at the end.
    """

    nodes: tuple[LayerProfile, ...]
    predecessors: tuple[tuple[int, ...], ...]
    inputs: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.nodes) == len(self.inputs):
            raise ValueError("nodes must hold at least one layer besides inputs, got none")
        for node in self.inputs:
            if self.predecessors[node]:
                raise ValueError(f"predecessors of the input {self.nodes[node].name!r} must be none")
        _ = self.sorted_nodes

    @cached_property
    def sorted_nodes(self) -> tuple[int, ...]:
        """All nodes, each after those that it uses."""
        return tuple(TopologicalSorter(dict(enumerate(self.predecessors))).static_order())

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The layers that use each node's result, by node."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for node, used in enumerate(self.predecessors):
            for each in set(used):
                users[each].append(node)
        return tuple(map(tuple, users))

    def cut_bytes(self, order: Sequence[int], results: Iterable[int] | None = None) -> list[int]:
        """Return the bytes that a cut after each position of this order carries; 0 after the last.

        Args:
            results: count the results of these nodes only; None: of all.
        """
        position = {node: i for i, node in enumerate(order)}
        change = [0] * len(order)
        for node in range(len(self.nodes)) if results is None else results:
            if users := self.successors[node]:
                change[position.get(node, 0)] += self.nodes[node].output_bytes
                change[max(position[user] for user in users)] -= self.nodes[node].output_bytes
        return list(accumulate(change))

    def with_gradient(self) -> frozenset[int]:
        """Return the nodes whose results have a gradient.

        They are those at or behind a layer with parameters or with a backward. Inputs, and results computed
        from inputs alone, such as masks and lengths, have none.
        """
        found: set[int] = set()
        for node in self.sorted_nodes:
            layer = self.nodes[node]
            has_backward = layer.parameter_bytes > 0 or layer.backward_seconds > 0
            if node not in self.inputs and (has_backward or not found.isdisjoint(self.predecessors[node])):
                found.add(node)
        return frozenset(found)

    def profile(self, order: Sequence[int], samples: int, device: str) -> ModelProfile:
        """Return the layers in this order, each after those that it uses, as the profile of a chain.

        Args:
            samples: the size of the microbatch that the nodes' figures belong to.
        """
        forward, back = self.cut_bytes(order), self.cut_bytes(order, self.with_gradient())
        layers = (
            replace(self.nodes[node], output_bytes=sent, gradient_bytes=returned)
            for node, sent, returned in zip(order, forward, back)
        )
        return ModelProfile(tuple(layers), samples, device)
