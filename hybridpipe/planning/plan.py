"""Plan: into which stages the model is cut, how often each is replicated, and on which ranks.

Lives here: the data, its arithmetic, and the routing of microbatches. Routing is PipeDream's
deterministic round robin (1F1B-RR, SOSP 2019, section 3.3): microbatch b is handled in stage s by
replica `b mod m_s`. Instructions know stages and microbatches; only a plan turns them into ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from hybridpipe.planning.checks import MAX_RANKS, non_negative_int, plain, positive_int

PLAN_FORMAT = "hybridpipe-plan/1"
SYNCHRONOUS = ("1f1b", "gpipe", "interleaved-1f1b", "zero-bubble")  # one update a minibatch, after a flush
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")  # no flush
SCHEDULES = SYNCHRONOUS + ASYNCHRONOUS


class Place(NamedTuple):
    """Where a rank stands: which stage it holds, as which replica."""

    stage: int
    replica: int


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The layers `[start, stop)`, held by `replicas` ranks (an empty `ranks` is filled in by the plan).

    `recompute`: it keeps only its inputs and runs the forward again before the backward (GPipe, Huang et al.
    2019, section 2.3).
    """

    start: int
    stop: int
    replicas: int = 1
    ranks: tuple[int, ...] = ()
    recompute: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(plain, self.ranks)))
        for name in ("start", "stop", "replicas"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        non_negative_int("start", self.start)
        positive_int("replicas", self.replicas)
        if self.replicas > MAX_RANKS:
            raise ValueError(f"replicas must be an integer <= {MAX_RANKS}, got {self.replicas}")
        positive_int("stop", self.stop)
        if self.stop <= self.start:
            raise ValueError(
                f"stop must be > start = {self.start}, got {self.stop}: a stage holds at least one layer"
            )
        if self.ranks and len(self.ranks) != self.replicas:
            raise ValueError(
                f"ranks must name replicas = {self.replicas} ranks, got {len(self.ranks)}: {list(self.ranks)}"
            )
        for rank in self.ranks:
            non_negative_int("ranks", rank)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a plan."""

    minibatch_seconds: float
    samples_per_second: float
    bubble_fraction: float
    peak_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in the order of the layers, a schedule, and the microbatches of a full minibatch.

    Args:
        stages: contiguous from layer 0; where no stage names its ranks they are numbered in stage order.
        schedule: one of `SCHEDULES`.
        num_microbatches: how many microbatches a full minibatch is sliced into.
        num_layers: of the whole model; defaults to the last stage's `stop`.
        chunks: how many stages each rank holds, under interleaved-1f1b: with p groups of ranks, group i
            holds the stages i, i + p, i + 2p, ...
        vertical_sync: under pipedream every stage uses the weights that the input stage saw (PipeDream, SOSP
            2019, section 3.3).
        max_in_flight: the most that a replica may stash, fewer than the schedule would; saves memory.
        recompute: every stage recomputes, whatever the stages say.
        predicted: what the simulator expects of it, if it was asked.

    Raises:
        ValueError: a gap or overlap between stages, a rank named twice, an unknown schedule.
    """

    stages: tuple[StageSpec, ...]
    schedule: str = "1f1b"
    num_microbatches: int = 1
    num_layers: int = 0
    chunks: int = 1
    vertical_sync: bool = False
    max_in_flight: int | None = None
    recompute: bool = False
    predicted: Prediction | None = None
    format: str = PLAN_FORMAT

    def __post_init__(self) -> None:
        if self.format != PLAN_FORMAT:
            raise ValueError(f"format must be {PLAN_FORMAT!r}, got {self.format!r}")
        if not self.stages:
            raise ValueError("stages must hold at least one stage, got none")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        for name in ("num_microbatches", "num_layers", "chunks", "max_in_flight"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        positive_int("num_microbatches", self.num_microbatches)
        positive_int("chunks", self.chunks)
        object.__setattr__(self, "stages", _with_ranks(tuple(self.stages), self.chunks))
        if not self.num_layers:
            object.__setattr__(self, "num_layers", self.stages[-1].stop)
        self._check_schedule()
        positive_int("num_layers", self.num_layers)
        edge = 0
        for i, stage in enumerate(self.stages):
            if stage.start != edge:
                raise ValueError(
                    f"stages[{i}].start must be {edge}, where the stage before ends, got {stage.start}"
                )
            edge = stage.stop
        if edge != self.num_layers:
            raise ValueError(f"the last stage must stop at num_layers = {self.num_layers}, got {edge}")
        twice = [rank for rank, count in Counter(self.ranks).items() if count > 1]
        if twice:
            raise ValueError(f"ranks must hold one place each, got rank {min(twice)} in more than one")

    def _check_schedule(self) -> None:
        """Raises ValueError for what the schedule cannot do."""
        if self.schedule == "pipedream" and self.num_microbatches != 1:
            raise ValueError(
                "num_microbatches must be 1 under pipedream, where a minibatch travels whole, "
                f"got {self.num_microbatches}"
            )
        if self.vertical_sync and self.schedule != "pipedream":
            raise ValueError(f"vertical_sync must be false under {self.schedule}, got true")
        if self.max_in_flight is not None:
            positive_int("max_in_flight", self.max_in_flight)
            if self.schedule not in ("1f1b", *ASYNCHRONOUS):
                raise ValueError(
                    f"max_in_flight must not be given under {self.schedule}, got {self.max_in_flight}: "
                    "what it stashes is a part of the schedule"
                )
        if self.schedule != "interleaved-1f1b":
            if self.chunks != 1:
                raise ValueError(f"chunks must be 1 unless schedule is interleaved-1f1b, got {self.chunks}")
            return
        if self.chunks < 2 or self.num_stages % self.chunks or self.num_groups < 2:
            raise ValueError(
                f"chunks must be at least 2 and divide the stages into at least 2 groups, got {self.chunks} "
                f"with {self.num_stages} stages"
            )
        if len(set(self.replicas)) > 1:
            raise ValueError(
                f"replicas must be the same in all stages under interleaved-1f1b, got {list(self.replicas)}"
            )
        for s, stage in enumerate(self.stages):
            if stage.ranks != self.stages[s % self.num_groups].ranks:
                raise ValueError(
                    f"stages[{s}].ranks must be those of stages[{s % self.num_groups}], "
                    f"{list(self.stages[s % self.num_groups].ranks)}, got {list(stage.ranks)}"
                )

    @classmethod
    def data_parallel(
        cls, num_layers: int, num_ranks: int, num_microbatches: int, schedule: str = "1f1b"
    ) -> "Plan":
        """One stage, replicated on every rank."""
        return cls((StageSpec(0, num_layers, num_ranks),), schedule, num_microbatches)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the pipeline never drains, so that its slowest stage alone sets the pace."""
        return self.schedule in ASYNCHRONOUS

    @property
    def microbatch_samples(self) -> int | None:
        """Samples of a microbatch, as the prediction has them; None without one."""
        if self.predicted is None or not self.predicted.minibatch_seconds:
            return None
        samples = self.predicted.samples_per_second * self.predicted.minibatch_seconds
        return round(samples / self.num_microbatches) or None

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def num_groups(self) -> int:
        """How many groups of ranks there are; each holds `chunks` stages."""
        return self.num_stages // self.chunks

    @property
    def num_ranks(self) -> int:
        """Ranks that the plan uses; the world may hold more, which then idle."""
        return sum(self.replicas[: self.num_groups])

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def name(self) -> str:
        """The replica counts as the literature writes them: "15-1", or "4" for plain data parallelism.

        "1-1x3": two ranks hold three stages each.
        """
        return "-".join(map(str, self.replicas[: self.num_groups])) + f"x{self.chunks}" * (self.chunks > 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank used, in stage order."""
        return tuple(rank for stage in self.stages[: self.num_groups] for rank in stage.ranks)

    def place(self, rank: int) -> Place | None:
        """Where `rank` stands, in the first stage that it holds; None if the plan leaves it unused."""
        for s, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return Place(s, stage.ranks.index(rank))
        return None

    def held_stages(self, place: Place) -> range:
        """The stages that the rank at `place` holds, by chunk."""
        return range(place.stage, self.num_stages, self.num_groups)

    def recomputes(self, stage: int) -> bool:
        """Whether a stage runs its forward again before the backward."""
        return self.recompute or self.stages[stage].recompute

    def products_wait(self, stage: int) -> bool:
        """Whether products that its last backward leaves to be made are made once its gradient is sent.

        Not where no rank waits for that, nor where an all-reduce is to begin while the backward runs.
        """
        return stage > 0 and self.replicas[stage] == 1

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that handles `microbatch` in `stage`."""
        ranks = self.stages[stage].ranks
        return ranks[microbatch % len(ranks)]

    def microbatches_of(self, place: Place, num_microbatches: int) -> range:
        """The microbatches that one replica handles, out of the first `num_microbatches`."""
        return range(place.replica, num_microbatches, self.stages[place.stage].replicas)

    def check_world(self, world_size: int) -> None:
        """Raises ValueError, with the sum, unless the plan fits into a world of that many ranks."""
        if self.num_ranks > world_size:
            counts = " + ".join(map(str, self.replicas))
            raise ValueError(f"plan needs {counts} = {self.num_ranks} ranks, got {world_size}")
        if max(self.ranks) >= world_size:
            raise ValueError(f"plan names rank {max(self.ranks)}, the world has ranks 0 to {world_size - 1}")


def microbatch_sizes(num_samples: int, microbatch_size: int) -> list[int]:
    """Samples in each microbatch of a minibatch: all of one size but for the last."""
    full, rest = divmod(num_samples, microbatch_size)
    return [microbatch_size] * full + [rest] * (rest > 0)


def _with_ranks(stages: Sequence[StageSpec], chunks: int) -> tuple[StageSpec, ...]:
    """The stages with ranks in stage order where none are named; from one chunk to the next they repeat."""
    named = [bool(stage.ranks) for stage in stages]
    if all(named):
        return tuple(stages)
    if any(named):
        raise ValueError("ranks must be named for every stage or for none, got some")
    num_groups = max(1, len(stages) // chunks)
    edges = list(accumulate((stage.replicas for stage in stages[:num_groups]), initial=0))
    return tuple(
        replace(stage, ranks=tuple(range(edges[s % num_groups], edges[s % num_groups] + stage.replicas)))
        for s, stage in enumerate(stages)
    )
