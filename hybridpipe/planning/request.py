"""The request for a plan: the schedule and options of a plan to be searched for.

Pure data, shared by the search, the configuration, the command line and `Trainer`; knows neither model nor
machines. Invariant: a request that exists can be met by some schedule.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from hybridpipe.planning.checks import NO_PREDICTION, one_of, plain, positive_int
from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.plan_checks import ZERO, check_prediction, check_takes, check_zero
from hybridpipe.planning.schedules.registry import DEFAULT, SCHEDULES, TRAITS, ScheduleTraits

AUTO = "auto"


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Args:
        schedule: one of SCHEDULES, or AUTO for the fastest by prediction.
        asynchronous: asynchronous schedules compete under AUTO as well.
        recompute: stages may recompute activations where memory is short.
        zero: what the replicas of each stage shard (`StageSpec.zero`); AUTO: what memory requires, or is
            faster by prediction, stage by stage.
        vertical_sync: under pipedream every stage uses the weights that the input stage used.
        prediction: `Plan.prediction`, of asynchronous schedules.
        max_in_flight: the most microbatches that a replica may stash. AUTO then considers only schedules that
            can limit them.

    Raises:
        ValueError: the schedule does not exist, or cannot take the options.
    """

    schedule: str = DEFAULT
    asynchronous: bool = False
    recompute: bool = False
    vertical_sync: bool = False
    max_in_flight: int | None = None
    zero: int | str = 0
    prediction: str = NO_PREDICTION

    def __post_init__(self) -> None:
        allowed = (AUTO, *SCHEDULES)
        if self.schedule not in allowed:
            raise ValueError(f"schedule must be one of {', '.join(allowed)}, got {self.schedule!r}")
        if self.asynchronous and self.schedule != AUTO:
            raise ValueError(
                f"asynchronous must be false under {self.schedule}, got true: it goes with {AUTO}"
            )
        object.__setattr__(self, "max_in_flight", plain(self.max_in_flight))
        if self.max_in_flight is not None:
            positive_int("max_in_flight", self.max_in_flight)
        check_prediction(self.prediction, self.vertical_sync)
        if self.schedule == AUTO and not self.asynchronous:
            if self.vertical_sync:
                raise ValueError(
                    "vertical_sync must be false unless asynchronous schedules are allowed, got true"
                )
            if self.predicts_weights:
                raise ValueError(
                    f"prediction must be {NO_PREDICTION} unless asynchronous schedules are allowed, "
                    f"got {self.prediction!r}"
                )
        self._check_zero()
        if self.schedule != AUTO:
            check_takes(self.schedule, self.vertical_sync, self.max_in_flight, self.prediction)

    def _check_zero(self) -> None:
        object.__setattr__(self, "zero", plain(self.zero))
        if isinstance(self.zero, str):
            one_of("zero", self.zero, (*ZERO, AUTO))
            return
        check_zero(self.zero)
        if not self.schedules:
            raise ValueError(
                f"zero must be at most {max(map(self._most_zero_under, self._considered))} under "
                f"{self.schedule}{' with max_in_flight' * (self.max_in_flight is not None)}"
                f"{' with prediction' * self.predicts_weights}, got {self.zero}"
            )

    @classmethod
    def of(cls, plan: Plan) -> "PlanRequest":
        """Return the request for plans like this one."""
        recompute = any(map(plan.recomputes, range(plan.num_stages)))
        sharded = {plan.zero_of(s) for s, replicas in enumerate(plan.replicas) if replicas > 1}
        zero = AUTO if len(sharded) > 1 else max(sharded, default=0)
        return cls(
            plan.schedule,
            recompute=recompute,
            vertical_sync=plan.vertical_sync,
            max_in_flight=plan.max_in_flight,
            zero=zero,
            prediction=plan.prediction,
        )

    @property
    def schedules(self) -> list[str]:
        """The schedules to consider, the simplest first."""
        least = 0 if isinstance(self.zero, str) else self.zero
        return [name for name in self._considered if least <= self._most_zero_under(name)]

    def compared(self, is_limited: bool) -> list[str]:
        """Return the schedules that a search compares.

        Args:
            is_limited: ranks have a limit of memory. Without one, nothing need be spared.
        """
        spares_none = self.schedule == AUTO and not is_limited
        return [name for name in self.schedules if not (spares_none and TRAITS[name].spares_memory)]

    @property
    def _considered(self) -> list[str]:
        """The schedules to consider, whatever replicas shard."""
        if self.schedule != AUTO:
            return [self.schedule]
        limited = self.max_in_flight is not None
        return [
            name
            for name, traits in TRAITS.items()
            if (self.asynchronous or not traits.is_asynchronous)
            and (traits.takes_max_in_flight or not limited)
        ]

    @property
    def predicts_weights(self) -> bool:
        """True if asynchronous schedules predict weights."""
        return self.prediction != NO_PREDICTION

    @property
    def most_zero(self) -> int:
        """The most that replicas may shard, under a schedule that is not AUTO."""
        return self._most_zero_under(self.schedule)

    def _most_zero_under(self, schedule: str) -> int:
        whole = self._prediction_under(schedule) != NO_PREDICTION  # from all of the optimizer's state
        most = 0 if whole else TRAITS[schedule].most_zero
        return min(most, 2 if self.max_in_flight is None else 1)

    @property
    def traits(self) -> ScheduleTraits:
        """The traits of the schedule, which is not AUTO."""
        return TRAITS[self.schedule]

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The ways to run a stage under a schedule that is not AUTO, the simplest first."""
        fixed = not isinstance(self.zero, str)
        zeros = (self.zero,) if fixed else range(self.most_zero + 1)
        recomputing = (False, True) if self.recompute else (False,)
        sharding = [(int(zero), scatter) for zero in zeros for scatter in (False, True)[: 1 + (zero != 0)]]
        return tuple(Variant(recompute, *each) for recompute in recomputing for each in sharding)

    def ways(self, has_experts: bool) -> tuple[Variant, ...]:
        """Return `variants`, and where the model has experts those in which replicas share them."""
        if not has_experts or not self.traits.runs_together or self.max_in_flight is not None:
            return self.variants
        sharing = (each._replace(experts=True) for each in self.variants if each.zero < 2)
        return *self.variants, *sharing

    @property
    def leanest(self) -> Variant:
        """The variant that hardly ever needs more memory than another."""
        return next(variant for variant in reversed(self.variants) if not variant.scatter)

    def under(self, schedule: str) -> "PlanRequest":
        """Return the request for one of `schedules`, without the options that it cannot take."""
        synced = self.vertical_sync and TRAITS[schedule].versions == "stashed"
        prediction = self._prediction_under(schedule)
        return replace(
            self, schedule=schedule, asynchronous=False, vertical_sync=synced, prediction=prediction
        )

    def _prediction_under(self, schedule: str) -> str:
        return self.prediction if TRAITS[schedule].is_asynchronous else NO_PREDICTION

    def plan(self, stages: Iterable[StageSpec], num_microbatches: int, chunks: int = 1) -> Plan:
        """Return the plan of these stages with the requested options, under a schedule that is not AUTO.

        Each stage says itself how it runs.
        """
        return Plan(
            tuple(stages),
            self.schedule,
            num_microbatches,
            chunks=chunks,
            vertical_sync=self.vertical_sync,
            max_in_flight=self.max_in_flight,
            prediction=self.prediction,
        )

    def check_found(self, plan: Plan) -> None:
        """Raises ValueError unless the plan is one that a search for this request could return."""
        if plan.schedule not in self.schedules:
            raise ValueError(f"schedule = {self.schedule} is requested")
        requested = self.under(plan.schedule)
        for name in ("vertical_sync", "max_in_flight", "prediction"):
            if getattr(requested, name) != getattr(plan, name):
                raise ValueError(f"{name} = {getattr(requested, name)} is requested")
        if not self.recompute and any(map(plan.recomputes, range(plan.num_stages))):
            raise ValueError("recompute = False is requested")  # True allows it, in any number of stages
        if self.zero not in (AUTO, PlanRequest.of(plan).zero) and max(plan.replicas) > 1:
            raise ValueError(f"zero = {self.zero} is requested")

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with the requested options that its schedule can take, but ways to run stages."""
        return replace(
            plan,
            vertical_sync=plan.vertical_sync or self.under(plan.schedule).vertical_sync,
            max_in_flight=self.max_in_flight or plan.max_in_flight,
            prediction=plan.prediction if plan.predicts_weights else self._prediction_under(plan.schedule),
        )

    def check_given(self, plan: Plan) -> None:
        """Raises ValueError for a requested option that a given plan contradicts."""
        present = PlanRequest.of(plan)
        for field in fields(PlanRequest):
            requested, given = getattr(self, field.name), getattr(present, field.name)
            if requested not in (field.default, given):
                said = f"{field.name} = {requested!r}"
                raise ValueError(f"{said} disagrees with the plan, which says {given!r}")


DEFAULT_REQUEST = PlanRequest()
