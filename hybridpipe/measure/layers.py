"""Profile of a model's layers, measured on one microbatch. Each that differs runs as a stage of its own.

Not known here: ranks and MPI. Ranks that measure at once agree on equal repetitions through `agree`.
Invariant: the model, its gradients and the data are as they were before.
"""

import math
import platform
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe.measure.experts import CountedExperts, counting, profiles
from hybridpipe.measure.observed import (
    LayerBytes,
    Observed,
    frozen_bytes,
    largest_bytes,
    observe,
    stand_ins,
    total_bytes,
    trained_bytes,
)
from hybridpipe.measure.shards import CountedSums
from hybridpipe.measure.stopwatch import Lap, Stopwatch, Took
from hybridpipe.measure.turns import typical
from hybridpipe.model import tensors
from hybridpipe.model.experts import Experts
from hybridpipe.model.layers import Layers, layers_of, shared_parameters
from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.rng import preserved_state
from hybridpipe.model.tensors import Tree, map_tensors, norms
from hybridpipe.optim.combined import made_by, step_hooks
from hybridpipe.optim.fused import fused
from hybridpipe.optim.named import with_names
from hybridpipe.planning.layer_parts import ExpertsProfile, SumsProfile
from hybridpipe.planning.profile import (
    JoinedProducts,
    LayerProfile,
    Measurement,
    ModelProfile,
)
from hybridpipe.stage.recompute import copied
from hybridpipe.stage.stage import Stage
from hybridpipe.types import Agree, Loss, OptimizerFactory

NUM_BATCHED = 4  # microbatches in the largest product that is measured


def measure(
    model: nn.Module,
    inputs: Tree,
    targets: Tree,
    loss: Loss,
    optimizer: OptimizerFactory | None = None,
    device: torch.device | None = None,
    agree: Agree = float,
    sizes: Sequence[int] = (),
    precision: Precision = FP32,
) -> ModelProfile:
    """Measure every layer of a copy of the model on one microbatch.

    Args:
        model: any module; the children of an `nn.Sequential` are its layers, others are recorded.
        inputs, targets, loss: as for `Rehearsal`.
        optimizer, agree, sizes: as for `Rehearsal.measure`.
        device: where the layers run; by default the CPU.
        precision: in which they run.
    """
    layers = layers_of(model, inputs, loss, targets, precision).copied()
    return Rehearsal(layers, inputs, targets, loss, device).measure(optimizer, agree, sizes)


