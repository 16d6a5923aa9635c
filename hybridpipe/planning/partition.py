"""Partition: the cuts and replica counts that minimise `cost.estimate`, exactly.

The formula is a sum over stages and cuts plus a maximum over them. A dynamic program minimises the sum
under an upper bound on the maximum; lowering the bound to just below the maximum of the plan found walks
along the Pareto front of (sum, maximum), and the best total on the front is the optimum. PipeDream
(SOSP 2019, section 3.1) minimises a maximum alone: the throughput of a pipeline that never drains.

The program runs over suffixes: with r ranks left for the layers from i on, in stage order on the first
`num_ranks` ranks, the ranks of the next stage are known, and with them its links, its speed and the number of
microbatches it holds in flight.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost import compute_share, estimate
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules import ceil_div, in_flight

Array = NDArray[np.float64]
Slot = tuple[int, int]  # (ranks left, replicas of the next stage)


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
    behind: NDArray[np.intp]  # [j]: replicas of the stage after a cut at j


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
        share = compute_share(cluster, tuple(range(num_ranks)))
        self.stage: dict[Slot, tuple[Array, Array]] = {}
        for left in range(1, num_ranks + 1):
            for replicas in range(1, min(left, max_replicas) + 1):
                ranks = self.ranks(left, replicas)
                speed = min(share[rank] for rank in ranks)
                rounds = ceil_div(num_microbatches, replicas)
                compute = (forward + backward) / speed
                base = cluster.allreduce_seconds(0, ranks)
                per_byte = cluster.allreduce_seconds(1, ranks) - base
                allreduce = np.where(parameters > 0, base + per_byte * parameters, 0.0)
                slowest = (
                    (rounds - 1) * compute + np.maximum(0.0, allreduce - backward / speed) + update / speed
                )
                fits = is_stage & (kept + in_flight(schedule, rounds, replicas, left) * stash <= limit)
                self.stage[left, replicas] = np.where(fits, compute, math.inf), slowest

    def ranks(self, left: int, replicas: int) -> tuple[int, ...]:
        return tuple(range(self.num_ranks - left, self.num_ranks - left + replicas))

    def cut(self, left: int, replicas: int, behind: int) -> tuple[Array, Array]:
        """Sum and maximum of a cut at every layer between a stage and the one behind it."""
        link = self.cluster.slowest_link(self.ranks(left, replicas + behind))
        transfer = self.output_bytes / link.bandwidth
        messages = ceil_div(self.num_microbatches, min(replicas, behind))
        return 2 * (transfer + link.latency_seconds), (messages - 1) * transfer

    def least_sum(self, bound: float) -> tuple[float, float, tuple[StageSpec, ...]] | None:
        """The stages with the least sum among those whose every maximum is below `bound`."""
        solutions: dict[Slot, _Solution] = {}
        for (left, replicas), (seconds, slowest) in self.stage.items():
            stages = np.where(slowest < bound, seconds, math.inf)
            rest, behind = self._rest(solutions, left, replicas, bound)
            total = stages + rest
            stop = np.argmin(total, axis=1)
            solutions[left, replicas] = _Solution(total[np.arange(len(total)), stop], stop, behind)
        first = min(
            range(1, min(self.num_ranks, self.max_replicas) + 1),
            key=lambda m: solutions[self.num_ranks, m].seconds[0],
        )
        total_seconds = float(solutions[self.num_ranks, first].seconds[0])
        if math.isinf(total_seconds):
            return None
        return total_seconds, *self._walk(solutions, first)

    def _rest(
        self, solutions: dict[Slot, _Solution], left: int, replicas: int, bound: float
    ) -> tuple[Array, NDArray[np.intp]]:
        """For a stage that ends at j: the least sum of its cut and all behind it, and who stands there."""
        n, rest = self.num_layers, left - replicas
        if not rest:
            return np.where(np.arange(n + 1) == n, 0.0, math.inf), np.zeros(n + 1, dtype=np.intp)
        options = []
        for behind in range(1, min(rest, self.max_replicas) + 1):
            seconds, slowest = self.cut(left, replicas, behind)
            options.append(np.where(slowest < bound, seconds, math.inf) + solutions[rest, behind].seconds)
        choice = np.argmin(options, axis=0)
        return np.min(options, axis=0), choice + 1

    def _walk(self, solutions: dict[Slot, _Solution], first: int) -> tuple[float, tuple[StageSpec, ...]]:
        """The largest maximum and the stages along the choices made."""
        stages, slowest, start, left, replicas = [], 0.0, 0, self.num_ranks, first
        while True:
            solution = solutions[left, replicas]
            stop = int(solution.stop[start])
            slowest = max(slowest, float(self.stage[left, replicas][1][start, stop]))
            stages.append(StageSpec(start, stop, replicas))
            if left == replicas:
                return slowest, tuple(stages)
            behind = int(solution.behind[stop])
            slowest = max(slowest, float(self.cut(left, replicas, behind)[1][stop]))
            start, left, replicas = stop, left - replicas, behind


def _between(sums: list[float]) -> Array:
    """`[i, j]`: the sum over the layers `[i, j)`."""
    line = np.array(sums, dtype=np.float64)
    difference: Array = line[None, :] - line[:, None]
    return difference
