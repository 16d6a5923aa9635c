"""Ranks: the state of the ranks, their groups of replicas and their messages during a simulation.

Pure data with its bookkeeping. Not known here: what starts, and when (`simulator`).
Invariant: buckets are counted over all rounds, so that a replica may be a round ahead of another.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridpipe.planning.cluster import ALL_GATHER, Ring
from hybridpipe.planning.cost.exchanges import pass_exchanges
from hybridpipe.planning.cost.formula import StageCost
from hybridpipe.planning.layer_parts import NO_SUMS
from hybridpipe.planning.schedules.instructions import (
    Instruction,
    JoinBackward,
    JoinForward,
    Program,
    final_backwards,
)
from hybridpipe.planning.shared_parameters import SharedMessage
from hybridpipe.planning.simulator.resources import Machines, Route
from hybridpipe.planning.timeline import TimedEvent

Key = tuple[int, int, bool, int, int]  # sender, receiver, forward?, microbatch, the receiver's stage


class Rank:
    """One rank: its processors, and its position in its program."""

    def __init__(
        self,
        number: int,
        stages: Sequence[int],
        program: Program,
        costs: Sequence[StageCost],
        replicas: "Replicas",
        machines: Machines,
        defers_wgrad: Callable[[int], bool],
    ) -> None:
        self.number, self.stages, self.program = number, stages, program
        self.costs = [costs[s] for s in stages]  # by chunk
        self.defers_wgrad = [defers_wgrad(s) for s in stages]
        self.update_seconds = sum(cost.update_seconds for cost in self.costs)
        self.replicas = replicas
        self.processors, self.speed = machines.processors(number), machines.cluster.speed(number)
        if len(replicas.numbers) > 1:
            self.speed *= machines.cluster.replicated_speed
        self.join_seconds: dict[tuple[int, type[Instruction]], float] = {}  # by chunk and kind
        if replicas.token_ring is not None or any(cost.sums != NO_SUMS for cost in self.costs):
            for chunk in range(len(stages)):
                self.add_exchanges(chunk, replicas.token_ring or Ring(0.0, 0.0), machines.cluster.summing)
        self.is_crowded = False  # its machine has more active ranks than processors
        self.position = 0
        self.since = 0.0  # when the instruction at `position` began
        self.events: list[TimedEvent] = []
        has_finals = replicas.buckets or any(cost.products_seconds for cost in self.costs)
        self.finals = final_backwards(program) if has_finals else frozenset[int]()
        self.products_seconds = 0.0  # of deferred products
        self.round = 0
        self.exchanging: deque[SharedMessage] = deque()  # messages left of this round's exchange
        self.num_filled = [0] * len(self.costs)  # of each chunk's buckets, in this round

    def add_exchanges(self, chunk: int, tokens: Ring, sums: Ring) -> None:
        """Let a chunk's passes take what they exchange as well, which no processor's speed changes."""
        cost = self.costs[chunk]
        forward, backward = (self.speed * seconds for seconds in pass_exchanges(cost, tokens, sums))
        self.join_seconds[chunk, JoinForward] = cost.experts_share * cost.forward_seconds + forward
        self.join_seconds[chunk, JoinBackward] = cost.experts_share * cost.backward_seconds + backward
        self.costs[chunk] = replace(
            cost,
            forward_seconds=cost.forward_seconds + forward,
            backward_seconds=cost.backward_seconds + backward,
        )

    @property
    def stage(self) -> int:
        """The stage of the current instruction."""
        return self.stages[getattr(self.program[self.position], "chunk", 0)]

    def bucket(self, chunk: int) -> int:
        """Return the chunk's first bucket that is not filled yet."""
        replicas = self.replicas
        first = replicas.first_bucket[chunk] + self.num_filled[chunk]
        return self.round * len(replicas.buckets) + first


class Replicas:
    """The ranks that hold the same stages, and the gradients that they reduce together."""

    def __init__(
        self, ranks: Sequence[int], costs: Sequence[StageCost], machines: Machines, reduction: str
    ) -> None:
        self.numbers = ranks
        exchanges = any(cost.num_exchanges for cost in costs)
        self.token_ring = machines.cluster.all_to_all(ranks) if exchanges else None
        self.together: list[tuple[Rank, Instruction]] = []  # have come to a pass
        each = [cost.buckets if len(ranks) > 1 else () for cost in costs]  # by chunk
        self.buckets = [bucket for buckets in reversed(each) for bucket in buckets]
        self.first_bucket = [sum(map(len, each[chunk + 1 :])) for chunk in range(len(each))]
        self.ring = machines.ring(ranks, reduction) if self.buckets else None
        self.gather_ring = machines.ring(ranks, ALL_GATHER) if self.buckets else None
        self.num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        self.ranks: list[Rank] = []
        self.filled: Counter[int] = Counter()  # by bucket, counted over all rounds: replicas that filled it
        self.ready_times: dict[int, list[Sequence[float]]] = {}  # by chunk: times noted by `fill_when_ready`
        self.num_reduced = 0
        self.num_parts = 0  # unfinished jobs of the bucket being reduced
        self.waiting: list[Rank] = []  # for the reduction
        self.gathering: list[Rank] = []  # in the all-gather of the weights


class Message:
    """A message between two ranks, created by the send or the receive, whichever comes first."""

    __slots__ = ("arrived", "is_late", "is_sent", "key", "num_bytes", "receiver", "route", "sender")
    sender: Rank
    route: Route

    def __init__(self, key: Key) -> None:
        self.key = key
        self.num_bytes = 0.0
        self.receiver: Rank | None = None  # once it waits
        self.arrived = False
        self.is_sent = self.is_late = False  # for `waiting`: under way, and its receiver came after that
