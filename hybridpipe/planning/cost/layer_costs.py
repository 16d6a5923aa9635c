"""Layer costs: the formula of `cost.formula` in tables over first layers and lengths of stages.

Each layer counts its own copy of a shared parameter. Not known here: ranks, beyond the kinds of stages that
`placement` makes of them.
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hybridpipe.planning.cluster import Cluster, Rings
from hybridpipe.planning.cost.exchanges import (
    BACKWARD_CALLS,
    FORWARD_CALLS,
    sums_seconds,
    token_seconds,
)
from hybridpipe.planning.cost.formula import (
    StageTerms,
    measured_speed,
    port_seconds,
    stage_parts,
    stage_terms,
)
from hybridpipe.planning.cost.links import Floats, Ints
from hybridpipe.planning.cost.memory import stage_memory
from hybridpipe.planning.layer_parts import NO_SUMS
from hybridpipe.planning.plan import Variant
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.schedules.generators import ceil_div, per_update

PLAINLY = Variant()
# The figures of layers that add up to those of a stage.
OF_PASSES = ("forward", "tokens", "exchanges", "summing", "summing_again")
SUMMED = (*OF_PASSES, "update", "parameters", "activations", "split", "own")


class StageKind(NamedTuple):
    """The properties of a stage, besides its layers, that its costs depend on.

    Args:
        most_held: in flight in the stage that has most, which decides how long others keep a split backward
            (`generators.weight_lags`). 0: not known, and memory between the halves is neglected.
    """

    replicas: int
    speed: float
    rings: Rings
    memory_bytes: float
    in_flight: int
    most_held: int = 0


class StageTable(NamedTuple):
    """Seconds of stages of one kind, shape (lengths, layers).

    Args:
        summed: in the sum.
        pace: of the stage and its ports in the maximum; infinite where the stage does not fit into memory.
        after: from the last backward to the end of the update, of a synchronous schedule; else 0.
        variant: index into `LayerCosts.variants`.
    """

    summed: Floats
    pace: Floats
    after: Floats
    variant: Ints

    @property
    def maximum(self) -> Floats:
        """Seconds of the stage in the maximum."""
        return self.pace + self.after


def may_be_faster(variant: Variant, other: Variant) -> bool:
    """True if a variant may be faster than another one that fits.

    Recomputing adds a forward f to the work. That hides up to f more of a reduction. So the formula's maximum
    falls by at most f where its sum grows by f, and waits for gradients grow with the sum. An asynchronous
    schedule has no sum, but the work and the reduction are in one term of its maximum.
    """
    return variant.recompute <= other.recompute and (variant.zero > 0 or variant.experts)


def fastest(tables: Sequence[StageTable]) -> list[StageTable]:
    """Return tables in which no stage is as fast as the same one of another table; ties to the first.

    The first table has all stages.
    """
    if len(tables) == 1:
        return list(tables)
    sums, maxima = (np.array([getattr(each, name) for each in tables]) for name in ("summed", "maximum"))
    stays = undominated(np.where(np.isfinite(maxima), sums, math.inf), maxima)
    place = np.cumsum(stays, axis=0) - 1
    found = []
    for number in range(int(place.max()) + 1):
        here = stays & (place == number)
        chosen = np.argmax(here, axis=0)[None]
        figures: list[Any] = [
            np.take_along_axis(np.array(each), chosen, axis=0)[0] for each in zip(*tables, strict=True)
        ]
        table = StageTable(*figures)
        if number:
            table = table._replace(pace=np.where(here.any(axis=0), table.pace, math.inf))
        found.append(table)
    return found


def undominated(sums: Floats, maxima: Floats) -> NDArray[np.bool_]:
    """Return True where no other choice has as small a sum and as small a maximum; ties to the first.

    Args:
        sums, maxima: seconds, shape (choices, ...). Infinite where a choice is not allowed.
    """
    stays = np.ones(sums.shape, dtype=np.bool_)
    for one in range(len(sums)):
        for other in range(len(sums)):
            if one != other:
                worse = (sums[other] <= sums[one]) & (maxima[other] <= maxima[one])
                if other > one:
                    worse &= (sums[other] < sums[one]) | (maxima[other] < maxima[one])
                stays[one] &= ~worse
    return stays


class LayerCosts:
    """The costs of layers at full speed, shape (layers,), and of cuts between them, shape (layers + 1,).

    Some of them depend on the microbatches that a rank has of an update: `of_update`.

    Args:
        num_microbatches: of a minibatch.
        request: of the plans, under a schedule that is not AUTO.
        variants: the ways to run a stage, the simplest first. Empty: the request's.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        num_microbatches: int,
        request: PlanRequest,
        variants: Sequence[Variant] = (),
    ) -> None:
        layers, speed = profile.layers, measured_speed(profile, cluster)
        forward = np.array([layer.forward_seconds for layer in layers]) * speed
        self.cluster, self.num_microbatches, self.request = cluster, num_microbatches, request
        self.state_factor, self.copied_factor = profile.state_factor, profile.copied_factor
        self.variants = tuple(variants or request.ways(profile.has_experts))
        self._layers, self._speed, self.forward = layers, speed, forward
        self._of_update: dict[tuple[str, int], Floats] = {}
        self.update = np.array([layer.update_seconds for layer in layers]) * speed
        self.parameters = np.array([layer.parameter_bytes for layer in layers], dtype=np.float64)
        self.own = np.array([layer.own_bytes for layer in layers], dtype=np.float64)
        self.tokens = np.array([layer.token_bytes for layer in layers], dtype=np.float64)
        self.exchanges = np.array([layer.num_exchanges for layer in layers], dtype=np.float64)
        summing = np.array([sums_seconds(cluster.summing, layer.sums or NO_SUMS) for layer in layers])
        self.summing, self.summing_again = summing.sum(1), summing[:, 0]
        self._profile, self._shared_by = profile, dict[int, LayerCosts | None]()
        self.activations = np.array([layer.activation_bytes for layer in layers], dtype=np.float64)
        self.split = np.array([layer.split_bytes for layer in layers], dtype=np.float64)  # NaN: not known
        self.largest = np.array([layer.largest_parameter_bytes for layer in layers], dtype=np.float64)
        self.output = np.array([0.0, *(layer.output_bytes for layer in layers)])
        self.returned = np.array([0.0, *(layer.returned_bytes for layer in layers)])
        self.edges = np.arange(len(layers) + 1)
        self.can_cut = np.ones(len(layers) + 1, dtype=np.bool_)
        self.can_cut[[0, -1]] = False
        for shared in profile.shared:
            if self.is_asynchronous or not shared.separable:
                self.can_cut[shared.layers[0] + 1 : shared.layers[-1] + 1] = False
        self.sums: dict[tuple[str, int], Floats] = {}  # tables of `between`, by name and rounds
        self._tables: dict[StageKind, list[StageTable]] = {}

    @property
    def num_layers(self) -> int:
        """The number of layers, merged ones counted once."""
        return len(self.edges) - 1

    @property
    def is_asynchronous(self) -> bool:
        """True if the plans have no sum, only a maximum."""
        return self.request.traits.is_asynchronous

    def per_update(self, replicas: int) -> int:
        """Return the most microbatches that one of `replicas` replicas has of an update."""
        return per_update(self.request.schedule, self.num_microbatches, replicas)

    def mean_work(self, replicas: int = 1, variant: Variant = PLAINLY) -> Floats:
        """Return each layer's seconds of a microbatch, the mean over those of an update."""
        rounds = self.per_update(replicas)
        work: Floats = self.of_update("work", rounds) + self.of_update("products", rounds) / rounds
        return work + variant.recompute * self.forward

    @property
    def moved(self) -> Floats:
        """Bytes over a cut at each edge, both ways."""
        moved: Floats = self.output + self.returned
        return moved

    def merged(self, edges: Ints) -> "LayerCosts":
        """Return the same with only these edges to cut at."""
        merged = copy(self)
        merged.sums, merged._tables, merged._shared_by = {}, {}, {}
        for name in SUMMED:
            setattr(merged, name, np.add.reduceat(getattr(self, name), edges[:-1]))
        merged.largest = np.maximum.reduceat(self.largest, edges[:-1])
        for name in ("output", "returned", "edges", "can_cut"):
            setattr(merged, name, getattr(self, name)[edges])
        return merged

    def shared_by(self, replicas: int) -> "LayerCosts | None":
        """Return the costs of layers as one of several replicas has them that share experts.

        None where there are no experts, or replicas do not divide them.
        """
        if replicas not in self._shared_by:
            experts = [layer.experts for layer in self._layers if layer.experts is not None]
            made: LayerCosts | None = None
            if experts and all(each.are_divided_by(replicas) for each in experts):
                layers = tuple(layer.shared_by(replicas) for layer in self._layers)
                profile = replace(self._profile, layers=layers)
                whole = LayerCosts(profile, self.cluster, self.num_microbatches, self.request, self.variants)
                made = whole if self.num_layers == len(layers) else whole.merged(self.edges)
            self._shared_by[replicas] = made
        return self._shared_by[replicas]

    def of_update(self, name: str, rounds: int) -> Floats:
        """Return the costs of layers on a rank that has `rounds` microbatches of an update, shape (layers,).

        Args:
            name: backward, whole (where gradients are reduced after each microbatch), weight, work, least
                (work, if replicas share experts as it is fastest) or products, in seconds, nothing
                recomputed; kept, in bytes.
        """
        if (name, rounds) not in self._of_update:
            self._of_update[name, rounds] = self._each(name, rounds)
        every = self._of_update[name, rounds]
        return every if self.num_layers == len(every) else np.add.reduceat(every, self.edges[:-1])

    def _each(self, name: str, rounds: int) -> Floats:
        layers, schedule = self._layers, self.request.schedule
        match name:
            case "kept":
                return np.array([float(layer.always(schedule, rounds)) for layer in layers])
            case "weight":
                return np.array([layer.weights_backward(rounds) for layer in layers]) * self._speed
            case "products":
                return np.array([layer.products(schedule, rounds) for layer in layers]) * self._speed
            case "whole":
                return np.array([layer.whole_backward(schedule, rounds) for layer in layers]) * self._speed
        backward = np.array([layer.backward(schedule, rounds) for layer in layers]) * self._speed
        forward = np.array([layer.forward_seconds for layer in layers]) * self._speed  # of single layers
        if name == "backward":
            return backward
        parts = [layer.least_part if name == "least" else 1.0 for layer in layers]
        work: Floats = (backward + forward) * np.array(parts)
        return work

    def longest(self, kinds: Iterable[StageKind], bound: float) -> list[int]:
        """Return, for each kind, a length: the maximum of every longer stage reaches the bound."""
        return [self._longest(kind, bound) for kind in kinds]

    def _longest(self, kind: StageKind, bound: float) -> int:
        _, rounds = stage_parts(self.request.schedule, self.num_microbatches, kind.replicas, 1.0, 0.0, 0.0)
        n = self.num_layers
        if rounds == 0 or math.isinf(bound):
            return n
        work = self.of_update("least", self.per_update(kind.replicas))
        done = np.concatenate([[0.0], np.cumsum(work)])
        room = max(bound, 0.0) * kind.speed / rounds * (1 + 1e-9) + done[-1] * 1e-9
        stops = np.searchsorted(done, done + room, side="right") - 1
        return max(1, int((stops - np.arange(n + 1)).max()))

    def tables(self, kinds: Sequence[StageKind], widths: Sequence[int]) -> list[list[StageTable]]:
        """Return `stages` of each kind; tables of the previous call are used again."""
        known, self._tables = self._tables, {}
        for kind, width in zip(kinds, widths, strict=True):
            tables = known.get(kind)
            if tables is None or len(tables[0].summed) < width:
                tables = self.stages(kind, width)
            self._tables[kind] = tables
        return [
            [StageTable(*map(itemgetter(slice(width)), table)) for table in tables]
            for tables, width in zip(self._tables.values(), widths, strict=True)
        ]

    def stages(self, kind: StageKind, width: int) -> list[StageTable]:
        """Return the figures of stages of the d+1 layers from i on, at `[d, i]`.

        Each stage runs a way that fits into memory, and that no other such way is as fast as both in the sum
        and in the maximum. Where there are several, the further ones are in further tables. Entries of stages
        that would end behind the last layer have no meaning.
        """
        first, *others = self._ways(kind)
        tables = [self._running(first, kind, width)]
        lacks_memory = not np.isfinite(tables[0].pace).all()
        for number in others:
            if lacks_memory or may_be_faster(self.variants[number], self.variants[first]):
                tables.append(self._running(number, kind, width))
        return fastest(tables)

    def _ways(self, kind: StageKind) -> list[int]:
        """Return the variants that differ for stages of a kind."""
        if kind.replicas > 1:
            ways = enumerate(self.variants)
            return [number for number, way in ways if kind.rings.may_scatter or not way.scatter]
        alone = [Variant(variant.recompute) for variant in self.variants]
        return [number for number, variant in enumerate(alone) if variant not in alone[:number]]

    def _running(self, number: int, kind: StageKind, width: int) -> StageTable:
        """Return `stages` that all run one of the variants."""
        variant = self.variants[number]
        if variant.experts and kind.replicas > 1:
            costs = self.shared_by(kind.replicas)
            if costs is not None:
                return costs._running_as(number, variant._replace(experts=False), kind, width)
            table = self._running_as(number, variant._replace(experts=False), kind, width)
            return table._replace(pace=np.full_like(table.pace, math.inf))
        return self._running_as(number, variant, kind, width)

    def _running_as(self, number: int, variant: Variant, kind: StageKind, width: int) -> StageTable:
        terms = self._terms(kind, width, variant)
        summed, slowest = stage_parts(
            self.request.schedule,
            self.num_microbatches,
            kind.replicas,
            terms.work,
            terms.weight,
            terms.after,
            terms.between,
        )
        after, pace = np.broadcast_to(0.0, slowest.shape), slowest
        if not self.is_asynchronous:
            after = np.broadcast_to(terms.after, slowest.shape)
            pace = slowest - after
        np.maximum(pace, self.ports(kind.replicas, width), out=pace)
        if kind.memory_bytes < math.inf:
            pace[self.memory(kind, width, variant) > kind.memory_bytes] = math.inf
        return StageTable(summed + terms.held_up, pace, after, np.broadcast_to(np.intp(number), pace.shape))

    def _terms(self, kind: StageKind, width: int, variant: Variant) -> StageTerms[Floats]:
        """Return the terms of stages that all run one way."""
        cluster, none = self.cluster, np.zeros(1)
        zero = variant.zero if kind.replicas > 1 else 0
        rounds = self.per_update(kind.replicas)
        again = self.between("forward", width) if variant.recompute else none
        parameters = self.between("parameters", width)
        handling = cluster.occupied_seconds(self.moved, 2)
        handling[[0, -1]] = 0.0
        sending = cluster.occupied_seconds(self.returned[:-1])
        sending[0] = 0.0
        splits = self.request.traits.splits_backward
        has_products = zero < 2 and self.of_update("products", rounds).any()
        if zero == 2:
            backward = self.between("whole", width, rounds)
            work = self.between("forward", width) + backward
        else:
            backward = none if splits else self.between("backward", width, rounds)
            work = self.between("work", width, rounds)
        reducing = kind.rings.reduce_scatter if variant.scatter else kind.rings.all_reduce
        reduced, exchanges = parameters, none
        if self.exchanges.any():
            ring, reduced = kind.rings.all_to_all, parameters - self.between("own", width)
            count, num_bytes = self.between("exchanges", width), self.between("tokens", width)
            ways = (FORWARD_CALLS, BACKWARD_CALLS)
            exchanges = sum(token_seconds(ring, count, num_bytes, calls) for calls in ways)
        if self.summing.any():
            exchanges = exchanges + self.between("summing", width)
            if variant.recompute:
                exchanges = exchanges + self.between("summing_again", width)
        return stage_terms(
            self.request.schedule,
            cluster.overlap,
            is_first=np.arange(self.num_layers) == 0,
            replicas=kind.replicas,
            speed=kind.speed,
            work=work + again + handling[:-1] + self.ends(handling, width),
            backward=backward + again,
            weight=self.between("weight", width, rounds) if splits else none,
            products=self.between("products", width, rounds) if has_products else none,
            update=self.between("update", width) / (kind.replicas if zero else 1),
            sending=sending,
            reduction=reducing.seconds(reduced),
            exchange=none,  # not known before the other stages are; `estimate.estimate` has it
            gather=kind.rings.all_gather.seconds(reduced) if zero else none,
            reduces_each=zero == 2,
            exchanges=exchanges,
        )

    def ports(self, replicas: int, width: int) -> Floats:
        """Return `formula.port_seconds` of all stages."""
        behind = [self.ends(np.append(edges[:-1], 0.0), width) for edges in (self.output, self.returned)]
        outgoing, incoming = behind[0] + self.returned[:-1], self.output[:-1] + behind[1]
        schedule, count = self.request.schedule, self.num_microbatches
        return port_seconds(schedule, count, replicas, self.cluster, outgoing, incoming)

    def memory(self, kind: StageKind, width: int, variant: Variant = PLAINLY) -> Floats:
        """Return `memory.peak_memory_bytes` of all stages; whole numbers, exact up to 2^53 bytes."""
        zero = variant.zero if kind.replicas > 1 else 0
        rounds = 1 if zero == 2 else self.per_update(kind.replicas)
        inside, received = (
            self.between("activations", width) + self.ends(self.output, width),
            self.output[:-1],
        )
        split = self.between("split", width) if kind.most_held else np.zeros(1)
        stage = stage_memory(
            parameters=self.between("parameters", width),
            inside=inside,
            received=received,
            sent=self.ends(np.append(self.output[:-1], 0.0), width),
            kept=self.between("kept", width, rounds),
            state_factor=self.state_factor,
            copied_factor=self.copied_factor,
            recompute=variant.recompute,
            split=np.where(np.isnan(split), received + inside, split),
            zero=zero,
            scatters=variant.scatter,
            replicas=kind.replicas,
            workspace=self.workspace(width, rounds),
            largest=_most(self.largest, width),
            own=self.between("own", width),
        )
        predicts = self.request.predicts_weights
        versions = self.request.traits.num_versions(kind.in_flight, predicts)
        own = ceil_div(self.num_microbatches, kind.replicas)
        lag = max(0, kind.most_held - kind.in_flight)
        late = min(lag, own - kind.in_flight)
        peak = stage.peak(kind.replicas, versions, kind.in_flight, late, min(lag, own - 1))
        return peak if kind.in_flight <= (kind.most_held or kind.in_flight) else peak + math.inf

    def workspace(self, width: int, rounds: int) -> Floats:
        """Return `memory.workspace_bytes` of the d+1 layers from i on, at `[d, i]`."""
        single, schedule = self._layers, self.request.schedule
        done = np.cumsum([0.0, *(layer.activation_bytes for layer in single)])  # whole numbers, exact
        tops = np.array([layer.workspace(schedule, rounds) for layer in single]) + done[1:]
        tops = np.maximum.reduceat(tops, self.edges[:-1])
        return np.maximum(_most(tops, width) - self.ends(done[self.edges], width), 0.0)

    def between(self, name: str, width: int, rounds: int = 0) -> Floats:
        """Return the sum over the d+1 layers from i on, at `[d, i]`, without differences of large sums.

        Args:
            rounds: for the names of `of_update`; 0 for attributes.
        """
        key = (name, rounds)
        if len(self.sums.get(key, ())) < width:
            layers = self.of_update(name, rounds) if rounds else getattr(self, name)
            padded = np.concatenate([layers, np.zeros(width - 1)])
            self.sums[key] = np.cumsum(sliding_window_view(padded, len(layers)), axis=0)
        return self.sums[key][:width]

    def ends(self, edges: Floats, width: int) -> Floats:
        """Return the figure of the edge behind the d+1 layers from i on, at `[d, i]`."""
        padded = np.concatenate([edges[1:], np.zeros(width - 1)])
        return sliding_window_view(padded, len(edges) - 1)


def _most(layers: Floats, width: int) -> Floats:
    """Return the largest figure of the d+1 layers from i on, at `[d, i]`."""
    padded = np.concatenate([layers, np.zeros(width - 1)])
    most: Floats = np.maximum.accumulate(sliding_window_view(padded, len(layers)), axis=0)
    return most
