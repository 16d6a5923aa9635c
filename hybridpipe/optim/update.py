"""Update: what a stage does with its gradients once they are complete: clip, learning rate, optimizer.

Knows the stage's parameters and its place in time, no schedule and no messages but one sum for clipping.
Invariant: the learning rates that a scheduler sees are the user's; what the pipeline makes of them holds
during the update only.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.optim.fused import fused
from hybridpipe.planning.checks import ON_NONFINITE, non_negative_int, one_of, positive
from hybridpipe.planning.cluster import COMPRESSIONS, NO_COMPRESSION
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import delay_of
from hybridpipe.types import OptimizerFactory

SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


class LearningRate:
    """What a pipeline makes of the user's learning rate in one stage.

    PipeDream's code scales it by the stage's replicas over the first stage's: a stage updates once in a round
    of as many minibatches, and so all stages move alike for each sample. PipeMare (Yang et al., MLSys 2021,
    section 3.1, "learning rate rescheduling", T1) lets late gradients make smaller steps while training is
    young: after k minibatches the rate is divided by delay^p, p = 1 - min(k / warm_up, 1). A delay of one
    update divides by 1.

    Args:
        scale: the factor that always holds.
        delay: how many updates the gradients are late.
        warm_up: in minibatches; 0: no division.
    """

    def __init__(self, scale: float = 1.0, delay: int = 0, warm_up: int = 0) -> None:
        self.scale, self.delay, self.warm_up = scale, delay, warm_up

    @property
    def always_one(self) -> bool:
        """Is the user's learning rate left alone?"""
        return self.scale == 1.0 and (self.warm_up == 0 or self.delay < 2)

    def factor(self, num_minibatches: int) -> float:
        """Of the user's learning rate, after that many minibatches."""
        if num_minibatches >= self.warm_up or self.delay < 2:
            return self.scale
        return float(self.scale * self.delay ** -(1 - num_minibatches / self.warm_up))


@dataclass(frozen=True)
class UpdateRule:
    """How the user wants gradients to become weights; `Trainer` tells what each field means."""

    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None = None
    clip_grad_norm: float | None = None
    scale_learning_rate: bool = True
    delay_warm_up: int = 0
    compression: str = NO_COMPRESSION  # of gradients, on their way between replicas
    on_nonfinite: str = "stop"

    def __post_init__(self) -> None:
        one_of("compression", self.compression, COMPRESSIONS)

    def check(self, plan: Plan) -> None:
        """Raises ValueError for what makes no sense under the plan's schedule."""
        non_negative_int("delay_warm_up", self.delay_warm_up)
        one_of("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        if self.clip_grad_norm is not None:
            positive("clip_grad_norm", self.clip_grad_norm)
            if plan.is_asynchronous:
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

    def try_out(self, parameters: Sequence[Tensor]) -> None:
        """Raises ValueError for an optimizer or a scheduler that `build` would refuse.

        A few parameters are enough to see, and some optimizers allocate their state at once.
        """
        if parameters:
            Update(self.optimizer(parameters), self.lr_scheduler)

    def build(
        self, parameters: Sequence[Tensor], plan: Plan, stage: int, add_up: Callable[[float], float]
    ) -> "Update":
        """For a rank with `parameters`, those of `stage` or, with chunks, of all that it holds.

        The optimizer gets those that are not trained, too: they may be later on, and without a gradient it
        passes them by.
        """
        scaled = plan.traits.whole_minibatch and self.scale_learning_rate
        return Update(
            self._optimizer(parameters),
            self.lr_scheduler,
            LearningRate(
                plan.replicas[stage] / plan.replicas[0] if scaled else 1.0,
                delay_of(plan, stage),
                self.delay_warm_up,
            ),
            self.clip_grad_norm,
            add_up,
            parameters,
        )

    def _optimizer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
        """None where there is nothing for it, perhaps because it takes only what is trained."""
        if not parameters:
            return None
        try:
            return self.optimizer(parameters)
        except ValueError as error:
            if "empty parameter list" in str(error) and not any(p.requires_grad for p in parameters):
                return None
            raise


class Given(NamedTuple):
    """What optimizer and scheduler were made with, before they changed any of it.

    Args:
        options: of each parameter group.
        scheduler: its state; None without one.
    """

    options: Sequence[Mapping[str, Any]] = ()
    scheduler: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None) -> "Given":
        """Of an optimizer that is new."""
        groups = [] if optimizer is None else optimizer.param_groups
        return cls([{name: value for name, value in group.items() if name != "params"} for group in groups])


