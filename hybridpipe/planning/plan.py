"""Plan: the stages of the model, their replicas and ranks, and the routing of microbatches.

Pure data. Instructions know stages and microbatches; only a plan turns them into ranks. Invariant: microbatch
b is handled in stage s by replica `b mod m_s`, PipeDream's deterministic round robin (1F1B-RR, SOSP 2019,
section 3.3).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from hybridpipe.planning.checks import (
    BACKENDS,
    MAX_RANKS,
    NO_PREDICTION,
    non_negative_int,
    one_of,
    plain,
    positive_int,
)
from hybridpipe.planning.plan_checks import SPLIT_OPTIONS, check_plan, check_sync_batchnorm, check_zero
from hybridpipe.planning.schedules.registry import DEFAULT, SCHEDULES, TRAITS, Placement, ScheduleTraits

PLAN_FORMAT = "hybridpipe-plan/1"


class Place(NamedTuple):
    """The place of a rank: its index along each axis.

    Args:
        stage: the first stage that it holds.
        replica: its number among the stage's replicas.
        shard: the part of its layers that it computes; 0 where layers are whole.
    """

    stage: int
    replica: int
    shard: int = 0

    def is_first(self, but_for: Collection[str] = ()) -> bool:
        """Return True for the first of the ranks that hold the same.

        Args:
            but_for: the axes along which ranks hold different parts of it.
        """
        return all(name in but_for or not getattr(self, name) for name in ("replica", "shard"))


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage: the layers `[start, stop)`, held by `replicas` × `tensor` ranks.

    Args:
        start, stop: layers, counted from 0.
        ranks: in the order of the replicas, the shards of each one after the other; empty: the plan numbers
            them.
        recompute: the stage keeps only its inputs and runs the forward again before the backward (GPipe,
            Huang et al. 2019, section 2.3).
        zero: what its replicas shard (ZeRO, Rajbhandari et al., SC 2020, section 5): 0
            nothing, 1 the optimizer's state and its update, 2 also the gradients. Without meaning for one
            replica.
        scatter: under `zero` gradients are reduced by a reduce-scatter; False: by an all-reduce.
        experts: each replica holds its share of the experts of every mixture in the stage, and replicas
            exchange tokens (GShard, Lepikhin et al., ICLR 2021, section 3). Without meaning for one replica.
        sync_batchnorm: neighbouring replicas whose microbatches its BatchNorm layers normalise together; the
            training's option of that name says it.
        tensor: ranks of a replica, its shards. Each holds a part of the weights that the model's tensor plan
            names, and they sum what the parts make (Megatron-LM, Shoeybi et al. 2019, section 3).

    Raises:
        ValueError: the stage is empty, `ranks` does not name as many ranks, `zero` is none of these, or
            `sync_batchnorm` does not divide the replicas.
    """

    start: int
    stop: int
    replicas: int = 1
    ranks: tuple[int, ...] = ()
    recompute: bool = False
    zero: int = 0
    scatter: bool = False
    experts: bool = False
    tensor: int = 1
    sync_batchnorm: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(plain, self.ranks)))
        for name in ("start", "stop", "replicas", "zero", "tensor", "sync_batchnorm"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        non_negative_int("start", self.start)
        for name in ("replicas", "tensor"):
            positive_int(name, getattr(self, name))
            if getattr(self, name) > MAX_RANKS:
                raise ValueError(f"{name} must be an integer <= {MAX_RANKS}, got {getattr(self, name)}")
        positive_int("stop", self.stop)
        if self.stop <= self.start:
            raise ValueError(
                f"stop must be > start = {self.start}, got {self.stop}: a stage holds at least one layer"
            )
        if self.ranks and len(self.ranks) != self.num_ranks:
            count = f"replicas = {self.replicas}" + f" times tensor = {self.tensor}" * (self.tensor > 1)
            raise ValueError(f"ranks must name {count} ranks, got {len(self.ranks)}: {list(self.ranks)}")
        for rank in self.ranks:
            non_negative_int("ranks", rank)
        check_zero(self.zero)
        check_sync_batchnorm(self.sync_batchnorm, self.replicas)

    @property
    def num_ranks(self) -> int:
        """The number of its ranks."""
        return self.replicas * self.tensor

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first shard of each replica."""
        return self.ranks[:: self.tensor]

    def holders_along(self, axis: str | None) -> tuple[int, ...]:
        """Return the ranks that have the parts of a parameter, in their order.

        Args:
            axis: of `Place`, along which it is in parts; None: it is whole, and the first rank has it.
        """
        return {"replica": self.leaders, "shard": self.ranks[: self.tensor]}.get(axis or "", self.ranks[:1])


class Variant(NamedTuple):
    """A way to run a stage; each field is the field of `StageSpec` with its name."""

    recompute: bool = False
    zero: int = 0
    scatter: bool = False
    experts: bool = False

    @classmethod
    def of(cls, stage: StageSpec) -> "Variant":
        """Return the way in which a stage runs."""
        return cls(*(getattr(stage, name) for name in cls._fields))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's figures of a plan.

    Args:
        bubble_fraction: the idle share of all ranks' time, in [0, 1].
        peak_memory_bytes: of each rank, in stage order.
    """

    minibatch_seconds: float
    samples_per_second: float
    bubble_fraction: float
    peak_memory_bytes: tuple[int, ...]


class PassTimes(NamedTuple):
    """The times of a stage's passes, whole numbers of one unit for all stages.

    Args:
        backward_input, backward_weight: the halves of the backward.
        message: over the cut behind the stage, in either direction; 0 where its outputs stay on the rank.
    """

    forward: int
    backward_input: int
    backward_weight: int
    message: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in the order of the layers, a schedule, and the microbatches of a full minibatch.

    Args:
        stages: contiguous from layer 0; ranks are numbered in stage order where no stage names its ranks.
        schedule: one of `SCHEDULES`.
        num_microbatches: microbatches in a full minibatch.
        num_layers: of the whole model; defaults to the last stage's `stop`.
        chunks: stages that each rank holds, where the schedule interleaves them.
        placement: where they lie (`ScheduleTraits.placement`): of p groups of ranks, group i holds the stages
            i, i + p, i + 2p, ... in a "loop", and i, 2p - 1 - i, 2p + i, ... in a "v". None: as the schedule
            has them.
        vertical_sync: under pipedream every stage uses the weights that the input stage used (PipeDream, SOSP
            2019, section 3.3).
        max_in_flight: the most microbatches that a replica may stash, fewer than the schedule would; saves
            memory.
        prediction: one of PREDICTIONS. Under an asynchronous schedule forward and backward then use weights
            that are predicted for the update that their gradient goes into.
        recompute: every stage recomputes, whatever the stages say.
        zero: the least `StageSpec.zero` of all stages, whatever they say.
        in_flight: the microbatches whose split backward has not begun, in the stage that has most; the others
            have theirs in proportion. None: those of 1f1b (ZB-H1). More fill the bubble at the start. In a V:
            the most microbatches that a rank holds, of both its stages. None: the schedule's own
            (`ScheduleTraits.least_room`).
        weight_lag: the microbatches by which the weights' half of a split backward follows the inputs' half,
            in the stage that has fewest in flight; the others lag in proportion. None: no stage stashes more
            than the one that has most in flight. More fill the bubble at the end.
        pass_times: of each stage, where the order of passes follows them. None: all take equally long, and
            messages no time.
        predicted: the simulator's figures, if it has run.
        sync: the backend that sums gradients over replicas, one of BACKENDS; None: chosen where the plan
            runs. Plans that differ only in it are equal: it changes no instruction.

    Raises:
        ValueError: a gap or overlap between stages, a rank named twice, an unknown schedule.
    """

    stages: tuple[StageSpec, ...]
    schedule: str = DEFAULT
    num_microbatches: int = 1
    num_layers: int = 0
    chunks: int = 1
    placement: Placement | None = None
    vertical_sync: bool = False
    max_in_flight: int | None = None
    prediction: str = NO_PREDICTION
    recompute: bool = False
    zero: int = 0
    in_flight: int | None = None
    weight_lag: int | None = None
    pass_times: tuple[PassTimes, ...] | None = None
    predicted: Prediction | None = None
    sync: str | None = field(default=None, compare=False)
    format: str = PLAN_FORMAT

    def __post_init__(self) -> None:
        if self.format != PLAN_FORMAT:
            raise ValueError(f"format must be {PLAN_FORMAT!r}, got {self.format!r}")
        if not self.stages:
            raise ValueError("stages must hold at least one stage, got none")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        for name in ("num_microbatches", "num_layers", "chunks", "max_in_flight", "zero", *SPLIT_OPTIONS):
            object.__setattr__(self, name, plain(getattr(self, name)))
        positive_int("num_microbatches", self.num_microbatches)
        positive_int("chunks", self.chunks)
        self._place_chunks()
        if not self.num_layers:
            object.__setattr__(self, "num_layers", self.stages[-1].stop)
        if self.pass_times is not None:
            object.__setattr__(self, "pass_times", tuple(PassTimes(*each) for each in self.pass_times))
        check_plan(self)
        if self.sync is not None:
            one_of("sync", self.sync, BACKENDS)
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

    def _place_chunks(self) -> None:
        """Set the placement, and the ranks where no stage names its own; each chunk repeats them.

        Raises:
            ValueError: the schedule places chunks otherwise, or only some stages name their ranks.
        """
        allowed = self.traits.placement if self.traits.interleaves else None
        if self.placement not in (None, allowed):
            what = f"must be {allowed}" if allowed else "must not be given"
            raise ValueError(f"placement {what} under {self.schedule}, got {self.placement}")
        object.__setattr__(self, "placement", allowed)
        stages = tuple(self.stages)
        named = [bool(stage.ranks) for stage in stages]
        if any(named) and not all(named):
            raise ValueError("ranks must be named for every stage or for none, got some")
        if not any(named) and len(stages) >= self.chunks:
            edges = list(accumulate((stage.num_ranks for stage in stages[: self.num_groups]), initial=0))
            firsts = [edges[self.group_of(s)] for s in range(len(stages))]
            stages = tuple(
                replace(stage, ranks=tuple(range(first, first + stage.num_ranks)))
                for first, stage in zip(firsts, stages, strict=True)
            )
        object.__setattr__(self, "stages", stages)

    @classmethod
    def data_parallel(
        cls, num_layers: int, num_ranks: int, num_microbatches: int, schedule: str = DEFAULT
    ) -> "Plan":
        """Return the plan of one stage, replicated on every rank."""
        return cls((StageSpec(0, num_layers, num_ranks),), schedule, num_microbatches)

    def running(self, variants: Sequence[Variant]) -> "Plan":
        """Return the plan with its stages run in these ways; a stage with one replica shares nothing out."""
        each = zip(self.stages, variants, strict=True)
        wanted = [one if stage.replicas > 1 else Variant(one.recompute) for stage, one in each]
        if not self.recompute and not self.zero and list(map(Variant.of, self.stages)) == wanted:
            return self
        stages = (replace(*each, **one._asdict()) for *each, one in zip(self.stages, wanted, strict=True))
        return replace(self, stages=tuple(stages), recompute=False, zero=0)

    @property
    def traits(self) -> ScheduleTraits:
        """The traits of its schedule."""
        return TRAITS[self.schedule]

    @property
    def is_asynchronous(self) -> bool:
        """True if the pipeline is never flushed; its slowest stage alone then sets the pace."""
        return self.traits.is_asynchronous

    @property
    def predicts_weights(self) -> bool:
        """True if forward and backward use weights that are predicted."""
        return self.prediction != NO_PREDICTION

    @property
    def alternates(self) -> bool:
        """True if each microbatch's forward runs once, and its backward before the next one's forward."""
        deferred = self.traits.splits_backward or self.is_asynchronous or not self.traits.has_warm_up
        recomputes = any(map(self.recomputes, range(self.num_stages)))
        return self.num_stages == 1 and not deferred and not recomputes

    @property
    def microbatch_samples(self) -> int | None:
        """Samples of a microbatch, derived from the prediction; None without one."""
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
        """The number of groups of ranks; each holds `chunks` stages."""
        return self.num_stages // self.chunks

    @property
    def room(self) -> int:
        """The most microbatches that a rank in a V holds, of both its stages; 0 under other schedules."""
        least = self.traits.least_room
        return (self.in_flight or least(self.num_groups)) if least else 0

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the plan uses; further ranks of the world idle."""
        return sum(stage.num_ranks for stage in self.stages[: self.num_groups])

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def name(self) -> str:
        """The replica counts as the literature writes them: "15-1", or "4" for plain data parallelism.

        In "1-1x3" two ranks hold three stages each; in "2t4-1" the first stage has two replicas of four
        shards each.
        """
        groups = self.stages[: self.num_groups]
        counts = (f"{each.replicas}" + f"t{each.tensor}" * (each.tensor > 1) for each in groups)
        return "-".join(counts) + f"x{self.chunks}" * (self.chunks > 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank in use, in stage order."""
        return tuple(rank for stage in self.stages[: self.num_groups] for rank in stage.ranks)

    def place(self, rank: int) -> Place | None:
        """Return the rank's place in the first stage that it holds; None if the plan leaves it unused."""
        for s, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return Place(s, *divmod(stage.ranks.index(rank), stage.tensor))
        return None

    def rank_at(self, place: Place) -> int:
        """Return the rank at a place."""
        return self.rank_of(place.stage, place.replica, place.shard)

    @property
    def splits_tensors(self) -> bool:
        """True if replicas of a stage have several shards."""
        return any(stage.tensor > 1 for stage in self.stages)

    def of_leaders(self) -> "Plan":
        """Return the plan of each replica's first shard; the others do the same at the same time."""
        if not self.splits_tensors:
            return self
        stages = tuple(replace(stage, ranks=stage.leaders, tensor=1) for stage in self.stages)
        return replace(self, stages=stages, predicted=None)

    def group_of(self, stage: int) -> int:
        """Return the group of ranks that holds a stage: the number of its first stage."""
        return group_of(stage, self.num_groups, self.placement)

    @property
    def groups(self) -> tuple[int, ...]:
        """The group of ranks that holds each stage."""
        return tuple(map(self.group_of, range(self.num_stages)))

    def chunk_of(self, stage: int) -> int:
        """Return the number of a stage among those that its ranks hold."""
        return stage // self.num_groups

    def held_stages(self, place: Place) -> tuple[int, ...]:
        """Return the stages that the rank at `place` holds, by chunk."""
        firsts = range(0, self.num_stages, self.num_groups)  # of each chunk
        return tuple(first + self.group_of(first + place.stage) for first in firsts)

    def hands_over(self, stage: int) -> bool:
        """True if the next stage lies on the same ranks: nothing is sent over the cut."""
        return 0 <= stage < self.num_stages - 1 and self.stages[stage].ranks == self.stages[stage + 1].ranks

    def sends(self, stage: int) -> bool:
        """True if the next stage lies on other ranks, and so receives messages."""
        return 0 <= stage < self.num_stages - 1 and not self.hands_over(stage)

    def version_stage(self, stage: int) -> int:
        """Return the stage whose updates determine the weights that a microbatch uses in `stage`."""
        return 0 if self.vertical_sync else stage

    def recomputes(self, stage: int) -> bool:
        """True if a stage runs its forward again before the backward."""
        return self.recompute or self.stages[stage].recompute

    def zero_of(self, stage: int) -> int:
        """Return what a stage's replicas shard (`StageSpec.zero`); 0 for one replica."""
        spec = self.stages[stage]
        return max(self.zero, spec.zero) if spec.replicas > 1 else 0

    def scatters(self, stage: int) -> bool:
        """True if a stage's gradients are reduced by a reduce-scatter."""
        return self.zero_of(stage) > 0 and self.stages[stage].scatter

    def splits_experts(self, stage: int) -> bool:
        """True if a stage's replicas hold shares of its experts."""
        spec = self.stages[stage]
        return spec.experts and spec.replicas > 1

    def together(self, stage: int) -> int:
        """Return how many neighbouring replicas of a stage run every pass together: 1 where each runs alone.

        They exchange in it: tokens of experts, or sums of BatchNorm layers.
        """
        return self.replicas[stage] if self.splits_experts(stage) else self.stages[stage].sync_batchnorm

    def splits(self, stage: int) -> bool:
        """True if ranks of a stage hold parts of its parameters."""
        return self.splits_experts(stage) or self.stages[stage].tensor > 1

    def defers_wgrad(self, stage: int) -> bool:
        """True if the last backward's deferred products are computed after its gradient is sent.

        Not where no rank waits for the gradient, nor where an all-reduce can start during the backward.
        """
        return stage > 0 and self.stages[stage].replicas == 1

    def rank_of(self, stage: int, microbatch: int, shard: int = 0) -> int:
        """Return the rank that handles `microbatch` in `stage`, or a shard of it."""
        spec = self.stages[stage]
        return spec.ranks[microbatch % spec.replicas * spec.tensor + shard]

    def microbatches_of(self, place: Place, num_microbatches: int) -> range:
        """Return the microbatches that one replica handles, of the first `num_microbatches`."""
        return range(place.replica, num_microbatches, self.stages[place.stage].replicas)

    def check_world(self, world_size: int) -> None:
        """Raises ValueError, with the sum, unless the plan fits into a world of that many ranks."""
        if self.num_ranks > world_size:
            counts = " + ".join(str(stage.num_ranks) for stage in self.stages[: self.num_groups])
            raise ValueError(f"plan needs {counts} = {self.num_ranks} ranks, got {world_size}")
        if max(self.ranks) >= world_size:
            raise ValueError(f"plan names rank {max(self.ranks)}, the world has ranks 0 to {world_size - 1}")


def group_of(stage: int, num_groups: int, placement: Placement | None) -> int:
    """Return the group of ranks that holds a stage (`Plan.placement`)."""
    chunk, group = divmod(stage, num_groups)
    return num_groups - 1 - group if placement == "v" and chunk % 2 else group
