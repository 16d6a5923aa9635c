"""Update: clips complete gradients, adapts the learning rate, and steps optimizer and scheduler.

Knows a rank's parameters and its count of minibatches; no schedule, and no messages but one sum for clipping.
Invariant: a scheduler sees the user's learning rates; the pipeline's factor applies during the update only.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe.config.options import UpdateOptions
from hybridpipe.model.held_part import axis_of
from hybridpipe.model.precision import Precision
from hybridpipe.optim.combined import made_by, members_of
from hybridpipe.optim.fused import fused
from hybridpipe.optim.loss_scale import DYNAMIC, UNSCALED, LossScale
from hybridpipe.optim.named import with_names
from hybridpipe.optim.prediction import predicted, why_not_predicted
from hybridpipe.optim.shares import ReplicaShares, take_over
from hybridpipe.optim.trial import needs_whole, why_not_apart
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import delay_of
from hybridpipe.stage.state import options_of
from hybridpipe.stage.weights import sparse_parameters
from hybridpipe.torch_private import foreach_mul_, foreach_norm
from hybridpipe.types import OptimizerFactory

SchedulerFactory = Callable[[torch.optim.Optimizer], Any]
_SPLIT = {"replica": ("experts", "experts = false"), "shard": ("weights", "tensor = 1")}  # along an axis


class LearningRate:
    """The factor on the user's learning rate in one stage.

    PipeDream's code scales the rate by the stage's replicas over the first stage's. A stage updates once in a
    round of as many minibatches as it has replicas, so all stages then move equally far a sample.

    PipeMare (Yang et al., MLSys 2021, section 3.1, "learning rate rescheduling", T1) makes steps of late
    gradients smaller at the start: after k minibatches the rate is divided by delay^p,
    p = 1 - min(k / warm_up, 1). A delay of one update divides by 1.

    Args:
        scale: constant factor.
        delay: delay of the stage's gradients, in updates.
        warm_up: length of PipeMare's warm-up, in minibatches; 0 turns it off.
    """

    def __init__(self, scale: float = 1.0, delay: int = 0, warm_up: int = 0) -> None:
        self.scale, self.delay, self.warm_up = scale, delay, warm_up

    @property
    def always_one(self) -> bool:
        """True if the factor is 1 at all times."""
        return self.scale == 1.0 and (self.warm_up == 0 or self.delay < 2)

    def factor(self, num_minibatches: int) -> float:
        """Return the factor after that many minibatches."""
        if num_minibatches >= self.warm_up or self.delay < 2:
            return self.scale
        return float(self.scale * self.delay ** -(1 - num_minibatches / self.warm_up))


@dataclass(frozen=True)
class UpdateRule(UpdateOptions):
    """Optimizer, scheduler and options of updates.

    Args:
        optimizer, lr_scheduler: factories, as in `Trainer`.
    """

    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None = None

    @cached_property
    def arithmetic(self) -> Precision:
        """The computation in this precision."""
        return Precision(self.precision)

    def check(self, plan: Plan) -> None:
        """Check that the options suit the plan's schedule.

        Raises:
            ValueError: an option has no meaning under the schedule.
        """
        if self.clip_grad_norm is not None and plan.is_asynchronous:
            raise ValueError(
                f"clip_grad_norm must not be given under {plan.schedule}, got {self.clip_grad_norm}: its "
                "stages update at different times, so there is no norm of all gradients"
            )
        if self.delay_warm_up and not plan.is_asynchronous:
            raise ValueError(
                f"delay_warm_up must be 0 under {plan.schedule}, whose gradients are never late, "
                f"got {self.delay_warm_up}"
            )
        if self.delay_warm_up and plan.traits.versions == "two":
            raise ValueError(
                f"delay_warm_up must be 0 under {plan.schedule}, whose gradients are one update late in "
                f"every stage, which the rule divides by 1, got {self.delay_warm_up}"
            )

    def naming(self, names: Mapping[Tensor, str]) -> "UpdateRule":
        """Return the rule whose optimizer is given the names of its parameters, if it asks for them.

        Args:
            names: the key in the model of each parameter.
        """
        return replace(self, optimizer=with_names(self.optimizer, names))

    def try_out(self, parameters: Sequence[Tensor]) -> None:
        """Check that `build` would accept the optimizer and the scheduler.

        Args:
            parameters: a few are enough; some optimizers allocate their state at once.

        Raises:
            ValueError: an optimizer or a scheduler that cannot be used.
        """
        if parameters:
            Update(self._optimizer(parameters), self.lr_scheduler)

    def why_not_apart(
        self, model: nn.Module, parameters: Sequence[Tensor], shares: ReplicaShares | None, has_all: bool
    ) -> str | None:
        """Return why a rank's optimizer would train otherwise than one of the whole model; None if it may.

        Args:
            parameters: of all stages that the rank holds.
            shares: what this replica updates; None: everything.
            has_all: they are all that the model trains.
        """
        if self.optimizer_per_stage or not parameters:
            return None
        allowed, sparse = "or allow it by optimizer_per_stage=True", sparse_parameters(model)
        everything = parameters if has_all else list(dict.fromkeys([*model.parameters(), *parameters]))
        if not has_all and (why := why_not_apart(self._optimizer, everything, parameters, sparse=sparse)):
            needed = "several stages need an optimizer that updates each parameter by itself"
            return f"{needed}: {why}; clip by clip_grad_norm, take plan='dp', {allowed}"
        split = {p: axis for p in parameters if (axis := axis_of(p)) is not None}
        halves = {p: range(p.numel() // 2, p.numel()) for p in split}
        if halves and (why := why_not_apart(self._optimizer, parameters, parameters, halves, sparse)):
            what, option = _SPLIT[next(iter(split.values()))]
            needed = f"split {what} need an optimizer that updates each element by itself"
            return f"{needed}: {why}; set {option}, {allowed}"
        if shares is None or not shares.ranges:
            return None
        why = why_not_apart(self._optimizer, parameters, parameters, shares.ranges, sparse)
        needed = "zero needs an optimizer that updates each element by itself"
        return why and f"{needed}: {why}; set zero = 0, {allowed}"

    def why_not_predicted(self, parameters: Sequence[Tensor], plan: Plan) -> str | None:
        """Return why the optimizer's state does not predict weights as the plan asks; None if it does."""
        optimizer = self._optimizer(parameters) if plan.predicts_weights else None
        return why_not_predicted(optimizer, plan.prediction)

    def needs_whole(self, parameters: Sequence[Tensor]) -> set[Tensor]:
        """Return the parameters of which no part can be updated by itself: matrices under Muon."""
        return needs_whole(self._optimizer, parameters) if parameters else set()

    def why_not_halved(self, model: nn.Module) -> str | None:
        """Return why the optimizer cannot update halves of the model's parameters; None if it can.

        Those that it needs whole are not halved.
        """
        parameters: list[Tensor] = list(model.parameters())
        sparse = sparse_parameters(model)
        rule = self.naming({p: name for name, p in model.named_parameters()})
        whole = rule.needs_whole(parameters)
        halves = {
            p: range(0 if p in whole else p.numel() // 2, p.numel())
            for p in parameters
            if p.ndim and p not in sparse
        }
        return why_not_apart(rule._optimizer, parameters, parameters, halves, sparse) if halves else None

    def build(
        self,
        parameters: Sequence[Tensor],
        plan: Plan,
        stage: int,
        add_up: Callable[[float], float],
        elsewhere: Collection[Tensor] = (),
        shares: ReplicaShares | None = None,
    ) -> "Update":
        """Return the `Update` of a rank.

        Args:
            parameters: the parameters of all stages that the rank holds. The optimizer also gets frozen ones:
                users may train them later, and it skips parameters without a gradient.
            stage: the rank's stage; any one of them where it holds several chunks.
            add_up, elsewhere: see `Update`.
            shares: what this replica updates; None: everything.
        """
        scaled = plan.traits.whole_minibatch and self.scale_learning_rate
        optimizer = self._optimizer(parameters)
        if shares is not None:
            if optimizer is not None:
                take_over(optimizer, shares.parts, shares.ranges)
            parameters = [*parameters, *(part for p, part in shares.parts.items() if part is not p)]
        return Update(
            optimizer,
            self.lr_scheduler,
            LearningRate(
                plan.replicas[stage] / plan.replicas[0] if scaled else 1.0,
                delay_of(plan, stage),
                self.delay_warm_up,
            ),
            self.clip_grad_norm,
            add_up,
            parameters,
            elsewhere,
            DYNAMIC if self.arithmetic.scales_loss and not self.scales_in_flight(plan) else UNSCALED,
        )

    def scales_in_flight(self, plan: Plan) -> bool:
        """Return True if losses are scaled and several minibatches are in flight, each with its own scale."""
        return self.arithmetic.scales_loss and plan.is_asynchronous

    def _optimizer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
        """Make the optimizer.

        It is None without parameters, or where `made_by` makes none.

        Raises:
            ValueError: its `step` needs an argument.
        """
        optimizer = made_by(self.optimizer, parameters) if parameters else None
        for each in members_of(optimizer):
            _check_step("optimizer", each, "the pipeline computes the loss once for each minibatch")
        return optimizer


class Given(NamedTuple):
    """The options and the state that optimizer and scheduler started with.

    Args:
        options: options of each parameter group.
        scheduler: the scheduler's state; None without a scheduler.
    """

    options: Sequence[Mapping[str, Any]] = ()
    scheduler: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None) -> "Given":
        """Read the options of a new optimizer."""
        groups = [] if optimizer is None else optimizer.param_groups
        return cls([*map(options_of, groups)])