class Update:
    """The optimizer of all stages that a rank holds, and what goes with it.

    Args:
        optimizer: None where there is nothing to train.
        scheduler: makes a learning-rate scheduler, which counts minibatches.
        max_norm: gradients are scaled down to this global norm.
        add_up: the sum of a number over all stages, given this rank's; collective. Needed with `max_norm`.
        parameters: whose gradients an update uses up; by default the optimizer's.

    Raises:
        ValueError: optimizer or scheduler want to be told more at a step than there is to tell.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        scheduler: SchedulerFactory | None = None,
        learning_rate: LearningRate | None = None,
        max_norm: float | None = None,
        add_up: Callable[[float], float] = float,
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, None
        self.given = Given.of(optimizer)
        self.learning_rate = learning_rate or LearningRate()
        if optimizer is not None:
            _check_step("optimizer", optimizer, "the pipeline computes the loss once for each minibatch")
            _check_rates(optimizer, self.learning_rate)
        if optimizer is not None and scheduler is not None:
            self.scheduler = scheduler(optimizer)
            self.given = self.given._replace(scheduler=copy.deepcopy(self.scheduler.state_dict()))
            _check_step("lr_scheduler", self.scheduler, "it is called after each update, with nothing")
        self.max_norm, self.add_up = max_norm, add_up
        groups = [] if optimizer is None else optimizer.param_groups
        self._parameters = parameters or [p for group in groups for p in group["params"]]
        self.num_minibatches = 0

    def step(self, num_minibatches: int = 1) -> None:
        """Apply the gradients, which are of so many minibatches, and forget them."""
        if self.max_norm is not None:
            self._clip(self.max_norm)
        if self.optimizer is not None:
            factor = self.learning_rate.factor(self.num_minibatches)
            with _multiplied(self.optimizer, factor), fused(self.optimizer):
                self.optimizer.step()
        self.leave_out(num_minibatches)

    def leave_out(self, num_minibatches: int) -> None:
        """Forget the gradients. Whoever counts minibatches, such as a scheduler, counts these."""
        self.forget_gradients()
        self.num_minibatches += num_minibatches
        if self.scheduler is not None:
            for _ in range(num_minibatches):
                self.scheduler.step()

    def forget_gradients(self) -> None:
        """Drop what is in `.grad`, as zero_grad() does, of parameters that no optimizer has, too."""
        for parameter in self._parameters:
            parameter.grad = None

    def catch_up(self, num_minibatches: int) -> None:
        """Let a scheduler that is new stand where it would stand after so many minibatches."""
        with warnings.catch_warnings():  # the optimizer's steps were another one's
            warnings.simplefilter("ignore", UserWarning)
            self.leave_out(num_minibatches)

    def _clip(self, max_norm: float) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model."""
        gradients = gradients_of(self.optimizer)
        norms = list(torch._foreach_norm(gradients)) if gradients else []
        here = float(torch.stack([norm.double() for norm in norms]).square().sum()) if norms else 0.0
        factor = max_norm / (math.sqrt(self.add_up(here)) + 1e-6)
        if gradients and not factor >= 1:  # a norm that is NaN spoils all stages, as it would one process
            torch._foreach_mul_(gradients, factor)


def gradients_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The gradients that the optimizer would apply."""
    if optimizer is None:
        return []
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _check_step(name: str, stepping: Any, why: str) -> None:
    """Raises ValueError if `stepping.step` wants an argument."""
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
    """Raises ValueError if there is no learning rate to multiply."""
    if not learning_rate.always_one and not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer must have an 'lr' in each parameter group, got {type(optimizer).__name__}: "
            "scale_learning_rate and delay_warm_up change it; False and 0 leave it alone"
        )


@contextmanager
def _multiplied(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """The optimizer with its learning rates times `factor`."""
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor  # a new one, if it is a tensor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
