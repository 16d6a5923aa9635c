"""Partition: the cuts and replica counts that minimise `cost.estimate`, exactly.

The formula is a sum over stages and cuts plus a maximum over them. A dynamic program minimises the sum
under an upper bound on the maximum; lowering the bound to just below the maximum of the plan found walks
along the Pareto front of (sum, maximum), and the best total on the front is the optimum. PipeDream
(SOSP 2019, section 3.1) minimises a maximum alone: the throughput of a pipeline that never drains.

The program runs over suffixes. A slot says how many ranks are left for the layers from i on, how many of
them replicate the next stage, and how many microbatches each of these then holds; stages take the first
`num_ranks` ranks in order, so a slot knows its ranks, and with them its links, its speed and its memory.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost import compute_share, estimate
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules import ceil_div, in_flight

Array = NDArray[np.float64]


class Slot(NamedTuple):
    """Where a stage may stand; `in_flight` is 0 throughout where memory is not limited, and not looked at."""

    left: int
    replicas: int
    in_flight: int


def partition(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    num_ranks: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    max_replicas: int | None = None,
) -> Plan | None:
    """The plan on exactly the first `num_ranks` ranks with the least `estimate`; None if none fits.

    Args:
        max_replicas: per stage; 1 asks for the best straight pipeline.
    """
    tables = _Tables(profile, cluster, num_ranks, num_microbatches, schedule, max_replicas or num_ranks)
    best: Plan | None = None
    best_seconds, bound = math.inf, math.inf
    while (found := tables.least_sum(bound)) is not None:
        total, slowest, stages = found
        plan = Plan(stages, schedule, num_microbatches)
        seconds = estimate(plan, profile, cluster)
        if seconds < best_seconds:
            best, best_seconds = plan, seconds
        if total >= best_seconds:  # sums only grow from here on
            break
        bound = slowest
    return best


@dataclass(frozen=True, slots=True)
class _Solution:
    seconds: Array  # [i]: least sum for the layers from i on
    stop: NDArray[np.intp]  # [i]: where the next stage ends
    behind: NDArray[np.intp]  # [j]: which of the slots that may stand behind a cut at j


class _Tables:
    """Sums and maxima of every stage `[i, j)` and cut j, for each slot; infinite where it does not fit."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        num_ranks: int,
        num_microbatches: int,
        schedule: str,
        max_replicas: int,
    ) -> None:
        self.cluster, self.num_ranks, self.num_layers = cluster, num_ranks, profile.num_layers
        self.num_microbatches = num_microbatches
        self.max_replicas = max_replicas
        forward, backward, update, parameters, activations = (
            _between(profile.prefix_sums(value))
            for value in (
                lambda layer: layer.forward_seconds,
                lambda layer: layer.backward_seconds,
                lambda layer: layer.update_seconds,
                lambda layer: layer.parameter_bytes,
                lambda layer: layer.activation_bytes,
            )
        )
        self.output_bytes = np.array([0.0, *(layer.output_bytes for layer in profile.layers)])
        # `cost.stage_memory_bytes` for all stages at once: what stays, what each microbatch in flight adds.
        kept = np.rint(parameters * (2 + profile.state_factor)) + self.output_bytes[None, :]
        stash = activations + self.output_bytes[:, None]
        limit = math.inf if cluster.memory_bytes is None else cluster.memory_bytes
        is_stage = np.triu(np.ones_like(parameters, dtype=bool), 1)
        edges = np.arange(self.num_layers + 1)
        neighbours = (edges > 0)[:, None] + (edges < self.num_layers)[None, :].astype(np.float64)
        work = forward + backward + 2 * neighbours * cluster.message_seconds
        share = compute_share(cluster, tuple(range(num_ranks)))
        self.behind = self._slots(schedule, cluster.memory_bytes is not None)
        self.stage: dict[Slot, tuple[Array, Array]] = {}
        for slot in self.behind:
            ranks = self.ranks(slot.left, slot.replicas)
            speed = min(share[rank] for rank in ranks)
            rounds = ceil_div(num_microbatches, slot.replicas)
            compute = work / speed
            base = cluster.allreduce_seconds(0, ranks)
            per_byte = cluster.allreduce_seconds(1, ranks) - base
            allreduce = np.where(parameters > 0, base + per_byte * parameters, 0.0)
            slowest = (rounds - 1) * compute + np.maximum(0.0, allreduce - backward / speed) + update / speed
            fits = is_stage & (kept + slot.in_flight * stash <= limit)
            self.stage[slot] = np.where(fits, compute, math.inf), slowest

    def _slots(self, schedule: str, count_in_flight: bool) -> dict[Slot, list[Slot]]:
        """Every slot, those with fewer ranks left first, and the slots that may stand behind it."""
        behind: dict[Slot, list[Slot]] = {}
        for left in range(1, self.num_ranks + 1):
            for replicas in range(1, min(left, self.max_replicas) + 1):
                rounds = ceil_div(self.num_microbatches, replicas)
                followers = [slot for slot in behind if slot.left == left - replicas]
                for holds in sorted({slot.replicas * slot.in_flight for slot in followers} or {0}):
                    count = in_flight(schedule, rounds, replicas, holds) if count_in_flight else 0
                    slots = behind.setdefault(Slot(left, replicas, count), [])
                    slots += [slot for slot in followers if slot.replicas * slot.in_flight == holds]
        return behind

    def ranks(self, left: int, replicas: int) -> tuple[int, ...]:
        return tuple(range(self.num_ranks - left, self.num_ranks - left + replicas))

    def cut(self, slot: Slot, behind: Slot) -> tuple[Array, Array]:
        """Sum and maximum of a cut at every layer between a stage and the one behind it."""
        link = self.cluster.slowest_link(self.ranks(slot.left, slot.replicas + behind.replicas))
        transfer = self.output_bytes / link.bandwidth
        messages = ceil_div(self.num_microbatches, min(slot.replicas, behind.replicas))
        return 2 * (transfer + link.latency_seconds), (messages - 1) * transfer

    def least_sum(self, bound: float) -> tuple[float, float, tuple[StageSpec, ...]] | None:
        """The stages with the least sum among those whose every maximum is below `bound`."""
        solutions: dict[Slot, _Solution] = {}
        for slot, (seconds, slowest) in self.stage.items():
            rest, behind = self._rest(solutions, slot, bound)
            total = np.where(slowest < bound, seconds, math.inf) + rest
            stop = np.argmin(total, axis=1)
            solutions[slot] = _Solution(total[np.arange(len(total)), stop], stop, behind)
        first = min(
            (slot for slot in solutions if slot.left == self.num_ranks),
            key=lambda slot: float(solutions[slot].seconds[0]),
        )
        total_seconds = float(solutions[first].seconds[0])
        if math.isinf(total_seconds):
            return None
        return total_seconds, *self._walk(solutions, first)

    def _rest(
        self, solutions: dict[Slot, _Solution], slot: Slot, bound: float
    ) -> tuple[Array, NDArray[np.intp]]:
        """For a stage that ends at j: the least sum of its cut and all behind it, and who stands there."""
        n = self.num_layers
        if slot.left == slot.replicas:
            return np.where(np.arange(n + 1) == n, 0.0, math.inf), np.zeros(n + 1, dtype=np.intp)
        options = []
        for behind in self.behind[slot]:
            seconds, slowest = self.cut(slot, behind)
            options.append(np.where(slowest < bound, seconds, math.inf) + solutions[behind].seconds)
        return np.min(options, axis=0), np.argmin(options, axis=0)

    def _walk(self, solutions: dict[Slot, _Solution], slot: Slot) -> tuple[float, tuple[StageSpec, ...]]:
        """The largest maximum and the stages along the choices made."""
        stages, slowest, start = [], 0.0, 0
        while True:
            solution = solutions[slot]
            stop = int(solution.stop[start])
            slowest = max(slowest, float(self.stage[slot][1][start, stop]))
            stages.append(StageSpec(start, stop, slot.replicas))
            if slot.left == slot.replicas:
                return slowest, tuple(stages)
            behind = self.behind[slot][int(solution.behind[stop])]
            slowest = max(slowest, float(self.cut(slot, behind)[1][stop]))
            start, slot = stop, behind


def _between(sums: list[float]) -> Array:
    """`[i, j]`: the sum over the layers `[i, j)`."""
    line = np.array(sums, dtype=np.float64)
    difference: Array = line[None, :] - line[:, None]
    return difference
