"""The request for a plan: the schedule and options of a plan to be searched for.

Pure data, shared by the search, the configuration, the command line and `Trainer`; knows neither model nor
machines. Invariant: a request that exists can be met by some schedule.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from hybridpipe.planning.checks import plain, positive_int
from hybridpipe.planning.plan import Plan, StageSpec, Variant, check_takes
from hybridpipe.planning.schedules.registry import DEFAULT, SCHEDULES, TRAITS, ScheduleTraits

AUTO = "auto"


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Args:
        schedule: one of SCHEDULES, or AUTO for the fastest by prediction.
        asynchronous: asynchronous schedules compete under AUTO, too.
        recompute: stages may recompute activations where memory is short.
        vertical_sync: under pipedream every stage uses the weights that the input stage used.
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
        if self.schedule == AUTO and self.vertical_sync and not self.asynchronous:
            raise ValueError(
                "vertical_sync must be false unless asynchronous schedules are allowed, got true"
            )
        if self.schedule != AUTO:
            check_takes(self.schedule, self.vertical_sync, self.max_in_flight)

    @classmethod
    def of(cls, plan: Plan) -> "PlanRequest":
        """Return the request for plans like this one."""
        recompute = any(map(plan.recomputes, range(plan.num_stages)))
        return cls(plan.schedule, False, recompute, plan.vertical_sync, plan.max_in_flight)

    @property
    def schedules(self) -> list[str]:
        """The schedules to consider, the simplest first."""
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
    def traits(self) -> ScheduleTraits:
        """The traits of the schedule, which is not AUTO."""
        return TRAITS[self.schedule]

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The ways to run a stage, the fastest first; each needs no more memory than the one before."""
        return (Variant(), Variant(recompute=True)) if self.recompute else (Variant(),)

    def under(self, schedule: str) -> "PlanRequest":
        """Return the request for one of `schedules`, without the options that it cannot take."""
        synced = self.vertical_sync and TRAITS[schedule].versions == "stashed"
        return replace(self, schedule=schedule, asynchronous=False, vertical_sync=synced)

    def plan(self, stages: Iterable[StageSpec], num_microbatches: int, chunks: int = 1) -> Plan:
        """Return the plan of these stages with the requested options, under a schedule that is not AUTO.

        Each stage says itself whether it recomputes.
        """
        return Plan(
            tuple(stages),
            self.schedule,
            num_microbatches,
            chunks=chunks,
            vertical_sync=self.vertical_sync,
            max_in_flight=self.max_in_flight,
        )

    def check_found(self, plan: Plan) -> None:
        """Raises ValueError unless the plan is one that a search for this request could return."""
        if plan.schedule not in self.schedules:
            raise ValueError(f"schedule = {self.schedule} is requested")
        requested = self.under(plan.schedule)
        for name in ("vertical_sync", "max_in_flight"):
            if getattr(requested, name) != getattr(plan, name):
                raise ValueError(f"{name} = {getattr(requested, name)} is requested")
        if not self.recompute and any(map(plan.recomputes, range(plan.num_stages))):
            raise ValueError("recompute = False is requested")  # True allows it, in any number of stages

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with the requested options that its schedule can take, but recomputation."""
        return replace(
            plan,
            vertical_sync=plan.vertical_sync or self.under(plan.schedule).vertical_sync,
            max_in_flight=self.max_in_flight or plan.max_in_flight,
        )

    def check_given(self, plan: Plan) -> None:
        """Raises ValueError for a requested option that a given plan contradicts."""
        for field in fields(PlanRequest):
            requested, given = getattr(self, field.name), getattr(plan, field.name, None)
            if requested not in (field.default, given):
                said = f"{field.name} = {requested!r}"
                raise ValueError(f"{said} disagrees with the plan, which says {given!r}")


DEFAULT_REQUEST = PlanRequest()
