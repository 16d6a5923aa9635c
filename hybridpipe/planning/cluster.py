"""Cluster: the machines that a plan may use: links between ranks, all-reduce, memory and speed.

Pure data; the probe that measures it (`hybridpipe.measure.probe`) is not known here. Invariant: ranks fill
the units of a level in order, as `mpirun` places them by default. With 4 ranks per node, ranks 0 to 3 are on
the first node.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.checks import (
    BACKENDS,
    COMPRESSIONS,
    MAX_RANKS,
    NO_COMPRESSION,
    factor,
    non_negative,
    non_negative_int,
    one_of,
    positive,
    positive_int,
)

Bytes = TypeVar("Bytes", float, NDArray[np.float64])  # of one message, or of many
CLUSTER_FORMAT = "hybridpipe-cluster/1"
# Collectives over a stage's replicas: the field of `Level` with its figures, and the part that a rank sends
# of a ring's 2 (m-1)/m.
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "allreduce", "reduce_scatter", "all_gather"
PARTS_SENT = {ALL_REDUCE: 1.0, REDUCE_SCATTER: 0.5, ALL_GATHER: 0.5}


def check_compression(compression: str) -> None:
    """Check that gradients can travel so.

    Raises:
        ValueError: it is none of COMPRESSIONS.
    """
    if compression == "bf16":
        raise ValueError(
            "compression must not be 'bf16': Horovod adds no bfloat16, on CPUs or GPUs; use 'fp16', or "
            f"{NO_COMPRESSION!r}, which adds in float32 under every precision"
        )
    one_of("compression", compression, COMPRESSIONS)


@dataclass(frozen=True, slots=True)
class Collective:
    """Measured figures of a collective in a ring of m ranks: `latency + sent bytes / bandwidth`.

    A rank sends 2 (m-1)/m of the bytes in an all-reduce, (m-1)/m in a reduce-scatter or all-gather. They are
    those beyond the `burst_bytes` of the level.

    Args:
        bandwidth: bytes per second.
        latency_seconds: the part that does not depend on the size.
        fit_error: the largest deviation of a measured size from that line, relative to the measurement.
        wait_seconds: the mean wait for Horovod's next cycle, with the time that ranks sharing processors lose
            by coming unevenly. A collective that is ready when the one before it ends starts without this
            wait.
    """

    bandwidth: float
    latency_seconds: float
    fit_error: float | None = None
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        positive("bandwidth", self.bandwidth)
        non_negative("latency_seconds", self.latency_seconds)
        non_negative("wait_seconds", self.wait_seconds)
        if self.fit_error is not None:
            non_negative("fit_error", self.fit_error)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the machines, from the inside out: ranks in a node, nodes in a rack.

    Args:
        name: for people, such as "node" or "network".
        ranks: ranks in one unit of this level.
        bandwidth: bytes per second between two ranks of one unit, one way.
        latency_seconds: seconds until the first byte of a message arrives.
        shared_bandwidth: bytes per second, each way, that one unit of the level below has into this level for
            all its ranks together, as the ranks of a node share its network card. None: each rank has
            `bandwidth` to itself.
        allreduce: measured figures of an all-reduce over this level. None: those of its links.
        reduce_scatter: of a reduce-scatter. None: those of an all-reduce where that is measured, which then
            is never slower; else of the links.
        all_gather: of an all-gather of weights. None: half of an all-reduce's where that is measured; else of
            the links.
        fit_error: the largest deviation of a measured message from `latency + bytes / bandwidth`, relative.
        burst_bytes: bytes that a rested link lets pass at once. `bandwidth` holds for the bytes beyond, and
            refills the burst: the token bucket of a network that limits a rate. None: `bandwidth` holds from
            the first byte. The closed formulas leave bursts out.
    """

    name: str
    ranks: int
    bandwidth: float
    latency_seconds: float
    shared_bandwidth: float | None = None
    allreduce: Collective | None = None
    fit_error: float | None = None
    burst_bytes: float | None = None
    reduce_scatter: Collective | None = None
    all_gather: Collective | None = None

    def __post_init__(self) -> None:
        positive_int("ranks", self.ranks)
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks must be an integer <= {MAX_RANKS}, got {self.ranks:.6g}")
        positive("bandwidth", self.bandwidth)
        non_negative("latency_seconds", self.latency_seconds)
        if self.shared_bandwidth is not None:
            positive("shared_bandwidth", self.shared_bandwidth)
        if self.burst_bytes is not None:
            positive("burst_bytes", self.burst_bytes)
        if self.fit_error is not None:
            non_negative("fit_error", self.fit_error)

    def with_collectives(self, changed: Callable[[Collective], Collective]) -> "Level":
        """Return the level with its measured collectives changed."""
        each = ((name, getattr(self, name)) for name in PARTS_SENT)
        measured: dict[str, Any] = {name: changed(figures) for name, figures in each if figures is not None}
        return replace(self, **measured)


