"""What the machines give: links between ranks, all-reduce, memory, speed.

Lives here: the data and the question "how do these two ranks reach each other". Not known here: how
it was measured (`hybridpipe.measure.probe`). Ranks fill the units of a level in order, as `mpirun` places
them by default: with 4 ranks per node, ranks 0 to 3 are on the first node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.checks import (
    MAX_RANKS,
    factor,
    non_negative,
    non_negative_int,
    positive,
    positive_int,
)

Bytes = TypeVar("Bytes", float, NDArray[np.float64])  # of one message, or of many
CLUSTER_FORMAT = "hybridpipe-cluster/1"
NO_COMPRESSION = "none"
COMPRESSIONS = {NO_COMPRESSION: 1.0, "fp16": 0.5}  # what an all-reduce moves of each byte of a gradient


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Horovod's ring all-reduce as measured: `latency + 2 (m-1)/m bytes / bandwidth` over m ranks.

    The bytes are those beyond the `burst_bytes` of the level.

    `fit_error` is how far the worst measured size is off that line, relative to the measurement. Before an
    all-reduce begins it waits `wait_seconds` on average for Horovod's next cycle, with what ranks that share
    processors lose by coming unevenly; one that is ready when the one before it ends goes on at once.
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
    """One level of the machine, from the inside out: ranks in a node, nodes in a rack.

    Args:
        name: for people, such as "node" or "network".
        ranks: how many ranks one unit of this level holds.
        bandwidth: bytes per second between two ranks of one unit, one way.
        latency_seconds: until the first byte of a message arrives.
        shared_bandwidth: bytes per second, each way, that one unit of the level below has into this level for
            all its ranks together, as the ranks of a node share its network card; None: each rank has
            `bandwidth` to itself.
        allreduce: measured figures of an all-reduce over this level; None: those of its links.
        fit_error: how far the worst measured message is off `latency + bytes / bandwidth`, relative.
        burst_bytes: what a link that has rested lets pass at once; `bandwidth` holds for what is beyond, and
            refills it: the token bucket of a network that limits a rate; None: it holds from the first byte.
            Left out of the closed formulas.
    """

    name: str
    ranks: int
    bandwidth: float
    latency_seconds: float
    shared_bandwidth: float | None = None
    allreduce: AllReduce | None = None
    fit_error: float | None = None
    burst_bytes: float | None = None

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


class Ring(NamedTuple):
    """What an all-reduce over some ranks costs: `latency_seconds + num_bytes * seconds_per_byte`.

    The first of several, `wait_seconds` more.
    """

    latency_seconds: float
    seconds_per_byte: float
    wait_seconds: float = 0.0

    def seconds(self, num_bytes: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return the seconds of one all-reduce by itself; 0 without bytes to sum."""
        start = self.latency_seconds + self.wait_seconds
        return np.where(np.greater(num_bytes, 0), start + self.seconds_per_byte * num_bytes, 0.0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines that a plan may use.

    Args:
        levels: from the inside out, each holding a multiple of the ranks of the one before; the last
            one holds all ranks.
        memory_bytes: of each rank, or one figure for all; None: not limited.
        relative_speed: per rank, 1.0 for the rank that the profile was measured on; None: all equal.
        node_ranks: how many ranks share one machine's processors; None: each rank has its own.
        compute_speeds: entry n-1 is the speed of each of n ranks of a machine that compute at once, relative
            to one that computes alone; None: 1.0 for as many as there are.
        message_seconds: processor time that a message takes from its sender, and again from its receiver
            (the overhead o of LogP, Culler et al. 1993).
        message_seconds_per_byte: and what each of its bytes adds to that.
        wakeup_seconds: entry n-1 is the processor time that a machine loses when one of its ranks has waited,
            goes on, and n of them compute then, itself included, as the kernel may let it wait for one
            processor while another has nothing to do; the last entry is that of more. Empty: none is lost, as
            where a plan's ranks of the machine have a processor each.
        replicated_speed: speed of a rank that shares its stage, relative to one that has it alone: Horovod's
            thread keeps asking the others whether there is something to reduce, which takes processor time.
        overlap: the share of an all-reduce, without its `wait_seconds`, that costs the computing rank
            nothing, in [0, 1]; the rest takes processor time, as ranks of a machine have it that all compute.
        allreduce_factor: bytes that an all-reduce moves for each byte of a gradient (COMPRESSIONS).
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
    format: str = CLUSTER_FORMAT

    def __post_init__(self) -> None:
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
        """Equal ranks, each with its own processor, behind one switch."""
        return cls(levels=(Level("network", ranks, bandwidth, latency_seconds),))

    def compressing(self, compression: str, dtype: str) -> "Cluster":
        """With gradients of that type compressed on their way (COMPRESSIONS); only float32 ones are."""
        factor_now = COMPRESSIONS[compression] if dtype == "float32" else 1.0
        return replace(self, allreduce_factor=factor_now)

    @property
    def num_ranks(self) -> int:
        """The ranks of the outermost level."""
        return self.levels[-1].ranks

    def level_index(self, rank: int, other: int) -> int:
        """The innermost level whose unit holds both ranks, counted from the inside."""
        for index, level in enumerate(self.levels):
            if rank // level.ranks == other // level.ranks:
                return index
        raise ValueError(f"ranks {rank} and {other} are not both among the cluster's {self.num_ranks}")

    def unit_below(self, index: int, rank: int) -> int:
        """Which unit of the level below `levels[index]` a rank is in: whose link it shares there."""
        return rank // (self.levels[index - 1].ranks if index else 1)

    def speed(self, rank: int) -> float:
        """Relative speed of a rank that computes alone on its machine."""
        return 1.0 if self.relative_speed is None else self.relative_speed[rank]

    def memory(self, rank: int) -> float:
        """Bytes that a rank may use; infinite where memory is not limited."""
        if self.memory_bytes is None:
            return math.inf
        return self.memory_bytes[rank] if isinstance(self.memory_bytes, tuple) else self.memory_bytes

    def node(self, rank: int) -> int:
        """Which machine's processors the rank uses."""
        return rank // (self.node_ranks or 1)

    def shared_speed(self, num_active: int) -> float:
        """Speed of each of `num_active` ranks (or threads) that compute on one machine at once.

        Beyond the figures measured they share what the most had together.
        """
        if self.compute_speeds is None:
            return min(1.0, (self.node_ranks or 1) / num_active)
        known = len(self.compute_speeds)
        if num_active <= known:
            return self.compute_speeds[num_active - 1]
        return self.compute_speeds[-1] * known / num_active

    @property
    def are_processors_private(self) -> bool:
        """Whether a rank's processor never has other work than the rank's computing, and is as fast alone."""
        return self.node_ranks in (None, 1) and self.overlap == 1 and self.shared_speed(1) == 1

    def is_busy(self, num_active: int) -> bool:
        """Whether one more than `num_active` on a machine finds no free processor: it adds less than half."""
        if not num_active:
            return False
        now, then = (n * self.shared_speed(n) for n in (num_active, num_active + 1))
        return then - now < self.shared_speed(1) / 2

    def ring(self, ranks: Sequence[int]) -> Ring:
        """Ring all-reduce (Patarasuk & Yuan 2009): in each of 2 (m-1) steps a rank sends 1/m of the data.

        The ring visits the ranks in order, so it crosses the link of each unit once in each direction. It is
        as slow as the outermost level that it crosses; a measured one has the latency of the whole level.
        """
        m = len(ranks)
        if m == 1:
            return Ring(0.0, 0.0)
        level = self.levels[self.level_index(min(ranks), max(ranks))]  # the outermost that it crosses
        sent = 2 * (m - 1) / m * self.allreduce_factor
        if (figures := level.allreduce) is not None:
            return Ring(figures.latency_seconds, sent / figures.bandwidth, figures.wait_seconds)
        bandwidth = min(level.bandwidth, level.shared_bandwidth or math.inf)
        return Ring(2 * (m - 1) * level.latency_seconds, sent / bandwidth)

    def handling_seconds(self, num_bytes: Bytes, num_messages: int = 1) -> Bytes:
        """Return the processor seconds, at one end, of messages with so many bytes together."""
        return num_messages * self.message_seconds + num_bytes * self.message_seconds_per_byte
