"""Plan checks: what the parts of a plan must not say together.

Pure. Knows a plan's fields and the traits of schedules; changes nothing.
Invariant: a plan that exists has passed all of `check_plan`, each with a message that names the field.
"""

from typing import TYPE_CHECKING

from hybridpipe.planning.checks import NO_PREDICTION, PREDICTIONS, non_negative_int, one_of, positive_int
from hybridpipe.planning.schedules.registry import TRAITS

if TYPE_CHECKING:
    from hybridpipe.planning.plan import Plan

ZERO = (0, 1, 2)  # what replicas may shard: nothing, the optimizer's state, the gradients, too
# What a plan whose backwards are split may say, the check of each, and the trait of schedules that take it.
SPLIT_OPTIONS = {
    "in_flight": (positive_int, "splits_backward"),
    "weight_lag": (non_negative_int, "takes_lags"),
}


def check_zero(zero: int) -> None:
    """Raises ValueError unless `zero` is one of ZERO."""
    non_negative_int("zero", zero)
    one_of("zero", zero, ZERO)


def check_sync_batchnorm(together: int, replicas: int) -> None:
    """Raises ValueError unless the replicas are a multiple of those that normalise together."""
    positive_int("sync_batchnorm", together)
    if replicas % together:
        raise ValueError(f"sync_batchnorm must divide replicas = {replicas}, got {together}")


def check_prediction(prediction: str, vertical_sync: bool) -> None:
    """Raises ValueError unless `prediction` is one of PREDICTIONS, and goes with `vertical_sync`."""
    one_of("prediction", prediction, PREDICTIONS)
    if prediction != NO_PREDICTION and vertical_sync:
        raise ValueError(
            f"vertical_sync must be false with prediction = {prediction!r}, got true: predicted weights are "
            "of one version in all stages already"
        )


def check_takes(schedule: str, vertical_sync: bool, max_in_flight: int | None, prediction: str) -> None:
    """Raises ValueError for an option that the schedule cannot take."""
    traits = TRAITS[schedule]
    if vertical_sync and traits.versions != "stashed":
        raise ValueError(f"vertical_sync must be false under {schedule}, got true")
    check_prediction(prediction, vertical_sync)
    if prediction != NO_PREDICTION and not traits.is_asynchronous:
        raise ValueError(
            f"prediction must be {NO_PREDICTION} under {schedule}, whose gradients are never late, "
            f"got {prediction!r}"
        )
    if max_in_flight is not None:
        positive_int("max_in_flight", max_in_flight)
        if not traits.takes_max_in_flight:
            raise ValueError(
                f"max_in_flight must not be given under {schedule}, got {max_in_flight}: "
                "what it stashes is a part of the schedule"
            )


def check_plan(plan: "Plan") -> None:
    """Raises ValueError for options that the schedule cannot take, or that contradict each other."""
    _check_schedule(plan)
    _check_zero(plan)
    _check_together(plan)
    _check_tensor(plan)


def _check_schedule(plan: "Plan") -> None:
    """Raises ValueError for options that the schedule cannot take."""
    if plan.traits.whole_minibatch and plan.num_microbatches != 1:
        raise ValueError(
            f"num_microbatches must be 1 under {plan.schedule}, where a minibatch travels whole, "
            f"got {plan.num_microbatches}"
        )
    check_takes(plan.schedule, plan.vertical_sync, plan.max_in_flight, plan.prediction)
    for name in SPLIT_OPTIONS:
        if getattr(plan, name) is not None:
            _check_split_option(plan, name, getattr(plan, name))
    _check_pass_times(plan)
    if not plan.traits.interleaves:
        if plan.chunks != 1:
            raise ValueError(f"chunks must be 1 under {plan.schedule}, got {plan.chunks}")
        return
    if plan.placement == "v" and plan.chunks != 2:
        raise ValueError(f"chunks must be 2 under {plan.schedule}, got {plan.chunks}")
    if plan.chunks < 2 or plan.num_stages % plan.chunks or plan.num_groups < 2:
        raise ValueError(
            f"chunks must be at least 2 and divide the stages into at least 2 groups, got {plan.chunks} "
            f"with {plan.num_stages} stages"
        )
    if plan.traits.least_room and plan.room < (least := plan.traits.least_room(plan.num_groups)):
        raise ValueError(f"in_flight must be at least {least} under {plan.schedule}, got {plan.room}")
    if len(set(plan.replicas)) > 1:
        raise ValueError(
            f"replicas must be the same in all stages under {plan.schedule}, got {list(plan.replicas)}"
        )
    for s, stage in enumerate(plan.stages):
        first = plan.group_of(s)
        if stage.ranks != plan.stages[first].ranks:
            raise ValueError(
                f"stages[{s}].ranks must be those of stages[{first}], "
                f"{list(plan.stages[first].ranks)}, got {list(stage.ranks)}"
            )