class Rehearsal:
    """A model's layers as single-layer stages, and a copy of one microbatch to run through them.

    The overhead of running a layer by itself, Python included, is part of each figure, as it is in training.

    Args:
        layers: of a copy of the model (`copied`), because running it changes its buffers.
        inputs, targets: one microbatch; tensors have the samples in the first dimension.
        loss: counted with the last layer.
        device: where the layers run; by default the CPU.
        each_kind: gradients and updates of one layer of each kind only, for a model larger than the memory.
        experts: the modules of the model whose experts replicas may share.
        sums: over the shards of a replica, where these are the layers of one; they send nothing.
    """

    def __init__(
        self,
        layers: Layers,
        inputs: Tree,
        targets: Tree,
        loss: Loss,
        device: torch.device | None = None,
        each_kind: bool = False,
        experts: Sequence[Experts] = (),
        sums: CountedSums | None = None,
    ) -> None:
        self._each_kind, self._model, self._experts = each_kind, layers.model, experts
        self._sums = sums or CountedSums(1)
        self.device = device or torch.device("cpu")
        alone, self.shared = layers.single(), shared_parameters(layers)
        self.why_whole = layers.why_whole
        self.stages, self.split_stages = (
            [
                Stage(
                    layer,
                    self.device,
                    loss=loss if layer is alone[-1] else None,
                    split_backward=split_backward,
                    check_loss=False,
                )
                for layer in alone
            ]
            for split_backward in (False, True)
        )
        self.names = [stage.layers.names[0] or type(stage.module[0]).__name__ for stage in self.stages]
        self._measured: tuple[_Stages, _Microbatch] | None = None
        self.inputs, self.targets = (  # copies, as the first layer may work in place
            map_tensors(lambda tensor: tensor.to(self.device, copy=True), value)
            for value in (inputs, targets)
        )

    def run(self) -> None:
        """Run one forward and one backward of the layers that were measured."""
        assert self._measured is not None, "measure first"
        with self._running() as watch:
            watch.read(_pass(*self._measured, watch))

    @contextmanager
    def _running(self) -> Iterator[Stopwatch]:
        """Yield a stopwatch; restore the random state afterwards, as layers seed the process's generators."""
        with preserved_state(self.device, python_too=True), closing(Stopwatch(self.device)) as watch:
            yield watch

    def _first(self, size: int | None) -> "_Microbatch":
        """Observe the layers with the first `size` samples; None: all of them."""
        inputs, targets = (
            map_tensors(lambda tensor: tensor[:size], value) for value in (self.inputs, self.targets)
        )
        observed = observe(self.stages, inputs, targets, not self._each_kind)
        return _Microbatch(inputs, targets, observed, self._sums)

    def measure(
        self,
        optimizer: OptimizerFactory | None = None,
        agree: Agree = float,
        sizes: Sequence[int] = (),
        shards: "Sequence[Rehearsal]" = (),
    ) -> ModelProfile:
        """Measure the seconds of each layer, the bytes it keeps, and the bytes it passes on.

        Layers that take equally long (`stand_ins`) are run once for all of them.

        Args:
            optimizer: makes an optimizer; its state and its step over each layer's parameters are measured.
            agree: returns the largest of the seconds that the ranks which measure at once give it.
            sizes: microbatch sizes in samples, at most as many as there are. The first size gives the
                profile's own figures, the rest its `others`. By default there is one size, all samples.
            shards: the layers of one shard each, measured in turns with these for more `others`.

        Returns:
            The profile, in seconds and bytes; a second is one of the clock, waiting for a processor included.
        """
        with self._running() as watch:
            prepared = [each._prepare(sizes, watch) for each in (self, *shards)]
            seconds = iter(typical([sampler for each in prepared for sampler in each.samplers], agree))
            found = [
                each._figures(at, [next(seconds) for _ in at.samplers], optimizer, watch, agree)
                for each, at in zip((self, *shards), prepared, strict=True)
            ]
        measured, *others = (measurement for each in found for measurement in each.measurements)
        return ModelProfile(
            layers=measured.layers,
            samples=measured.samples,
            others=tuple(others),
            device=str(self.device),
            dtype=_dtype(self.stages, self.inputs),
            shared=self.shared,
            state_factor=found[0].state_factor,
            copied_factor=found[0].copied_factor,
            why_whole=self.why_whole,
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )

    def _prepare(self, sizes: Sequence[int], watch: Stopwatch) -> "_Prepared":
        """Observe the layers with microbatches of each size, and return what is to be sampled."""
        first, *rest = sizes or (None,)
        with counting(self._model, self._experts, watch) as counted:
            microbatches = [self._first(first)]
        microbatches += map(self._first, rest)
        which = stand_ins(self.stages, [each.layers for each in microbatches])
        stages, split_stages = ({i: of[i] for i in which} for of in (self.stages, self.split_stages))
        self._measured = stages, microbatches[0]
        samplers = [partial(_passes, stages, split_stages, each, watch) for each in microbatches]
        return _Prepared(stages, which, microbatches, samplers, counted)

    def _figures(
        self,
        at: "_Prepared",
        seconds: Sequence[Mapping["_Figure", float]],
        optimizer: OptimizerFactory | None,
        watch: Stopwatch,
        agree: Agree,
    ) -> "_Figures":
        """Return the figures of layers, given the seconds of each sampler."""
        microbatch = at.microbatches[0]
        experts = self._profiles_of_experts(at, watch)
        in_between = partial(_pass, at.stages, microbatch, watch)
        updated = at.stages if self._each_kind else dict(enumerate(self.stages))
        updates, state_bytes = _measure_updates(updated, optimizer, in_between, watch, agree)
        measurements = [
            self._measurement(each, took, updates, at.which, _scaled(experts, each, microbatch))
            for each, took in zip(at.microbatches, seconds, strict=True)
        ]
        parameter_bytes = sum(map(trained_bytes, updated.values())) or 1
        copied_bytes = sum(stage.copied_bytes for stage in updated.values())
        return _Figures(measurements, state_bytes / parameter_bytes, copied_bytes / parameter_bytes)

    def _profiles_of_experts(self, at: "_Prepared", watch: Stopwatch) -> dict[int, ExpertsProfile]:
        if not self._experts:
            return {}
        with counting(self._model, self._experts, watch, keeps=True) as timed:
            took = _pass(at.stages, at.microbatches[0], watch)
        forwards = {i: took["forward", i] for i in at.stages}
        return profiles(self.stages, at.counted, timed, forwards, at.which, watch)

    def _measurement(
        self,
        microbatch: "_Microbatch",
        seconds: Mapping["_Figure", float],
        updates: Mapping[int, float],
        which: Sequence[int],
        experts: Mapping[int, ExpertsProfile],
    ) -> Measurement:
        """Return the figures of all layers, each with the seconds of the layer that stands for it."""
        layers, splits = [], self._sums.size > 1
        for i, (name, stage) in enumerate(zip(self.names, self.stages, strict=True)):
            took = {kind: value for (kind, layer), value in seconds.items() if layer == which[i]}
            batching, observed = microbatch.batching[which[i]], microbatch.layers[i]
            layer = _layer_profile(
                name,
                took,
                updates.get(i, updates.get(which[i], 0.0)),
                batching,
                trained_bytes(stage),
                observed.bytes,
            )
            split, largest = microbatch.split_bytes[which[i]], largest_bytes(stage)
            seen = replace(layer, split_bytes=split, workspace_bytes=observed.workspace)
            frozen = frozen_bytes(stage)
            forward, backward = (microbatch.summed[kind, which[i]] for kind in ("forward", "backward"))
            sums = SumsProfile(forward[0], backward[0], forward[1], backward[1]) if splits else None
            held = replace(seen, largest_bytes=largest, frozen_bytes=frozen)
            layers.append(replace(held, experts=experts.get(i), sums=sums))
        shared = self.shared if splits else ()
        return Measurement(microbatch.num_samples, tuple(layers), self._sums.size, shared)


