"""EMA: an exponential moving average of the weights, which each rank keeps of what it updates.

Not known here: stages and replicas. Invariant: the average is a part of the optimizer's state, so it is
saved, moved to another plan and sharded over replicas as that is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridpipe.errors import UserError, suggesting
from hybridpipe.stage.state import AVERAGE
from hybridpipe.training.callbacks import Callback, Run


@suggesting
class EMA(Callback):
    """Keeps `average = decay * average + (1 - decay) * weights` after each update, and validates with it.

    The first update sets the average, as torch.optim.swa_utils.AveragedModel does. Buffers are not averaged.
    A checkpoint has the weights and, in the optimizer's state, the averages: `hybridpipe export --averages`
    writes them. They take the memory of one more copy of the weights, which a plan's prediction does not
    count.

    Args:
        decay: from 0 to below 1.
        at_end: when `fit` ends, the model has the averages, and its own weights are lost.

    Raises:
        ValueError: `decay` is out of range.
    """

    def __init__(self, decay: float = 0.999, at_end: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be a number >= 0 and < 1, got {decay!r}")
        self._decay, self._at_end = decay, at_end
        self._goes_on = False  # the averages that the optimizer has are this callback's
        self._hooks: list[Any] = []
        self._parameters: list[Tensor] = []  # of the update that is being made
        self._before: dict[Tensor, Tensor] = {}  # weights before the first update of a parameter

    def on_fit_start(self, run: Run) -> None:
        """Follow the updates of this rank's optimizer; averages that nobody has kept up are dropped."""
        if run.num_groups > 1:
            raise UserError("EMA averages the weights of one group: leave groups out, or EMA")
        self._unhook()
        if run.optimizer is not None:
            for state in () if self._goes_on else run.optimizer.state.values():
                state.pop(AVERAGE, None)
            self._hooks = [
                run.optimizer.register_step_pre_hook(self._note),
                run.optimizer.register_step_post_hook(self._average),
            ]

        self._goes_on = True

    def state_dict(self) -> dict[str, Any]:
        """Say whether the optimizer's averages are this callback's, so that an export can take them."""
        return {"averages": self._goes_on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Note whether the checkpoint's averages go on."""
        self._goes_on = bool(state.get("averages", True))

    def on_fit_end(self, run: Run) -> None:
        """Stop following, and give the model the averages if that was asked for."""
        self._unhook()
        if self._at_end:
            self._exchange(run)
            run.gather_weights()
            self._goes_on = False  # what the optimizer has now are the weights before

    @contextmanager
    def evaluating(self, run: Run) -> Iterator[None]:
        """Let the model have the averages inside this context, and its own weights after it.

        An error may be this rank's alone: then no other one is waited for.
        """
        self._exchange(run)
        run.gather_weights()
        try:
            yield
        except BaseException:
            self._exchange(run)
            raise
        self._exchange(run)
        run.gather_weights()

    @torch.no_grad()
    def _exchange(self, run: Run) -> None:
        """Exchange weights and averages, one parameter after the other."""
        optimizer = run.optimizer
        if optimizer is None:
            return
        for p in _parameters(optimizer):
            average = optimizer.state.get(p, {}).get(AVERAGE)
            if average is not None:
                own = p.detach().clone()
                p.copy_(average)
                average.copy_(own)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note the parameters, as a fused step leaves some out, and weights before a late first gradient."""
        self._parameters = list(_parameters(optimizer))
        if any(AVERAGE in state for state in optimizer.state.values()):
            for p in self._parameters:
                if p.grad is not None and AVERAGE not in optimizer.state.get(p, {}):
                    self._before[p] = p.detach().clone()

    @torch.no_grad()
    def _average(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in self._parameters:
            average = optimizer.state.get(p, {}).get(AVERAGE, self._before.pop(p, None))
            if average is None and p.grad is not None:
                average = p.detach().clone()
            if average is not None:  # an optimizer takes a parameter with any state for one that it has begun
                optimizer.state[p][AVERAGE] = average.lerp_(p, 1 - self._decay)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.is_floating_point())
