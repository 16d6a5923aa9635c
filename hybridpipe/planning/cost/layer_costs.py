"""Layer costs: what stages of all lengths cost, for `partition`'s program over them.

Lives here: the formula of `cost` in tables over first layers and lengths. Not known here: ranks, beyond the
kinds of slots that `placement` makes of them.
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.formula import handling_seconds, measured_speed, stage_parts
from hybridpipe.planning.cost.memory import FUSION_BYTES, LOOK_AHEAD
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import DEFAULT_REQUEST, PlanRequest
from hybridpipe.planning.schedules.generators import ceil_div, per_update
from hybridpipe.planning.schedules.registry import TRAITS, ScheduleTraits
from hybridpipe.planning.search.placement import Floats, Ints, Kind


@dataclass(frozen=True, slots=True)
class Form:
    """What all plans of a search under one schedule have in common."""

    num_microbatches: int
    request: PlanRequest = DEFAULT_REQUEST

    @property
    def schedule(self) -> str:
        """The schedule that is asked for."""
        return self.request.schedule

    @property
    def traits(self) -> ScheduleTraits:
        """Those of the schedule."""
        return TRAITS[self.request.schedule]

    @property
    def recompute(self) -> bool:
        """Whether every stage recomputes."""
        return self.request.recompute

    def plan(self, stages: Iterable[StageSpec], chunks: int = 1) -> Plan:
        """The plan of this form with these stages."""
        return self.request.plan(stages, self.num_microbatches, chunks)

    def per_update(self, replicas: int) -> int:
        """Microbatches of an update on one of so many replicas."""
        return per_update(self.schedule, self.num_microbatches, replicas)

    def full_rounds(self, replicas: int) -> float:
        """So many times a stage's work is at least in the maximum."""
        rounds = ceil_div(self.num_microbatches, replicas)
        if self.traits.whole_minibatch:
            return 1 / replicas
        return rounds if self.traits.is_asynchronous else rounds - 1

    def versions(self, in_flight: int) -> int:
        """Of the weights, that a replica keeps."""
        return {"stashed": in_flight, "two": 2, "one": 1}[self.traits.versions]


