"""Layers: what the rest of the house knows of a model: layers that a plan cuts, and the stages made of them.

Knows the kinds of models: an `nn.Sequential`, whose children are its layers, and others, which are recorded.
Invariant: stages hold the model's own modules and parameters, under the keys of the model's `state_dict()`.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from hybridpipe.errors import UserError
from hybridpipe.model import plan_fit, sequential
from hybridpipe.model.copies import copied
from hybridpipe.model.explanation import SEQUENTIAL, WHOLE, LayerFacts, ModelExplanation
from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.recorded import RecordedModel
from hybridpipe.model.recording import (
    CallsBackward,
    LossReadsForward,
    Records,
    SetsWeights,
    Unsplittable,
)
from hybridpipe.model.settings import Settings
from hybridpipe.model.stage_module import StageModule
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import SharedParameter
from hybridpipe.types import Loss


class Layers(Protocol):
    """A model as layers."""

    @property
    def model(self) -> nn.Module:
        """The user's model."""

    @property
    def precision(self) -> Precision:
        """The precision in which the layers run."""

    @property
    def num_layers(self) -> int:
        """Number of layers that a plan cuts."""

    @property
    def path(self) -> str:
        """Text that is the same on ranks whose forwards do the same."""

    @property
    def why_whole(self) -> str:
        """The reason why a model that is no `nn.Sequential` is one layer; "" otherwise."""

    def explain(self) -> ModelExplanation:
        """Return what was made of the model, without what layers share (`explain`)."""

    def stage(self, start: int, stop: int) -> StageModule:
        """Return the layers from `start` up to, not including, `stop`."""

    def single(self) -> list[StageModule]:
        """Return each layer as a stage by itself that shares nothing, for measurements."""

    def holders(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """Return the stages that hold each tensor, its owner first, by each of its keys in the model."""

    def check_plan(self, plan: Plan) -> None:
        """Raise ValueError unless the plan fits the model."""

    def calls_whole(self, path: str) -> bool:
        """Return True if stages call the module at a path, or one around it, as it is."""

    def expects(self, inputs: Callable[[], Any]) -> bool:
        """Return True if stages that do not see inputs like these know their shapes.

        Args:
            inputs: returns them; called if they matter.
        """

    @property
    def settings(self) -> Settings | None:
        """Settings that records depend on; None where layers are called as they are."""

    def renew(self) -> None:
        """Adopt the model's present settings, modes, hooks and requires_grad flags."""

    def copied(self) -> "Layers":
        """Return the layers of a copy of the model, for measurements.

        Raises:
            UserError: a part of the model cannot be copied.
        """


class SequentialLayers:
    """The children of an `nn.Sequential`; any other model is one layer.

    Args:
        why: the reason why a model is one layer, which may forbid some plans of one stage as well.
        precision: in which the layers run.

    Raises:
        TypeError, ValueError: the model has no layers that can be called one after the other.
    """

    def __init__(
        self, model: nn.Module, why: Unsplittable | None = None, precision: Precision = FP32
    ) -> None:
        self.model, self.num_layers, self.precision = model, sequential.num_layers(model), precision
        self.path = self.why_whole = str(why or "")
        self._why, self.settings = why, None

    def explain(self) -> ModelExplanation:
        """Return what was made of the model, without what layers share."""
        kind = SEQUENTIAL if sequential.is_sequential(self.model) else WHOLE
        layers = tuple(
            LayerFacts(
                name=layer.names[0] or type(self.model).__name__,
                parameters=sum(parameter.numel() for parameter in layer.module.parameters()),
                units=(layer.names[0],) if layer.names[0] else (),
            )
            for layer in self.single()
        )
        return ModelExplanation(kind, layers, self.why_whole)

    def stage(self, start: int, stop: int) -> StageModule:
        """Return the layers from `start` up to, not including, `stop`."""
        return sequential.stage_module(self.model, start, stop, self.precision)

    def single(self) -> list[StageModule]:
        """Return each layer as a stage by itself that shares nothing, for measurements."""
        return sequential.single_layers(self.model, self.precision)

    def holders(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """Return the stages that hold each tensor, its owner first, by each of its keys in the model."""
        return sequential.holders(self.model, plan)

    def check_plan(self, plan: Plan) -> None:
        """Raise ValueError unless the plan fits the model."""
        sequential.check_plan(self.model, plan, self.why_whole)
        if isinstance(self._why, SetsWeights):
            plan_fit.check_writes(plan, self.why_whole)
        if isinstance(self._why, CallsBackward):
            plan_fit.check_backward(plan, self.why_whole)

    def calls_whole(self, path: str) -> bool:
        """Return True: all modules are called as they are."""
        return True

    def expects(self, inputs: Callable[[], Any]) -> bool:
        """Return True: shapes are sent with the first message."""
        return True

    def renew(self) -> None:
        """Keep the layers: stages call the modules as they are."""

    def copied(self) -> "SequentialLayers":
        """Return the layers of a copy of the model, for measurements.

        Raises:
            UserError: a part of the model cannot be copied, or the loss reads the model itself.
        """
        if isinstance(self._why, LossReadsForward):
            by_name = "a plan by name measures a copy of the model, which this loss does not read"
            raise UserError(f"{self.why_whole}; {by_name}: give a Plan of one stage")
        return SequentialLayers(copied(self.model), self._why, self.precision)


def shared_parameters(layers: Layers) -> tuple[SharedParameter, ...]:
    """Return what several layers of a model share (`plan_fit.shared_parameters`)."""
    one_by_one = Plan(tuple(StageSpec(i, i + 1) for i in range(layers.num_layers)))
    return plan_fit.shared_parameters(layers.model, layers.holders(one_by_one))


def explain(layers: Layers) -> ModelExplanation:
    """Return what was made of a model."""
    return replace(layers.explain(), shared=shared_parameters(layers))


def known_layers(model: nn.Module, precision: Precision = FP32) -> SequentialLayers | None:
    """Return the layers of a model that shows them; None if its forward must be recorded first."""
    if isinstance(model, torch.jit.ScriptModule):
        why = Unsplittable("the model is TorchScript itself, not its parts")
        return SequentialLayers(model, why, precision)
    return SequentialLayers(model, precision=precision) if sequential.is_sequential(model) else None


def layers_of(
    model: nn.Module,
    inputs: Any,
    loss: Loss | None = None,
    targets: Any = None,
    precision: Precision = FP32,
    closed: Collection[str] = (),
) -> Layers:
    """Return the layers of any model; one whose forward or loss cannot run in stages is one layer.

    Args:
        inputs, loss, targets: as for `RecordedModel`.
        closed: paths of modules that stay one layer, since parts of them are split (`called_whole`).
    """
    try:
        if known := known_layers(model, precision):
            return known
        records = Records(model, precision, closed=closed)
        return RecordedModel(model, records, inputs, loss, targets)
    except Unsplittable as error:
        return SequentialLayers(model, error, precision)