class Ring(NamedTuple):
    """The cost of a collective over some ranks: `latency_seconds + num_bytes * seconds_per_byte`.

    The first of several in a row takes `wait_seconds` more.
    """

    latency_seconds: float
    seconds_per_byte: float
    wait_seconds: float = 0.0

    @property
    def start_seconds(self) -> float:
        """The seconds of one by itself that do not depend on its bytes."""
        return self.latency_seconds + self.wait_seconds

    def seconds(self, num_bytes: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return the seconds of one collective by itself; 0 without bytes."""
        seconds = self.start_seconds + self.seconds_per_byte * num_bytes
        return np.where(np.greater(num_bytes, 0), seconds, 0.0)


class Rings(NamedTuple):
    """The costs of the collectives of a stage's replicas."""

    all_reduce: Ring
    reduce_scatter: Ring
    all_gather: Ring
    all_to_all: Ring

    @property
    def may_scatter(self) -> bool:
        """True if a reduce-scatter of some bytes takes less than an all-reduce."""
        one, other = self.reduce_scatter, self.all_reduce
        return one.seconds_per_byte < other.seconds_per_byte or one.start_seconds < other.start_seconds


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines that a plan may use.

    Args:
        levels: from the inside out. Each holds a multiple of the ranks of the one before; the last one holds
            all ranks.
        memory_bytes: of each rank, or one figure for all. None: not limited.
        relative_speed: per rank, 1.0 for the rank that the profile was measured on. None: all equal.
        node_ranks: ranks that share one machine's processors, or one GPU. None: each rank has its own.
        compute_speeds: entry n-1 is the speed of each of n ranks of a machine that compute at once, relative
            to one that computes alone. None: 1.0 for as many as there are.
        message_seconds: processor time that a message takes from its sender, and again from its receiver (the
            overhead o of LogP, Culler et al. 1993).
        message_seconds_per_byte: processor time that each byte of a message adds to that.
        wakeup_seconds: entry n-1 is the processor time that a machine loses when one of its ranks continues
            after waiting and n of them, itself included, compute then. The kernel may let it wait for one
            processor while another is free. The last entry also holds for more ranks. Empty: no time is lost,
            as where each rank of the machine has a processor.
        replicated_speed: speed of a rank that shares its stage, relative to one that has it alone. Horovod's
            thread polls the other ranks, which takes processor time.
        overlap: the share of an all-reduce, without its `wait_seconds`, that costs the computing rank
            nothing, in [0, 1]. The rest takes processor time, measured while all ranks of the machine
            compute.
        allreduce_factor: bytes that a reduction, or an exchange of shared parameters' gradients, moves for
                each byte of a gradient (COMPRESSIONS).
        sync: the backend whose collectives were measured, one of BACKENDS; None: not measured.
        shards: ranks that each of these stands for (`shards.pooled`): they do the same at the same time.
        waits_for_messages: a rank computes nothing while it sends or receives, as where sends and receives
            block (DeepSpeed). False: messages overlap with computing, as this package's do.
    """

    levels: tuple[Level, ...]
    memory_bytes: int | tuple[int, ...] | None = None
    relative_speed: tuple[float, ...] | None = None
    node_ranks: int | None = None
    compute_speeds: tuple[float, ...] | None = None
    message_seconds: float = 0.0
    message_seconds_per_byte: float = 0.0
    wakeup_seconds: tuple[float, ...] = ()
    replicated_speed: float = 1.0
    overlap: float = 1.0
    allreduce_factor: float = 1.0
    waits_for_messages: bool = False
    sync: str | None = None
    shards: int = 1
    format: str = CLUSTER_FORMAT

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        if self.format != CLUSTER_FORMAT:
            raise ValueError(f"format must be {CLUSTER_FORMAT!r}, got {self.format!r}")
        if not self.levels:
            raise ValueError("levels must hold at least one level, got none")
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if outer.ranks % inner.ranks:
                raise ValueError(
                    f"level {outer.name!r} must hold a multiple of the {inner.ranks} ranks of level "
                    f"{inner.name!r}, got {outer.ranks}"
                )
        self._check_per_rank()
        if self.node_ranks is not None:
            positive_int("node_ranks", self.node_ranks)
        if self.compute_speeds is not None:
            if not self.compute_speeds:
                raise ValueError("compute_speeds must hold at least one figure, got none")
            for speed in self.compute_speeds:
                factor("compute_speeds", speed)
        non_negative("message_seconds", self.message_seconds)
        non_negative("message_seconds_per_byte", self.message_seconds_per_byte)
        for seconds in self.wakeup_seconds:
            non_negative("wakeup_seconds", seconds)
        factor("replicated_speed", self.replicated_speed)
        non_negative("overlap", self.overlap)
        if self.overlap > 1:
            raise ValueError(f"overlap must be a finite number <= 1, got {self.overlap!r}")
        factor("allreduce_factor", self.allreduce_factor)
        positive_int("shards", self.shards)
        if self.sync is not None:
            one_of("sync", self.sync, BACKENDS)

    def _check_per_rank(self) -> None:
        for name in ("memory_bytes", "relative_speed"):
            figures = getattr(self, name)
            if isinstance(figures, tuple) and len(figures) != self.num_ranks:
                raise ValueError(
                    f"{name} must hold one figure for each of the {self.num_ranks} ranks, got {len(figures)}"
                )
        if self.memory_bytes is not None:
            for memory in self.memory_bytes if isinstance(self.memory_bytes, tuple) else (self.memory_bytes,):
                non_negative_int("memory_bytes", memory)
        for speed in self.relative_speed or ():
            factor("relative_speed", speed)

    @classmethod
    def flat(cls, ranks: int, bandwidth: float, latency_seconds: float) -> "Cluster":
        """Return equal ranks, each with its own processor, behind one switch."""
        return cls(levels=(Level("network", ranks, bandwidth, latency_seconds),))

    def compressing(self, compression: str, dtype: str) -> "Cluster":
        """Return the cluster with gradients of this type compressed (COMPRESSIONS); only float32 is."""
        factor_now = COMPRESSIONS[compression] if dtype == "float32" else 1.0
        return replace(self, allreduce_factor=factor_now)

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the outermost level."""
        return self.levels[-1].ranks

    def level_index(self, rank: int, other: int) -> int:
        """Return the innermost level whose unit holds both ranks, counted from the inside.

        Raises:
            ValueError: a rank is beyond the cluster.
        """
        for index, level in enumerate(self.levels):
            if rank // level.ranks == other // level.ranks:
                return index
        raise ValueError(f"ranks {rank} and {other} are not both among the cluster's {self.num_ranks}")

    def link(self, rank: int, other: int) -> Level:
        """Return the level of `level_index`; its `bandwidth` is what a message by itself gets."""
        level = self.levels[self.level_index(rank, other)]
        return replace(level, bandwidth=min(level.bandwidth, level.shared_bandwidth or math.inf))

    def unit_below(self, index: int, rank: int) -> int:
        """Return the rank's unit of the level below `levels[index]`, whose link it shares."""
        return rank // (self.levels[index - 1].ranks if index else 1)

    def speed(self, rank: int) -> float:
        """Return the relative speed of a rank that computes alone on its machine."""
        return 1.0 if self.relative_speed is None else self.relative_speed[rank]

    def memory(self, rank: int) -> float:
        """Return the bytes that a rank may use; infinite where memory is not limited."""
        if self.memory_bytes is None:
            return math.inf
        return self.memory_bytes[rank] if isinstance(self.memory_bytes, tuple) else self.memory_bytes

    def node(self, rank: int) -> int:
        """Return the machine whose processors the rank uses."""
        return rank // (self.node_ranks or 1)

    def shared_speed(self, num_active: int, shards: int | None = None) -> float:
        """Return the speed of each of `num_active` ranks (or threads) that compute on one machine at once.

        Beyond the measured figures, ranks share the most that was measured.

        Args:
            shards: for which each of them stands; None: the cluster's.
        """
        if self.compute_speeds is None:
            return min(1.0, (self.node_ranks or 1) / num_active)
        known, computing = len(self.compute_speeds), num_active * (shards or self.shards)
        if computing <= known:
            return self.compute_speeds[computing - 1]
        return self.compute_speeds[-1] * known / computing

    @property
    def are_processors_private(self) -> bool:
        """True if a rank's processor does nothing but the rank's computing, at the speed of one alone."""
        return self.node_ranks in (None, 1) and self.overlap == 1 and self.shared_speed(1) == 1

    def is_busy(self, num_active: int) -> bool:
        """True if `num_active` ranks leave no processor free: one more adds less than half of its speed."""
        if not num_active:
            return False
        now, then = (n * self.shared_speed(n) for n in (num_active, num_active + 1))
        return then - now < self.shared_speed(1) / 2

    def ring(self, ranks: Sequence[int], collective: str = ALL_REDUCE) -> Ring:
        """Return the cost of a collective in a ring: in each step a rank sends 1/m of the data.

        An all-reduce has 2 (m-1) steps; a reduce-scatter and an all-gather have m-1, and are its halves. The
        ring visits the ranks in order, so it crosses the link of each unit once in each direction. It is as
        slow as the outermost level that it crosses. A measured one has the latency of the whole level.
        Source: Patarasuk & Yuan 2009.

        Args:
            collective: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
        """
        m = len(ranks)
        if m == 1:
            return Ring(0.0, 0.0)
        level = self.levels[self.level_index(min(ranks), max(ranks))]  # the outermost that it crosses
        factor_sent = 1.0 if collective == ALL_GATHER else self.allreduce_factor
        sent = 2 * (m - 1) / m * PARTS_SENT[collective] * factor_sent
        figures: Collective | None = getattr(level, collective)
        if figures is not None:
            return Ring(figures.latency_seconds, sent / figures.bandwidth, figures.wait_seconds)
        if level.allreduce is not None:
            whole = self.ring(ranks)
            if collective == REDUCE_SCATTER:
                return whole
            return Ring(whole.latency_seconds / 2, sent / level.allreduce.bandwidth)
        bandwidth = min(level.bandwidth, level.shared_bandwidth or math.inf)
        return Ring(2 * (m - 1) * PARTS_SENT[collective] * level.latency_seconds, sent / bandwidth)

    def rings(self, ranks: Sequence[int]) -> Rings:
        """Return `ring` of every collective."""
        return Rings(
            all_reduce=self.ring(ranks, ALL_REDUCE),
            reduce_scatter=self.ring(ranks, REDUCE_SCATTER),
            all_gather=self.ring(ranks, ALL_GATHER),
            all_to_all=self.all_to_all(ranks),
        )

    @property
    def summing(self) -> Ring:
        """The cost of a sum over the shards that a rank stands for, by messages of the innermost level."""
        level, count = self.levels[0], self.shards
        bandwidth = min(level.bandwidth, level.shared_bandwidth or math.inf)
        return Ring(2 * (count - 1) * level.latency_seconds, 2 * (count - 1) / count / bandwidth)

    def all_to_all(self, ranks: Sequence[int]) -> Ring:
        """Return the cost of an exchange in which each rank sends every rank, itself included, as much.

        A rank's messages share its port, and those of the ranks of a unit the unit's link where that is
        limited. Bytes are those that a rank has for all.
        """
        m = len(ranks)
        latency, bytewise, slowest = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0), 0.0
        for index, level in enumerate(self.levels):
            inside = Counter(self.unit_below(index, rank) for rank in ranks)
            around = Counter(rank // level.ranks for rank in ranks)
            for rank in ranks:
                over_it = around[rank // level.ranks] - inside[self.unit_below(index, rank)]
                latency[rank] += over_it * level.latency_seconds
                bytewise[rank] += over_it / m / level.bandwidth
            if level.shared_bandwidth is not None:
                shared = max(count * (m - count) for count in inside.values())
                slowest = max(slowest, shared / m / level.shared_bandwidth)
        return Ring(max(latency.values()), max(slowest, *bytewise.values()))

    def occupied_seconds(self, num_bytes: Bytes, num_messages: int = 1) -> Bytes:
        """Return the least seconds that messages with `num_bytes` in all keep a rank from computing.

        They are handled, and where ranks wait for their messages sent over the fastest link.
        """
        seconds = self.handling_seconds(num_bytes, num_messages)
        if self.waits_for_messages:
            latency = min(level.latency_seconds for level in self.levels)
            bandwidth = max(level.bandwidth for level in self.levels)
            seconds = seconds + num_messages * latency + num_bytes / bandwidth
        return seconds

    def handling_seconds(self, num_bytes: Bytes, num_messages: int = 1) -> Bytes:
        """Return the processor seconds, at one end, of messages with `num_bytes` in all."""
        return num_messages * self.message_seconds + num_bytes * self.message_seconds_per_byte