class LayerCosts:
    """What layers cost at full speed, `[layer]`, and what a cut between them costs, `[edge]`.

    Some of it depends on how many microbatches of an update a rank has: `of_update`.
    """

    def __init__(self, profile: ModelProfile, cluster: Cluster, form: Form) -> None:
        layers, speed = profile.layers, measured_speed(profile, cluster)
        forward = np.array([layer.forward_seconds for layer in layers]) * speed
        self.cluster, self.form, self.state_factor = cluster, form, profile.state_factor
        self._layers, self._speed, self._forward = layers, speed, forward
        self._of_update: dict[tuple[str, int], Floats] = {}
        self.update = np.array([layer.update_seconds for layer in layers]) * speed
        self.parameters = np.array([layer.parameter_bytes for layer in layers], dtype=np.float64)
        self.activations = np.array([layer.activation_bytes for layer in layers], dtype=np.float64)
        self.output = np.array([0.0, *(layer.output_bytes for layer in layers)])
        self.returned = np.array([0.0, *(layer.returned_bytes for layer in layers)])
        self.edges = np.arange(len(layers) + 1)
        self.sums: dict[tuple[str, int], Floats] = {}  # `between` as far as it was asked for
        self._tables: dict[Kind, tuple[Floats, Floats]] = {}

    @property
    def num_layers(self) -> int:
        return len(self.edges) - 1

    @property
    def work(self) -> Floats:
        """A microbatch's, about: as if one rank had all of them."""
        rounds = self.form.per_update(1)
        work: Floats = self.of_update("work", rounds) + self.of_update("products", rounds) / rounds
        return work

    @property
    def least_work(self) -> Floats:
        """A microbatch's, at the least."""
        return self.of_update("work", 1)

    @property
    def moved(self) -> Floats:
        """Bytes over a cut at each edge, both ways."""
        moved: Floats = self.output + self.returned
        return moved

    def merged(self, edges: Ints) -> "LayerCosts":
        """The same with only these edges to cut at."""
        merged = copy(self)
        merged.sums, merged._tables = {}, {}
        for name in ("update", "parameters", "activations"):
            setattr(merged, name, np.add.reduceat(getattr(self, name), edges[:-1]))
        for name in ("output", "returned", "edges"):
            setattr(merged, name, getattr(self, name)[edges])
        return merged

    def of_update(self, name: str, rounds: int) -> Floats:
        """What layers cost a rank that has so many microbatches of an update.

        Args:
            name: backward, weight, work or products, in seconds; kept, in bytes.
        """
        if (name, rounds) not in self._of_update:
            self._of_update[name, rounds] = self._each(name, rounds)
        every = self._of_update[name, rounds]
        return every if self.num_layers == len(every) else np.add.reduceat(every, self.edges[:-1])

    def _each(self, name: str, rounds: int) -> Floats:
        layers, schedule = self._layers, self.form.schedule
        match name:
            case "kept":
                return np.array([float(layer.kept(schedule, rounds)) for layer in layers])
            case "weight":
                return np.array([layer.weights_backward(rounds) for layer in layers]) * self._speed
            case "products":
                return np.array([layer.products(schedule, rounds) for layer in layers]) * self._speed
        backward = np.array([layer.backward(schedule, rounds) for layer in layers]) * self._speed
        backward += self.form.recompute * self._forward
        return backward + self._forward if name == "work" else backward

    def longest(self, kinds: Iterable[Kind], bound: float) -> list[int]:
        """By kind: no stage of more layers has a maximum below the bound."""
        return [self._longest(kind, bound) for kind in kinds]

    def _longest(self, kind: Kind, bound: float) -> int:
        rounds = self.form.full_rounds(kind.replicas)
        n = self.num_layers
        if rounds == 0 or math.isinf(bound):
            return n
        work = self.of_update("work", self.form.per_update(kind.replicas))
        done = np.concatenate([[0.0], np.cumsum(work)])
        room = max(bound, 0.0) * kind.speed / rounds * (1 + 1e-9) + done[-1] * 1e-9
        stops = np.searchsorted(done, done + room, side="right") - 1
        return max(1, int((stops - np.arange(n + 1)).max()))

    def tables(self, kinds: Sequence[Kind], widths: Sequence[int]) -> list[tuple[Floats, Floats]]:
        """`stages` of each kind; of those that the last call was about, what was computed then."""
        known, self._tables = self._tables, {}
        for kind, width in zip(kinds, widths, strict=True):
            table = known.get(kind)
            if table is None or len(table[0]) < width:
                table = self.stages(kind, width)
            self._tables[kind] = table
        each = zip(self._tables.values(), widths, strict=True)
        return [(summed[:width], slowest[:width]) for (summed, slowest), width in each]

    def stages(self, kind: Kind, width: int) -> tuple[Floats, Floats]:
        """`[d, i]`: seconds in the sum and in the maximum of the stage of the d+1 layers from i on.

        Infinite where it does not fit into memory; whatever where it would end behind the last layer.
        """
        cluster, form, speed = self.cluster, self.form, kind.speed
        rounds = form.per_update(kind.replicas)
        weight = self.between("weight", width, rounds) / speed
        if form.traits.splits_backward:
            last = weight
        else:
            sending = np.array([handling_seconds(cluster, sent, 1) for sent in self.returned.tolist()])
            sending[0] = 0.0  # the gradient that the stage before waits for
            last = (self.between("backward", width, rounds) + sending[:-1]) / speed
        products = self.between("products", width, rounds) / speed
        held_up = np.zeros_like(products)  # the stage before waits for these
        if kind.replicas > 1:
            last = last + products
            held_up[:, 1:] = products[:, 1:]
        parameters = self.between("parameters", width)
        handling = np.array([handling_seconds(cluster, moved) for moved in self.moved.tolist()])
        handling[[0, -1]] = 0.0
        work = self.between("work", width, rounds) + handling[:-1] + self.ends(handling, width)
        work /= speed
        ring = kind.ring_latency_seconds + kind.ring_seconds_per_byte * parameters
        ring[parameters == 0] = 0.0
        after = ring - cluster.overlap * np.minimum(ring, last) + self.between("update", width) / speed
        after += products - held_up
        summed, slowest = stage_parts(
            form.schedule, form.num_microbatches, kind.replicas, work, weight, after
        )
        if kind.memory_bytes < math.inf:
            slowest[self.memory(kind, parameters) > kind.memory_bytes] = math.inf
        return summed + held_up, slowest

    def memory(self, kind: Kind, parameters: Floats) -> Floats:
        """`memory.peak_memory_bytes` of all stages; whole numbers, exact up to 2^53 bytes."""
        width = len(parameters)
        inside = self.between("activations", width) + self.ends(self.output, width)
        received, sent = self.output[:-1], self.ends(np.append(self.output[:-1], 0.0), width)
        stash, working = (received, inside) if self.form.recompute else (received + inside, np.zeros(1))
        resident = np.rint(parameters * (2 + self.state_factor))
        resident += self.between("kept", width, self.form.per_update(kind.replicas))
        resident += np.minimum(parameters, FUSION_BYTES) * (kind.replicas > 1)
        resident += 2 * (received + sent) + LOOK_AHEAD * np.maximum(received, sent)
        versions = self.form.versions(kind.in_flight)
        peak: Floats = resident + (versions - 1) * parameters + kind.in_flight * stash + working
        return peak

    def between(self, name: str, width: int, rounds: int = 0) -> Floats:
        """`[d, i]`: the sum over the d+1 layers from i on, added up without differences of large sums.

        Args:
            rounds: for what `of_update` has.
        """
        key = (name, rounds)
        if len(self.sums.get(key, ())) < width:
            layers = self.of_update(name, rounds) if rounds else getattr(self, name)
            padded = np.concatenate([layers, np.zeros(width - 1)])
            self.sums[key] = np.cumsum(sliding_window_view(padded, len(layers)), axis=0)
        return self.sums[key][:width]

    def ends(self, edges: Floats, width: int) -> Floats:
        """`[d, i]`: the figure of the edge behind the d+1 layers from i on."""
        padded = np.concatenate([edges[1:], np.zeros(width - 1)])
        return sliding_window_view(padded, len(edges) - 1)
