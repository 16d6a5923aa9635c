"""What the machines give: links between ranks, all-reduce, memory, speed.

Lives here: the data and the question "how do these two ranks reach each other". Not known here: how
it was measured (`hybridpipe.probe`). Ranks fill the units of a level in order, as `mpirun` places
them by default: with 4 ranks per node, ranks 0 to 3 are on the first node.
"""

from dataclasses import dataclass

from hybridpipe.planning.checks import non_negative, non_negative_int, positive, positive_int

CLUSTER_FORMAT = "hybridpipe-cluster/1"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the machine, from the inside out: ranks in a node, nodes in a rack.

    Args:
        name: for people, such as "node" or "network".
        ranks: how many ranks one unit of this level holds.
        bandwidth: bytes per second between two ranks of one unit, one way.
        latency_seconds: until the first byte of a message arrives.
    """

    name: str
    ranks: int
    bandwidth: float
    latency_seconds: float

    def __post_init__(self) -> None:
        positive_int("ranks", self.ranks)
        positive("bandwidth", self.bandwidth)
        non_negative("latency_seconds", self.latency_seconds)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Horovod's ring all-reduce as measured: `latency + 2 (m-1)/m bytes / bandwidth` over m ranks."""

    bandwidth: float
    latency_seconds: float

    def __post_init__(self) -> None:
        positive("allreduce.bandwidth", self.bandwidth)
        non_negative("allreduce.latency_seconds", self.latency_seconds)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines that a plan may use.

    Args:
        levels: from the inside out, each holding a multiple of the ranks of the one before; the last
            one holds all ranks.
        allreduce: measured figures of the gradient all-reduce; None: the slowest link's figures.
        memory_bytes: memory per rank; None: not limited.
        relative_speed: per rank, 1.0 for the rank that the profile was measured on; None: all equal.
        node_ranks: how many ranks share one node's processors; None: each rank has its own.
        compute_slots: how many of a node's ranks can compute at full speed at once; with more ranks
            active they share, as four ranks on two cores do. None: as many as there are ranks.
        message_seconds: processor time that a message takes from its sender, and again from its receiver
            (the overhead o of LogP, Culler et al. 1993).
    """

    levels: tuple[Level, ...]
    allreduce: AllReduce | None = None
    memory_bytes: int | None = None
    relative_speed: tuple[float, ...] | None = None
    node_ranks: int | None = None
    compute_slots: float | None = None
    message_seconds: float = 0.0
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
        if self.memory_bytes is not None:
            non_negative_int("memory_bytes", self.memory_bytes)
        if self.relative_speed is not None:
            if len(self.relative_speed) != self.num_ranks:
                raise ValueError(
                    f"relative_speed must hold one figure for each of the {self.num_ranks} ranks, "
                    f"got {len(self.relative_speed)}"
                )
            for speed in self.relative_speed:
                positive("relative_speed", speed)
        if self.node_ranks is not None:
            positive_int("node_ranks", self.node_ranks)
        if self.compute_slots is not None:
            positive("compute_slots", self.compute_slots)
        non_negative("message_seconds", self.message_seconds)

    @classmethod
    def flat(cls, ranks: int, bandwidth: float, latency_seconds: float) -> "Cluster":
        """Equal ranks, each with its own processor, behind one switch."""
        return cls(levels=(Level("network", ranks, bandwidth, latency_seconds),))

    @property
    def num_ranks(self) -> int:
        """The ranks of the outermost level."""
        return self.levels[-1].ranks

    def link(self, rank: int, other: int) -> Level:
        """The innermost level whose unit holds both ranks: what a message between them crosses."""
        for level in self.levels:
            if rank // level.ranks == other // level.ranks:
                return level
        raise ValueError(f"ranks {rank} and {other} are not both among the cluster's {self.num_ranks}")

    def slowest_link(self, ranks: tuple[int, ...]) -> Level:
        """The outermost level that a ring through these (one or more) ranks crosses."""
        return self.link(min(ranks), max(ranks))

    def speed(self, rank: int) -> float:
        """Relative speed of a rank that computes alone on its node."""
        return 1.0 if self.relative_speed is None else self.relative_speed[rank]

    def node(self, rank: int) -> int:
        """Which node the rank's processors belong to."""
        return rank // (self.node_ranks or 1)

    @property
    def slots(self) -> float:
        """Ranks' worth of compute that one node gives at once."""
        return float(self.node_ranks or 1) if self.compute_slots is None else self.compute_slots

    def allreduce_seconds(self, num_bytes: float, ranks: tuple[int, ...]) -> float:
        """Ring (Patarasuk & Yuan 2009): every rank sends 2 (m-1)/m of the data, alone on its link."""
        m = len(ranks)
        if m == 1:
            return 0.0
        figures = self.allreduce or self.slowest_link(ranks)
        return figures.latency_seconds + 2 * (m - 1) / m * num_bytes / figures.bandwidth
