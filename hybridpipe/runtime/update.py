"""Update: what a stage does with its gradients once they are complete: clip, learning rate, optimizer.

Knows the stage's parameters and its place in time, no schedule and no messages but one sum for clipping.
Invariant: the learning rates that a scheduler sees are the user's; what the pipeline makes of them holds
during the update only.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpipe.planning.checks import non_negative_int, positive
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules import delay_of
from hybridpipe.stage.measure import OptimizerFactory

SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


class LearningRate:
    """What a pipeline makes of the user's learning rate in one stage.

    PipeDream's code scales it by the stage's replicas over the first stage's: a stage updates once in a round
    of as many minibatches, and so all stages move alike for each sample. PipeMare (Yang et al., MLSys 2021,
    section 3.1, "T1") divides it by the stage's delay while training is young, as late gradients allow only
    smaller steps then: by delay^(1 - k / warm_up), k < warm_up minibatches trained on.

    Args:
        scale: the factor that always holds.
        delay: how many updates the gradients are late.
        warm_up: in minibatches; 0: no division.
    """

    def __init__(self, scale: float = 1.0, delay: int = 0, warm_up: int = 0) -> None:
        self.scale, self.delay, self.warm_up = scale, delay, warm_up

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

    def check(self, plan: Plan) -> None:
        """Raises ValueError for what makes no sense under the plan's schedule."""
        non_negative_int("delay_warm_up", self.delay_warm_up)
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

    def build(
        self, parameters: Sequence[Tensor], plan: Plan, stage: int, add_up: Callable[[float], float]
    ) -> "Update":
        """For a rank that trains `parameters`, those of `stage` or, with chunks, of all that it holds."""
        scaled = plan.schedule == "pipedream" and self.scale_learning_rate
        return Update(
            self.optimizer(parameters) if parameters else None,
            self.lr_scheduler,
            LearningRate(
                plan.replicas[stage] / plan.replicas[0] if scaled else 1.0,
                delay_of(plan, stage),
                self.delay_warm_up,
            ),
            self.clip_grad_norm,
            add_up,
        )


class Update:
    """The optimizer of all stages that a rank holds, and what goes with it.

    Args:
        optimizer: None where there is nothing to train.
        scheduler: makes a learning-rate scheduler, which counts minibatches.
        max_norm: gradients are scaled down to this global norm.
        add_up: the sum of a number over all stages, given this rank's; collective. Needed with `max_norm`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        scheduler: SchedulerFactory | None = None,
        learning_rate: LearningRate | None = None,
        max_norm: float | None = None,
        add_up: Callable[[float], float] = float,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler(optimizer) if scheduler is not None and optimizer is not None else None
        self.learning_rate = learning_rate or LearningRate()
        self.max_norm, self.add_up = max_norm, add_up
        self.num_minibatches = 0

    def step(self, num_minibatches: int = 1) -> None:
        """Apply the gradients, which are of so many minibatches, and forget them."""
        if self.max_norm is not None:
            self._clip(self.max_norm)
        if self.optimizer is not None:
            with _multiplied(self.optimizer, self.learning_rate.factor(self.num_minibatches)):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.num_minibatches += num_minibatches
        if self.scheduler is not None:
            for _ in range(num_minibatches):
                self.scheduler.step()

    def _clip(self, max_norm: float) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model."""
        gradients = _gradients(self.optimizer)
        norms = list(torch._foreach_norm(gradients)) if gradients else []
        here = float(torch.stack(norms).double().square().sum()) if norms else 0.0
        norm = math.sqrt(self.add_up(here))
        if norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def _gradients(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    if optimizer is None:
        return []
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@contextmanager
def _multiplied(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """The optimizer with its learning rates times `factor`."""
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