_Stages = dict[int, Stage]  # those that are run, by layer, in order
_Figure = tuple[str, int]  # a kind of pass and the layer


class _Batching(NamedTuple):
    """Batched weight gradients of one layer, as observed."""

    microbatches: int  # in one product at most; 0: the layer's are not batched
    kept_bytes: int

    @property
    def num_measured(self) -> int:
        """Number of microbatches in the product that is measured."""
        return min(self.microbatches, NUM_BATCHED)


@dataclass
class _Microbatch:
    """A microbatch that the layers are measured on, and what was observed with it.

    Args:
        batching: batched products of each layer that is run, once they have run.
        split_bytes: bytes that each of these keeps between the halves of its backward, once that has run.
        summed: sums over shards in its last passes, and their bytes.
    """

    inputs: Tree
    targets: Tree
    layers: list[Observed]
    sums: CountedSums
    batching: dict[int, _Batching] = field(default_factory=dict)
    split_bytes: dict[int, int] = field(default_factory=dict)
    summed: dict[_Figure, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Number of its samples."""
        return tensors.num_samples(inputs=self.inputs, targets=self.targets)


class _Prepared(NamedTuple):
    """Layers that are to be sampled.

    Args:
        stages: those that are run, each `which` stands for some.
        samplers: one for each microbatch.
        counted: experts, in a pass of the first microbatch through all layers.
    """

    stages: _Stages
    which: Sequence[int]
    microbatches: Sequence[_Microbatch]
    samplers: Sequence[Callable[[], Mapping[_Figure, Took]]]
    counted: Sequence[CountedExperts]


class _Figures(NamedTuple):
    """The figures of some layers: one measurement for each microbatch, and the factors of `ModelProfile`."""

    measurements: Sequence[Measurement]
    state_factor: float
    copied_factor: float


def _scaled(
    experts: Mapping[int, ExpertsProfile], microbatch: _Microbatch, measured: _Microbatch
) -> dict[int, ExpertsProfile]:
    """Return the experts with as many tokens as another microbatch has."""
    factor = microbatch.num_samples / measured.num_samples
    return {i: each.scaled(factor) for i, each in experts.items()}


def _layer_profile(
    name: str,
    seconds: Mapping[str, float],
    update_seconds: float,
    batching: _Batching,
    parameter_bytes: int,
    num_bytes: LayerBytes,
) -> LayerProfile:
    forward = seconds["forward"]
    input_seconds = None
    if parameter_bytes:  # a split backward makes the forward a little longer, too
        input_seconds = max(0.0, seconds["input backward"] + seconds["forward before split"] - forward)
    return LayerProfile(
        name=name,
        forward_seconds=forward,
        backward_seconds=seconds["backward"],
        parameter_bytes=parameter_bytes,
        output_bytes=num_bytes.output,
        activation_bytes=num_bytes.activation,
        update_seconds=update_seconds,
        gradient_bytes=num_bytes.gradient,
        weight_seconds=seconds["weight backward"] if parameter_bytes else 0.0,
        input_seconds=input_seconds,
        accumulate_seconds=_accumulate_seconds(seconds) if parameter_bytes else 0.0,
        joined=_batched_products(batching, seconds),
    )


def _passes(
    stages: _Stages, split_stages: _Stages, microbatch: _Microbatch, watch: Stopwatch
) -> dict[_Figure, Took]:
    """Run every kind of pass once, and return the seconds of each layer in it.

    - One forward and one backward.
    - The first backward of an update, whose gradients are added to none.
    - A split backward, by `split_stages`.
    - For layers with batched wgrad: up to NUM_BATCHED backwards, and one product of their microbatches.

    The kinds take turns, so that other load on the machine counts for all of them; the weight gradients' time
    is a difference between them. The batched products are noted in the microbatch.
    """

    def backwards() -> dict[int, Lap]:
        of_pass = _pass(stages, microbatch, watch)
        return {i: of_pass["backward", i] for i in stages}

    for stage in stages.values():
        stage.reset_wgrad_peaks()
    _clear_gradients(stages)
    first = backwards()
    took = _pass(stages, microbatch, watch)
    split = _pass(split_stages, microbatch, watch)
    for i in stages:
        took["first backward", i] = first[i]
        took["forward before split", i], took["input backward", i] = split["forward", i], split["backward", i]
        took["weight backward", i] = split["weight backward", i]
    batching = [(i, stage) for i, stage in stages.items() if stage.can_batch_wgrad]
    if batching:
        _clear_gradients(stages)
        with _batched_wgrad(stages):
            for n in range(1, NUM_BATCHED + 1):
                of_pass = backwards()
                for i, stage in batching:
                    took[f"batched backward {n}", i] = of_pass[i]
                    if n == min(stage.max_batched, NUM_BATCHED):
                        began = watch.now()
                        stage.complete_gradients()
                        took["product", i] = watch.since(began)
        for _, stage in batching:
            stage.complete_gradients()
    microbatch.batching = {
        i: _Batching(stage.max_batched, stage.max_deferred_bytes) for i, stage in stages.items()
    }
    return watch.read(took)


def _accumulate_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of adding gradients up, which the first backward of an update does not need."""
    return max(0.0, seconds["backward"] - seconds["first backward"])


def _batched_products(batching: _Batching, seconds: Mapping[str, float]) -> JoinedProducts | None:
    """Fit a line through the products of one microbatch and of the most measured; None: there are none."""
    count = batching.num_measured
    if not count:
        return None
    backwards = [seconds[f"batched backward {n}"] for n in range(1, count + 1)]
    of_several = seconds["product"]
    of_one = max(0.0, seconds["weight backward"] - _accumulate_seconds(seconds))
    per_microbatch = max(0.0, of_several - of_one) / (count - 1) if count > 1 else 0.0
    return JoinedProducts(
        backward_seconds=statistics.mean(backwards),
        product_seconds=max(0.0, of_several - count * per_microbatch),
        microbatch_seconds=per_microbatch,
        microbatches=batching.microbatches,
        kept_bytes=math.ceil(batching.kept_bytes / count),
    )


def _clear_gradients(stages: _Stages) -> None:
    for stage in stages.values():
        stage.module.zero_grad(set_to_none=True)


@contextmanager
def _batched_wgrad(stages: _Stages) -> Iterator[None]:
    """Make the weight gradients of several passes in one product."""
    for stage in stages.values():
        stage.batches_wgrad = True
    try:
        yield
    finally:
        for stage in stages.values():
            stage.batches_wgrad = False


@contextmanager
def _keeping_gradients(stages: Collection[Stage]) -> Iterator[None]:
    """Put all gradients aside inside this context."""
    held = [(p, p.grad) for stage in stages for p in stage.module.parameters()]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _pass(stages: _Stages, microbatch: _Microbatch, watch: Stopwatch) -> dict[_Figure, Lap]:
    """Run one forward and one backward, whole or split, and return the time of each layer.

    Each layer receives what it was observed to receive, as the layer before it may not be among them.
    """
    took = {}
    for i, stage in stages.items():
        observed = microbatch.layers[i]
        inputs = microbatch.inputs if stage.layers.needs_inputs(training=True) else None
        received = copied(observed.received)
        began = watch.now()
        if i == 0:  # a stage tells a microbatch's form once, whatever the number of its layers
            stage.layers.form(microbatch.num_samples, lambda: microbatch.inputs, training=True)
        if stage.loss is None:
            stage.forward(0, received, step=0, inputs=inputs, form=observed.form)
        else:
            targets = microbatch.targets
            stage.forward_loss(0, received, targets, share=1.0, step=0, inputs=inputs, form=observed.form)
        took["forward", i] = watch.since(began)
        microbatch.summed["forward", i] = microbatch.sums.taken()
    for i, stage in reversed(stages.items()):
        gradients = microbatch.layers[i].gradients
        began = watch.now()
        (stage.backward_input if stage.split_backward else stage.backward)(0, gradients)
        took["backward", i] = watch.since(began)
        microbatch.summed["backward", i] = microbatch.sums.taken()
        if stage.split_backward:  # at once: less memory is kept than after all layers' input gradients
            microbatch.split_bytes[i] = stage.split_bytes(0)
            began = watch.now()
            stage.backward_weight(0)
            took["weight backward", i] = watch.since(began)
    return took


def _measure_updates(
    stages: _Stages,
    optimizer: OptimizerFactory | None,
    in_between: Callable[[], object],
    watch: Stopwatch,
    agree: Agree,
) -> tuple[dict[int, float], int]:
    """Return the seconds of each trained layer's update, and the bytes of the optimizer's state.

    Args:
        in_between: runs a forward and a backward between two steps, which fills the caches as training does.
    """
    optimizers, gradients = dict[int, torch.optim.Optimizer](), {}
    for i, stage in stages.items():
        parameters = [p for p in stage.module.parameters() if p.grad is not None]
        if optimizer is not None and parameters:
            gradients[i] = [p.grad for p in parameters if p.grad is not None]
            for gradient in gradients[i]:
                gradient.zero_()  # a step with zero gradients takes as long and leaves the copy usable
            made = made_by(with_names(optimizer, stage.layers.parameters()), parameters)
            for hooks in step_hooks(made):
                hooks.clear()  # the user's may change more than this copy of the model
            optimizers |= {} if made is None else {i: made}

    def steps() -> dict[int, Took]:
        took = {}
        with _keeping_gradients(stages.values()):
            in_between()
        for i, over_layer in optimizers.items():
            began = watch.now()
            norms(gradients[i])  # training checks them for numbers that are not finite
            with fused(over_layer):
                over_layer.step()
            stages[i].copy_weights()  # training does so once an update
            took[i] = watch.since(began)
        return watch.read(took)

    updates = typical([steps], agree)[0] if optimizers else {}
    states = (state.values() for over_layer in optimizers.values() for state in over_layer.state.values())
    kept = (value for value in chain(*states) if isinstance(value, Tensor) and value.numel() > 1)
    return updates, total_bytes(kept)


def _dtype(stages: list[Stage], inputs: Tree) -> str:
    parameters = (parameter for stage in stages for parameter in stage.module.parameters())
    return str(next(chain(parameters, tensors.tensors_in(inputs))).dtype).removeprefix("torch.")
