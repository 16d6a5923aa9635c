"""Stage program: the dynamic program over suffixes of the layers and slots that finds the cuts.

It finds the least sum of stages and cuts under a bound on their maximum, the least maximum, and under a
maximum the most even plan. A slot fixes the ranks of the next stage, the ranks that are left, and the
microbatches in flight. Not known here: the origin of the figures of stages (`layer_costs`) and cuts
(`links`), of slots (`placement`), and the order of the bounds (`partition`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hybridpipe.planning.cost.formula import cut_bytes
from hybridpipe.planning.cost.layer_costs import LayerCosts, StageTable
from hybridpipe.planning.cost.links import Floats, Ints
from hybridpipe.planning.search.placement import SlotGraph

MAX_STARTS = 4  # first stages whose best plan is kept, where only the maximum counts
# Figures of stages in one pass. A small pass is dominated by calls, so several bounds share one: for VGG-16
# on 16 ranks four bounds take 1.8 times as long as one. More figures would not stay in the cache.
AT_ONCE = 2**18
TINY = 1e-300
# Bounds of a pass that narrows an optimum down; its relative width at the end, also where bounds do not share
# a pass.
NUM_BOUNDS, CLOSE, ROUGHLY = 4, 1e-10, 2e-2
SAME = 1e-12  # relative: figures that differ by less are equal


@dataclass(frozen=True, slots=True)
class StagePath:
    """A way through the program: slots and the edges between their layers, its sum, maximum and value.

    Args:
        busiest: the maximum without the waits for gradients.
        variants: the way to run each stage, as in `StageTable`.
    """

    slots: list[int]
    edges: list[int]
    total: float
    busiest: float
    slowest: float
    seconds: float
    variants: list[int]


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Sums and maxima of every stage on every kind of slot and of every cut.

    Args:
        tables: of `layer_costs`, by kind; where ways to run a stage do not beat each other, several.
        stage_sums, stage_maxima, stage_variants: by kind and table, at `[d, i]` the stage of the d+1 layers
            from i on.
        cut_sums, cut_maxima: at `[cut, edge]`.
        bound: every maximum must be below it.
        tie: cost of a rank.
    """

    costs: LayerCosts
    graph: SlotGraph
    tables: list[list[StageTable]]
    stage_sums: list[list[Floats]]
    stage_maxima: list[list[Floats]]
    stage_variants: list[list[Ints]]
    cut_sums: Floats
    cut_maxima: Floats
    bound: float
    tie: float

    @classmethod
    def of_stages(
        cls, costs: LayerCosts, graph: SlotGraph, widths: Sequence[int], bound: float, tie: float
    ) -> "StageProgram":
        """Return the program over stages with at most `widths` layers, by kind."""
        tables = costs.tables(graph.kinds, widths)
        latency, per_byte, busy, _ = graph.figures.T[:, :, None]
        cut_maxima = busy * cut_bytes(costs.request.schedule, costs.output, costs.returned)
        cut_maxima[:, ~costs.can_cut] = math.inf
        return cls(
            costs,
            graph,
            tables,
            stage_sums=[[table.summed for table in each] for each in tables],
            stage_maxima=[[table.maximum for table in each] for each in tables],
            stage_variants=[[table.variant for table in each] for each in tables],
            cut_sums=2 * latency + per_byte * costs.moved,
            cut_maxima=cut_maxima,
            bound=bound,
            tie=tie if math.isfinite(tie) else 0.0,
        )

    @property
    def num_figures(self) -> int:
        """The number of figures of all stages."""
        return sum(values.size for each in self.stage_sums for values in each)

    def updating_within(self, limit: float, bound: float) -> "StageProgram":
        """Return the program over stages that take less than `limit` from the last backward to the end.

        Its maxima do not contain that time.
        """
        maxima = [
            [np.where(table.after < limit, table.pace, math.inf) for table in each] for each in self.tables
        ]
        return replace(self, stage_maxima=maxima, bound=bound)

    def with_messages_alone(self) -> "StageProgram":
        """Return the program in which a message does not share its cut."""
        latency, _, _, alone = self.graph.figures.T[:, :, None]
        return replace(self, cut_sums=2 * latency + alone * self.costs.moved)

    def with_edges(self, edges: Ints) -> "StageProgram":
        """Return the same program for plans that cut at these edges only."""
        starts = edges[:-1]
        lengths = np.array([np.roll(edges, -d - 1)[:-1] for d in range(len(starts))]) - starts

        def of_merged(values: Any, outside: float = math.inf) -> Any:
            inside = (lengths > 0) & (lengths <= len(values))
            return np.where(inside, values[np.where(inside, lengths - 1, 0), starts], outside)

        return replace(
            self,
            costs=self.costs.merged(edges),
            stage_sums=[list(map(of_merged, each)) for each in self.stage_sums],
            stage_maxima=[list(map(of_merged, each)) for each in self.stage_maxima],
            stage_variants=[[of_merged(values, 0) for values in each] for each in self.stage_variants],
            cut_sums=self.cut_sums[:, edges],
            cut_maxima=self.cut_maxima[:, edges],
        )

    def least_sums(
        self, bounds: Sequence[float], weights: Sequence[float] | None = None
    ) -> Iterator[StagePath | None]:
        """Yield the plan of least sum whose every maximum is below the bound, for each bound; None if there
        is none.

        The wait for gradients is also such a maximum. It grows with the sum from a slot to the end, so of the
        ways from a slot on the least sum has the least wait, and none is lost.

        Args:
            weights: of seconds, for each bound; 0 counts only ranks, and waits are neglected. None: 1.
        """
        weights = [1.0] * len(bounds) if weights is None else weights
        at_once = max(1, AT_ONCE // self.num_figures)
        for first in range(0, len(bounds), at_once):
            some = slice(first, first + at_once)
            yield from self._least_sums(np.array(bounds[some]), np.array(weights[some]))

    def _least_sums(self, bound: Floats, weight: Floats) -> list[StagePath | None]:
        """Return `least_sums` of a few bounds in one pass."""
        a_rank = np.where(weight, self.tie, 1.0)
        stages = [
            [
                np.where(
                    slowest[..., None] < bound,
                    weight * work[..., None] + a_rank * (kind.replicas + 0.01),
                    math.inf,
                )
                for work, slowest in zip(sums, maxima, strict=True)
            ]
            for kind, sums, maxima in zip(self.graph.kinds, self.stage_sums, self.stage_maxima, strict=True)
        ]
        cuts = np.where(self.cut_maxima[..., None] < bound, weight * self.cut_sums[..., None], math.inf)
        trips = self.graph.trips[:, None]
        furthest = np.where((trips > 0) & (weight > 0), below(bound) / np.maximum(trips, TINY), math.inf)
        return [paths[0] if paths else None for paths in self.solve(stages, cuts, np.add, 1, furthest)]

    def most_even(self, slowest: float) -> list[StagePath]:
        """Return the plan of least total time whose maximum is at most `slowest`, sparing no ranks."""
        bound = just_above(slowest)
        *stages, [cuts] = (
            [np.where(values < bound, values, math.inf)[..., None] for values in each]
            for each in (*self.stage_maxima, [self.cut_maxima])
        )
        return self.solve(stages, cuts, np.add, 1)[0]

    def least_maximum(self) -> list[StagePath]:
        """Return the plan of least maximum, and good ones for a few other first stages.

        Without waits for gradients one pass finds them. Where its plans wait, the optimum lies between its
        maximum without waits and with them, and passes for a few bounds at once narrow that down.
        """
        stages = [[values[..., None] for values in each] for each in self.stage_maxima]
        found = self.solve(stages, self.cut_maxima[..., None], np.maximum, MAX_STARTS)[0]
        if not found:
            return []
        low, best = found[0].busiest, min(found, key=lambda path: path.slowest)
        is_small = self.num_figures <= AT_ONCE
        while low < best.slowest * (1 - (CLOSE if is_small else ROUGHLY)):
            bounds = np.linspace(low, best.slowest, NUM_BOUNDS + 1)[1:].tolist()
            bounds = bounds if is_small else [(low + best.slowest) / 2]
            paths = list(self.least_sums(bounds))
            reached = [path for path in paths if path is not None]
            low = bounds[len(bounds) - len(reached) - 1] if len(reached) < len(bounds) else low
            best = min([best, *reached], key=lambda path: path.slowest)
        return [best, *(path for path in found if path is not best)]

    def solve(
        self,
        stages: Sequence[Sequence[Floats]],
        cuts: Floats,
        combine: np.ufunc,
        count: int,
        furthest: Floats | None = None,
    ) -> list[list[StagePath]]:
        """Return the ways with the least combination of the values of stages and cuts, from `count` first
        slots.

        Args:
            stages, cuts: at `[d, i, problem]` by kind and table, and at `[cut, edge, problem]`.
            furthest: the combination from each slot to the end must be below it, at `[slot, problem]`.
        """
        graph, n, num_problems = self.graph, self.costs.num_layers, cuts.shape[-1]
        stages = [[values[: _last_finite(values)] for values in each] for each in stages]
        width = max(1, *(len(values) for each in stages for values in each))
        # [slot, i, problem]: of the layers from i on; [slot, j, problem]: behind a stage that ends at j.
        least = np.full((len(graph.slot), n + 1, num_problems), math.inf)
        rest = np.full((len(graph.slot), n + width, num_problems), math.inf)
        rest[graph.can_end, n] = 0.0
        behind = np.moveaxis(sliding_window_view(rest[:, 1:], n, axis=1), -1, 2)
        for low, high in graph.batches:
            first, last = graph.first[low], graph.first[high]
            if first < last:
                has_next = graph.first[low:high] < graph.first[low + 1 : high + 1]
                values = combine(least[graph.behind[first:last]], cuts[graph.cut[first:last]])
                runs = graph.first[low:high][has_next] - first
                rest[low:high][has_next, :n] = np.minimum.reduceat(values, runs, axis=0)[:, :n]
            for slot in range(low, high):
                for number, values in enumerate(stages[graph.kind[slot]]):
                    if not len(values):
                        continue
                    both = combine(values, behind[slot, : len(values)])
                    if number:
                        np.minimum(least[slot, :n], np.minimum.reduce(both, axis=0), out=least[slot, :n])
                    else:
                        np.minimum.reduce(both, axis=0, out=least[slot, :n])
            if furthest is not None:
                ways = least[low:high]
                ways[ways >= furthest[low:high, None]] = math.inf
        found = []
        for p in range(num_problems):
            values = least[graph.starts, 0, p]
            chosen = np.argsort(values, kind="stable")[:count]
            starts = graph.starts[chosen[np.isfinite(values[chosen])]].tolist()
            stages_p = [[values[..., p] for values in each] for each in stages]
            cuts_p, least_p, behind_p = cuts[..., p], least[..., p], behind[..., p]
            found.append([self.trace(slot, stages_p, cuts_p, least_p, behind_p, combine) for slot in starts])
        return found

    def trace(
        self,
        slot: int,
        stages: Sequence[Sequence[Floats]],
        cuts: Floats,
        least: Floats,
        behind: Floats,
        combine: np.ufunc,
    ) -> StagePath:
        """Return the choices that lead to the least value from this slot."""
        graph, slots, edges, busiest = self.graph, [slot], [0], 0.0
        parts: list[float] = []  # of the sum, from each slot to the next
        variants: list[int] = []
        while True:
            kind, start = graph.kind[slot], edges[-1]
            ways = [combine(each[:, start], behind[slot, : len(each), start]) for each in stages[kind]]
            table, d = min(
                ((table, int(np.argmin(way))) for table, way in enumerate(ways) if len(way)),
                key=lambda chosen: ways[chosen[0]][chosen[1]],
            )
            parts.append(float(self.stage_sums[kind][table][d, start]))
            busiest = max(busiest, float(self.stage_maxima[kind][table][d, start]))
            variants.append(int(self.stage_variants[kind][table][d, start]))
            edges.append(start + d + 1)
            if edges[-1] == self.costs.num_layers:
                return self.path(slots, edges, parts, busiest, variants)
            run, stop = slice(graph.first[slot], graph.first[slot + 1]), edges[-1]
            options = combine(least[graph.behind[run], stop], cuts[graph.cut[run], stop])
            chosen = graph.first[slot] + int(np.argmin(options))
            cut, slot = graph.cut[chosen], int(graph.behind[chosen])
            parts[-1] += float(self.cut_sums[cut, stop])
            busiest = max(busiest, float(self.cut_maxima[cut, stop]))
            slots.append(slot)

    def path(
        self,
        slots: list[int],
        edges: list[int],
        parts: Sequence[float],
        busiest: float,
        variants: list[int],
    ) -> StagePath:
        """Return the path of these parts of its sum, whose longest maximum may be a wait for gradients."""
        total, slowest = 0.0, busiest
        for slot, part in zip(reversed(slots), reversed(parts), strict=True):
            total += part
            slowest = max(slowest, float(self.graph.trips[slot]) * total)
        seconds = slowest + total * (not self.costs.is_asynchronous)
        return StagePath(slots, edges, total, busiest, slowest, seconds, variants)


def below(bound: Floats) -> Floats:
    """Return the bound for figures that are multiplied before they are compared."""
    less: Floats = bound * (1 - SAME / 2)
    return less


def just_above(value: float) -> float:
    """Return the bound that admits a value, and values that differ from it by rounding."""
    return value * (1 + SAME) + 5e-324


def _last_finite(values: Floats) -> int:
    """Return the number of rows up to the last one with a finite figure."""
    rows = np.flatnonzero(np.isfinite(values).any(axis=(1, 2)))
    return int(rows[-1]) + 1 if rows.size else 0