class Made(NamedTuple):
    """Figures of the last update, or of one that was skipped.

    Args:
        learning_rate: of the first parameter group, as the user set it; None without one.
        gradient_norm: of the whole model before clipping; None without clipping, or where it was skipped.
    """

    learning_rate: float | None = None
    gradient_norm: float | None = None


class Update:
    """The optimizer and the scheduler of all stages that a rank holds.

    Args:
        optimizer: None if the rank has nothing to train.
        scheduler: makes a learning-rate scheduler, which counts minibatches.
        learning_rate: the stage's factor on the learning rate; by default 1.
        max_norm: gradients are scaled down to this norm over the whole model; None does not clip.
        add_up: returns the sum of a number over all ranks; collective, called only with `max_norm`.
        parameters: the gradients of these are dropped after an update; by default the optimizer's.
        elsewhere: parameters whose gradients another rank counts in the norm.
        loss_scale: the factor on the losses; by default none.

    Raises:
        ValueError: `step` of the scheduler needs an argument, or a parameter group has no learning rate to
            scale.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        scheduler: SchedulerFactory | None = None,
        learning_rate: LearningRate | None = None,
        max_norm: float | None = None,
        add_up: Callable[[float], float] = float,
        parameters: Sequence[Tensor] | None = None,
        elsewhere: Collection[Tensor] = (),
        loss_scale: LossScale = UNSCALED,
    ) -> None:
        self.optimizer, self.scheduler, self.loss_scale = optimizer, None, loss_scale
        self.given = Given.of(optimizer)
        self.learning_rate = learning_rate or LearningRate()
        if optimizer is not None:
            _check_rates(optimizer, self.learning_rate)
        if optimizer is not None and scheduler is not None:
            self.scheduler = scheduler(optimizer)
            self.given = self.given._replace(scheduler=copy.deepcopy(self.scheduler.state_dict()))
            _check_step("lr_scheduler", self.scheduler, "it is called after each update, with nothing")
        self.max_norm, self.add_up, self._elsewhere = max_norm, add_up, frozenset(elsewhere)
        groups = [] if optimizer is None else optimizer.param_groups
        self._parameters = parameters or [p for group in groups for p in group["params"]]
        self.num_minibatches = 0
        self.made = Made()

    def step(self, num_minibatches: int = 1) -> None:
        """Apply the gradients of `num_minibatches` minibatches, then drop them and step the scheduler."""
        self.made = Made(self._rate())
        if self.max_norm is not None:
            self._clip(self.max_norm)
        if self.optimizer is not None:
            factor = self.learning_rate.factor(self.num_minibatches)
            with _multiplied(self.optimizer, factor), fused(self.optimizer):
                self.optimizer.step()
        if self.loss_scale.changes:
            self.loss_scale = self.loss_scale.after(overflowed=False)
        self.end_step(num_minibatches)

    def skip(self, num_minibatches: int = 1) -> None:
        """Drop the gradients of `num_minibatches` minibatches, since a number is not finite."""
        self.made = Made(self._rate())
        self.loss_scale = self.loss_scale.after(overflowed=True)
        self.catch_up(num_minibatches)

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`, and divide them by the loss scale."""
        factor /= self.loss_scale.value
        for parameter in self._parameters if factor != 1 else ():
            if parameter.grad is not None:  # not in place, since two gradients may share their memory
                parameter.grad = parameter.grad * factor  # one by one: no second set of them is held

    def predicted(self, prediction: str, parameters: Sequence[Tensor], updates: int) -> list[Tensor]:
        """Return the parameters' weights after `updates` more updates at the next one's learning rate."""
        times = updates * self.learning_rate.factor(self.num_minibatches)
        return predicted(self.optimizer, prediction, parameters, times)

    def end_step(self, num_minibatches: int) -> None:
        """End a step, made or skipped: drop its gradients, and step the learning-rate scheduler."""
        self.zero_grad()
        self.num_minibatches += num_minibatches
        if self.scheduler is not None:
            for _ in range(num_minibatches):
                self.scheduler.step()

    def zero_grad(self) -> None:
        """Drop all gradients, including those of parameters that no optimizer has."""
        for parameter in self._parameters:
            parameter.grad = None

    def catch_up(self, num_minibatches: int) -> None:
        """End `num_minibatches` steps that the optimizer does not make: skipped, or an earlier run's."""
        with warnings.catch_warnings():  # torch warns where the optimizer has made no step yet
            warnings.simplefilter("ignore", UserWarning)
            self.end_step(num_minibatches)

    def _rate(self) -> float | None:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return next((float(group["lr"]) for group in groups if "lr" in group), None)

    def _clip(self, max_norm: float) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, by the norm over the whole model. Collective."""
        gradients = gradients_of(self.optimizer)
        counted = gradients_of(self.optimizer, self._elsewhere)
        norms = list(foreach_norm(counted)) if counted else []
        here = float(torch.stack([norm.double() for norm in norms]).square().sum()) if norms else 0.0
        norm = math.sqrt(self.add_up(here))
        self.made = self.made._replace(gradient_norm=norm)
        factor = max_norm / (norm + 1e-6)
        if gradients and not factor >= 1:  # a NaN norm makes all gradients NaN, as in one process
            foreach_mul_(gradients, factor)


def gradients_of(optimizer: torch.optim.Optimizer | None, without: Collection[Tensor] = ()) -> list[Tensor]:
    """Return the gradients that the optimizer would apply, except those of the parameters in `without`."""
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = (p for group in groups for p in group["params"] if p not in without)
    return [p.grad for p in parameters if p.grad is not None]


def _check_step(name: str, stepping: Any, why: str) -> None:
    """Raise ValueError if `stepping.step` needs an argument."""
    wanted = [
        parameter.name
        for parameter in inspect.signature(stepping.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if wanted:
        raise ValueError(
            f"{name} must have a step() that needs no argument, got {type(stepping).__name__} with "
            f"step({', '.join(wanted)}): {why}"
        )


def _check_rates(optimizer: torch.optim.Optimizer, learning_rate: LearningRate) -> None:
    """Raise ValueError if a parameter group has no learning rate and the factor is not always 1."""
    if not learning_rate.always_one and not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer must have an 'lr' in each parameter group, got {type(optimizer).__name__}: "
            "scale_learning_rate and delay_warm_up change it; set them to False and 0"
        )


@contextmanager
def _multiplied(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the optimizer's learning rates by `factor` inside this context."""
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor  # makes a new tensor if the rate is one
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
