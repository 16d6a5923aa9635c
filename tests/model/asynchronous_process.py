"""The reference for recorded models under asynchronous schedules: one process, by the papers' formulas.

The versions of the weights that each minibatch sees are those of `tests.engine.asynchronous_reference`; the
forward is the user's own, uncut, with each stage's version of its parameters in place.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpipe import Plan
from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.recorded import RecordedModel
from tests.engine.asynchronous_reference import rate_factors, scale_lag, versions_of
from tests.model.one_process import OneProcess


class AsynchronousProcess(OneProcess):
    """Trains a copy of a model by plain SGD as the stages of a plan do, one minibatch after the other."""

    def __init__(
        self,
        model: Any,
        layers: RecordedModel,
        loss: Any,
        rate: float,
        plan: Plan,
        replicas: Mapping[str, int],
        precision: Precision = FP32,
        scale: float = 1.0,
    ) -> None:
        super().__init__(model, layers.record.opened, loss, rate, 0, replicas, precision, scale)
        self.rule = {"pipedream": "vertical" if plan.vertical_sync else "pipedream"}.get(plan.schedule, "2bw")
        self.replicas = [stage.replicas for stage in plan.stages]
        self.rounds = [1] * len(plan.stages) if self.rule == "2bw" else self.replicas
        holders = layers.holders(plan)
        named = dict(self.model.named_parameters())
        self.stages = [
            {n: p for n, p in named.items() if holders[n][0] == s} for s in range(len(plan.stages))
        ]
        self.versions = [[self._copied(stage)] for stage in self.stages]
        self.sums: list[dict[str, Tensor]] = [{} for _ in self.stages]
        self.scales: list[float] = []  # of each minibatch
        self.left_out: list[set[int]] = [set() for _ in self.stages]  # minibatches without an update

    def train(self, minibatches: Sequence[tuple[Any, Any]], size: int) -> list[float]:
        """Train on all minibatches, in microbatches of `size` samples; return the loss of each."""
        losses, seen, lag = [], itertools.count(), scale_lag(self.replicas, self.rule)
        for b, (inputs, targets) in enumerate(minibatches):
            if any(b - lag in left_out for left_out in self.left_out) and self.scales[b - lag] == self.scale:
                self.scale /= 2
            self.scales.append(self.scale)
            for stage, held, v in zip(self.stages, self.versions, versions_of(b, self.replicas, self.rule)):
                self._put(stage, held[v])
            losses.append(self.backward(b, inputs, targets, size, first=next(seen)))
            for s in range(len(self.stages)):
                self._collect(s, b, len(minibatches))
        for stage, held in zip(self.stages, self.versions):
            self._put(stage, held[-1])
        return losses

    def _collect(self, s: int, b: int, total: int) -> None:
        """Take a stage's gradients of minibatch b, and update behind the last one of a round."""
        first = b // self.rounds[s] * self.rounds[s]
        size = min(self.rounds[s], total - first)
        for name, parameter in self.stages[s].items():
            if parameter.grad is not None:
                self.sums[s][name] = parameter.grad.to_dense() / (size * self.scale) + self.sums[s].get(
                    name, 0
                )
                parameter.grad = None
        if b < first + size - 1:
            return
        factor = rate_factors(self.replicas, self.rule, first, True, 0)[s]
        newest = dict(self.versions[s][-1])
        if not all(bool(gradient.isfinite().all()) for gradient in self.sums[s].values()):
            self.left_out[s] |= set(range(first, first + size))
            self.sums[s] = {}
        for name, gradient in self.sums[s].items():  # added as SGD does: float32 norms magnify one bit
            newest[name] = newest[name].add(gradient, alpha=-self.rate * factor)
        self.versions[s].append(newest)
        self.sums[s] = {}

    @staticmethod
    def _put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])

    @staticmethod
    def _copied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}
