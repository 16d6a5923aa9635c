"""Stages of recorded models, one after the other in one process, against the user's own forward.

Every allowed cut by itself and all of them at once; microbatches with a short last one, another length of
sequences, and single samples. What is sent between stages is detached and copied, as messages are.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hybridpipe import Plan, StageSpec
from hybridpipe.model.layers import layers_of
from hybridpipe.model.recorded import RecordedModel
from hybridpipe.model.tensors import received, tensors_of
from hybridpipe.stage.stage import Stage
from tests import zoo
from tests.model.everything import Everything, batch, loss
from tests.model.one_process import OneProcess, count, take
from tests.thinned import rare

CPU = torch.device("cpu")
RATE = 0.1
ROUNDING = 1e-13  # relative, of losses that are far from 1


class Minibatch(NamedTuple):
    """Inputs, targets, and the size of a microbatch."""

    inputs: Any
    targets: Any
    size: int


def slices(minibatch: Minibatch):
    """Yield the number, inputs, targets and share of each microbatch."""
    whole = count(minibatch.targets)
    for m, start in enumerate(range(0, whole, minibatch.size)):
        inputs, targets = (take(each, start, start + minibatch.size) for each in minibatch[:2])
        yield m, inputs, targets, count(targets) / whole


class Pipeline:
    """The stages of a copy of a model between cuts, run in turn."""

    def __init__(self, layers: RecordedModel, cuts: Sequence[int], loss: Any, recompute: bool) -> None:
        edges = list(itertools.pairwise([0, *cuts, layers.num_layers]))
        layers.check_plan(Plan(tuple(StageSpec(*edge) for edge in edges)))
        self.model = layers.model
        self.stages = [
            Stage(layers.stage(*edge), CPU, loss=loss if edge == edges[-1] else None, recompute=recompute)
            for edge in edges
        ]
        for stage in self.stages:
            stage.layers.shapes_vary = True

    def step(self, step: int, minibatch: Minibatch) -> float:
        """Train on a minibatch: all forwards, then all backwards, then the update."""
        total = 0.0
        for m, inputs, targets, share in slices(minibatch):
            value = None
            for stage in self.stages:
                held, given = self.received(stage, value, inputs, training=True)
                if stage is self.stages[-1]:
                    found = stage.forward_loss(m, held, targets, share, step, **given)
                    total += share * found.value.item()
                else:
                    value = stage.forward(m, held, step, **given)
        sent = [m for m, *_ in slices(minibatch)]
        for m in sent:
            gradients: Sequence[Tensor | None] = ()
            for stage in reversed(self.stages):
                gradients = stage.backward(m, gradients, is_final=m == sent[-1])
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad.to_dense()
                    parameter.grad = None
        return total

    def received(self, stage: Stage, value: Any, inputs: Any, training: bool) -> tuple[Any, dict[str, Any]]:
        """Return what a stage receives of a microbatch, its form, and the model's inputs if it needs them."""
        given = {"form": stage.layers.form(0, lambda: inputs, training)}
        if stage.layers.needs_inputs(training):
            given["inputs"] = inputs
        if value is None:
            return None, given
        tensors = [t.detach().clone() for t in tensors_of(value)]
        flags = [t.requires_grad for t in tensors_of(value)]
        single = isinstance(value, Tensor)
        return received(tensors[0] if single else tuple(tensors), flags), given

    def evaluate(self, batches: Sequence[Minibatch], loss: Any) -> float:
        """Return the mean loss over all samples, in evaluation mode."""
        total = 0.0
        self.model.eval()
        for minibatch in batches:
            for m, inputs, targets, _ in slices(minibatch):
                value = None
                for stage in self.stages:
                    held, given = self.received(stage, value, inputs, training=False)
                    value = stage.infer(m, held, 0, **given)
                total += float(loss(value, targets)) * count(targets)
        self.model.train()
        return total / sum(count(minibatch.targets) for minibatch in batches)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers."""
    return model.state_dict() | dict(model.named_buffers())


def check(
    model: nn.Module, loss: Any, batches: Sequence[Minibatch], tolerance: float = 1e-10, most: int = 0
) -> float:
    """Compare cuts with one process; return the largest difference that was met.

    Args:
        most: number of places that are cuts by themselves, 0 for all. The last plan cuts at all places.
    """
    first = next(slices(batches[0]))[1]
    layers = layers_of(model, first)
    assert isinstance(layers, RecordedModel), layers.path
    expected = OneProcess(model, layers.record.opened, loss, RATE)
    losses = [expected.step(i, *minibatch) for i, minibatch in enumerate(batches)]
    state = {name: tensor.clone() for name, tensor in tensors(expected.model).items()}
    evaluated, worst = expected.evaluate([(each.inputs, each.targets, each.size) for each in batches]), 0.0
    for (_, inputs, *_), training in itertools.product(itertools.chain(*map(slices, batches)), (True, False)):
        layers.records.find(inputs, training)  # once, for all copies
    places = range(1, layers.num_layers)
    alone = places[:: -(-len(places) // most)] if most else places
    for number, cuts in enumerate([*([place] for place in alone), [*places]]):
        pipeline = Pipeline(layers.copied(), cuts, loss, recompute=bool(number % 2))
        for i, minibatch in enumerate(batches):
            found = pipeline.step(i, minibatch)
            assert found == pytest.approx(losses[i], rel=ROUNDING, abs=tolerance), (cuts, i)
        for name, tensor in tensors(pipeline.model).items():
            difference = (tensor.double() - state[name].double()).abs().max().item()
            worst = max(worst, difference)
            assert difference <= RATE * tolerance, (cuts, name, difference)
        assert all(not stage.num_stashed for stage in pipeline.stages)
        again = pipeline.evaluate(batches, loss)
        assert again == pytest.approx(evaluated, rel=ROUNDING, abs=tolerance), cuts
    return worst


@pytest.mark.parametrize("tied", [True, False])
def test_every_cut_of_a_forward_with_everything(tied):
    torch.manual_seed(0)
    batches = [
        Minibatch(*batch(8, 6, seed=1), size=3),
        Minibatch(*batch(5, 9, seed=2), size=3),
        Minibatch(*batch(2, 6, seed=3), size=1),
    ]
    check(Everything(tied).double(), loss, batches)


@pytest.mark.parametrize("most", [3, rare(0)])
@pytest.mark.parametrize("name", zoo.SPLIT)
def test_every_cut_of_real_models(name, most):
    case = zoo.case_of(name)
    batches = [Minibatch(*each) for each in zoo.minibatches(name)]
    if most:  # each size and shape is recorded, which takes most of the time
        batches = [batches[0], batches[1]._replace(size=count(batches[1].targets))]
    check(case.model, case.loss, batches, zoo.tolerance(name), most)