def _check_pass_times(plan: "Plan") -> None:
    """Raises ValueError unless each stage has its times, or none has, and the schedule follows them."""
    if plan.pass_times is None:
        return
    if not plan.traits.takes_pass_times:
        takers = ", ".join(schedule for schedule, traits in TRAITS.items() if traits.takes_pass_times)
        raise ValueError(f"pass_times must not be given under {plan.schedule}: they go with {takers}")
    if len(plan.pass_times) != plan.num_stages:
        raise ValueError(f"pass_times must be {plan.num_stages}, one a stage, got {len(plan.pass_times)}")
    for s, times in enumerate(plan.pass_times):
        for name, value in times._asdict().items():
            non_negative_int(f"pass_times[{s}].{name}", value)


def _check_zero(plan: "Plan") -> None:
    """Raises ValueError for a `zero` that the schedule cannot have, or only some of a rank's stages have."""
    check_zero(plan.zero)
    most = plan.traits.most_zero
    for s, stage in enumerate(plan.stages):
        zero, group = max(plan.zero, stage.zero), plan.group_of(s)
        if zero > most:
            raise ValueError(f"zero must be at most {most} under {plan.schedule}, got {zero}")
        if zero and plan.predicts_weights:
            raise ValueError(
                f"zero must be 0 with prediction = {plan.prediction!r}, got {zero}: each replica would "
                "have its share only of what is predicted from"
            )
        if plan.zero_of(s) == 2 and plan.max_in_flight is not None:
            raise ValueError(
                f"max_in_flight must not be given where zero is 2, got {plan.max_in_flight}: replicas "
                "wait for each other in each backward, so they must have enough in flight"
            )
        if stage.scatter and not zero:
            raise ValueError(f"stages[{s}].scatter must be false where zero is 0, got true")
        for name in ("zero", "scatter"):
            got, wanted = getattr(stage, name), getattr(plan.stages[group], name)
            if got != wanted:
                raise ValueError(
                    f"stages[{s}].{name} must be that of stages[{group}], which the same "
                    f"ranks hold, {wanted}, got {got}"
                )


def _check_together(plan: "Plan") -> None:
    """Raises ValueError for an exchange in every pass where replicas could not run all of them together."""
    for s in range(plan.num_stages):
        if plan.together(s) > 1:
            _check_passes(plan, s)


def _check_passes(plan: "Plan", s: int) -> None:
    """Raises ValueError unless a stage whose replicas exchange in every pass can run them together."""
    spec = plan.stages[s]
    is_split = plan.splits_experts(s)
    where, got = (
        ("experts must be false", "true") if is_split else ("sync_batchnorm must be 1", spec.sync_batchnorm)
    )
    where = f"stages[{s}].{where}"
    if not plan.traits.runs_together:
        takers = ", ".join(name for name, each in TRAITS.items() if each.runs_together)
        raise ValueError(f"{where} under {plan.schedule}, got {got}: it goes with {takers}")
    if plan.zero_of(s) == 2:
        raise ValueError(f"{where} where zero is 2, got {got}: set zero = 1")
    if spec.tensor > 1:
        raise ValueError(f"{where} where tensor is {spec.tensor}, got {got}")
    if is_split and spec.sync_batchnorm > 1:
        raise ValueError(f"{where} where sync_batchnorm is {spec.sync_batchnorm}, got {got}")
    if plan.max_in_flight is not None:
        what = "split experts" if is_split else "synchronise BatchNorm"
        raise ValueError(
            f"max_in_flight must not be given where stages {what}, got {plan.max_in_flight}: "
            "replicas wait for each other in each pass, so they must have enough in flight"
        )


def _check_tensor(plan: "Plan") -> None:
    """Raises ValueError for shards under a schedule that cannot have them."""
    for s, stage in enumerate(plan.stages):
        if stage.tensor > 1 and plan.is_asynchronous:
            told = f"must be 1 under {plan.schedule}, got {stage.tensor}: take a synchronous schedule"
            raise ValueError(f"stages[{s}].tensor {told}")


def _check_split_option(plan: "Plan", name: str, count: int) -> None:
    """Raises ValueError unless the schedule takes the option, and the count is one."""
    check, trait = SPLIT_OPTIONS[name]
    check(name, count)
    if not getattr(plan.traits, trait):
        takers = ", ".join(schedule for schedule, traits in TRAITS.items() if getattr(traits, trait))
        raise ValueError(
            f"{name} must not be given under {plan.schedule}, got {count}: it goes with {takers}"
        )
