"""Profile: the cost of each layer of a model, for one microbatch on one rank at full speed.

Pure data, and its scaling to other sizes of the microbatch. Not known here: the measurement
(`hybridpipe.measure.layers`) and the place where layers run.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hybridpipe.planning.checks import non_negative, non_negative_int, positive_int
from hybridpipe.planning.layer_parts import ExpertsProfile, SumsProfile
from hybridpipe.planning.schedules.registry import TRAITS

PROFILE_FORMAT = "hybridpipe-profile/1"


@dataclass(frozen=True, slots=True)
class JoinedProducts:
    """A layer whose weight gradients are computed for several microbatches at once (batched wgrad).

    Schedules with `ScheduleTraits.batches_wgrad` do so.

    Args:
        backward_seconds: of a microbatch, without the deferred products.
        product_seconds, microbatch_seconds: of a product, and of each microbatch in it.
        microbatches: the most in one product; the last product of a minibatch may have fewer.
        kept_bytes: kept for each of them until the product. Where a layer's weights have unequal rows, most
            products are computed earlier, and this times `microbatches` is an upper bound.
    """

    backward_seconds: float
    product_seconds: float
    microbatch_seconds: float
    microbatches: int
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("backward_seconds", "product_seconds", "microbatch_seconds"):
            non_negative(name, getattr(self, name))
        positive_int("microbatches", self.microbatches)
        non_negative_int("kept_bytes", self.kept_bytes)

    def seconds(self, microbatches: int) -> float:
        """Return the seconds of a product of `microbatches` microbatches."""
        return self.product_seconds + self.microbatch_seconds * microbatches

    def last(self, num_microbatches: int) -> int:
        """Return the number of microbatches in the last product of a minibatch."""
        return (num_microbatches - 1) % self.microbatches + 1


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer: the unit of the profile, the smallest thing that a cut can separate.

    Args:
        name: the layer's name in the model, for people.
        forward_seconds, backward_seconds: compute for one microbatch.
        parameter_bytes: the layer's trainable parameters; its gradients have the same size.
        output_bytes: bytes that a cut after this layer carries forward for one microbatch: every tensor alive
            there.
        activation_bytes: bytes that one microbatch keeps in this layer until its backward.
        update_seconds: the optimizer's step over the layer's parameters.
        gradient_bytes: bytes that come back over a cut after this layer. None: as many as go forward. Tensors
            without a gradient, such as token numbers and masks, make it less.
        weight_seconds: the half of a split backward that computes the weight gradients. None: not measured.
        input_seconds: the other half, with the additional cost in the forward. Together they take a little
            longer than `backward_seconds`. None: `backward_seconds` less `weight_seconds`.
        accumulate_seconds: the part of `backward_seconds`, and of the weights' half, that adds weight
            gradients to those of earlier microbatches; an update's first microbatch has none to add to.
        joined: the joint computation of weight gradients for several microbatches. None: there is none.
        split_bytes: bytes that one microbatch keeps between the halves of a split backward: what weight
            gradients are computed from. None: all that it kept until then.
        workspace_bytes: bytes that a pass has for a moment, besides what it keeps, the layer's inputs and
            gradients. None: not measured, and nothing is counted.
        largest_bytes: the largest trainable parameter. None: all of them as one.
        frozen_bytes: parameters that are not trained, and buffers. None: not measured, and none are counted.
        experts: those that replicas may share. None: there are none, or they were not measured.
        sums: of a shard's passes with the other shards. None: there are no others.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    update_seconds: float = 0.0
    gradient_bytes: int | None = None
    weight_seconds: float | None = None
    input_seconds: float | None = None
    accumulate_seconds: float = 0.0
    joined: JoinedProducts | None = None
    split_bytes: int | None = None
    workspace_bytes: int | None = None
    largest_bytes: int | None = None
    frozen_bytes: int | None = None
    experts: ExpertsProfile | None = None
    sums: SumsProfile | None = None

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "backward_seconds", "update_seconds", "accumulate_seconds"):
            non_negative(name, getattr(self, name))
        for name in ("parameter_bytes", "output_bytes", "activation_bytes"):
            non_negative_int(name, getattr(self, name))
        for name in ("gradient_bytes", "split_bytes", "workspace_bytes", "largest_bytes", "frozen_bytes"):
            if getattr(self, name) is not None:
                non_negative_int(name, getattr(self, name))
        for name in ("weight_seconds", "input_seconds"):
            if getattr(self, name) is not None:
                non_negative(name, getattr(self, name))
        if self.experts is not None and self.experts.parameter_bytes > self.parameter_bytes:
            raise ValueError(
                f"experts.parameter_bytes must be <= parameter_bytes = {self.parameter_bytes}, "
                f"got {self.experts.parameter_bytes}"
            )
        parts = {"accumulate_seconds": self.accumulate_seconds}
        if self.input_seconds is None:
            parts["weight_seconds"] = self.weight_seconds or 0.0
        for name, part in parts.items():
            if part > self.backward_seconds:
                raise ValueError(f"{name} must be <= backward_seconds = {self.backward_seconds}, got {part}")

    def backward(self, schedule: str, num_microbatches: int) -> float:
        """Return the seconds of a microbatch's backward, the mean over one replica's microbatches of an
        update.

        The last of the `products` is left out.
        """
        if TRAITS[schedule].splits_backward:
            return self.input_backward_seconds + self.weights_backward(num_microbatches)
        if self.joined is None or not TRAITS[schedule].batches_wgrad:
            return self.backward_seconds - self.accumulate_seconds / num_microbatches
        last = self.joined.last(num_microbatches)
        products = (num_microbatches - last) // self.joined.microbatches
        return (
            self.joined.backward_seconds
            + products * self.joined.seconds(self.joined.microbatches) / num_microbatches
        )

    def whole_backward(self, schedule: str, num_microbatches: int) -> float:
        """Return `backward` where gradients are reduced after each microbatch, so that no product waits."""
        if self.joined is None or not TRAITS[schedule].batches_wgrad:
            return self.backward(schedule, num_microbatches)
        return self.joined.backward_seconds + self.joined.seconds(1)

    def products(self, schedule: str, num_microbatches: int) -> float:
        """Return the seconds of the product that the last backward of an update leaves to be computed."""
        if self.joined is None or not TRAITS[schedule].batches_wgrad:
            return 0.0
        return self.joined.seconds(self.joined.last(num_microbatches))

    def weights_backward(self, num_microbatches: int) -> float:
        """Return the mean seconds of the weights' half of a split backward, as in `backward`."""
        return max(0.0, self.weight_backward_seconds - self.accumulate_seconds / num_microbatches)

    def kept(self, schedule: str, num_microbatches: int) -> int:
        """Return the most bytes that the schedule keeps for batched products."""
        if self.joined is None or not TRAITS[schedule].batches_wgrad:
            return 0
        return self.joined.kept_bytes * min(num_microbatches, self.joined.microbatches)

    def always(self, schedule: str, num_microbatches: int) -> int:
        """Return the bytes that a rank has all the time, besides trained weights: frozen ones, and `kept`."""
        return (self.frozen_bytes or 0) + self.kept(schedule, num_microbatches)

    def workspace(self, schedule: str, num_microbatches: int) -> int:
        """Return the most bytes that a pass has for a moment, in an update of `num_microbatches`.

        A gradient that is added to another is there until then; rows of a batched product are put together.
        """
        if self.workspace_bytes is None:
            return 0
        if num_microbatches == 1:
            return self.workspace_bytes
        rows = self.kept(schedule, num_microbatches)
        return self.workspace_bytes + (rows or self.largest_parameter_bytes)

    def shared_by(self, replicas: int) -> "LayerProfile":
        """Return the layer as one of several replicas has it that share its experts.

        It takes as long as on the replica that gets most tokens, whose experts are fewer; the tokens are
        those of all replicas, each of which has as many.
        """
        if self.experts is None or replicas == 1:
            return self
        experts, part = self.experts, math.ceil(self.experts.parameter_bytes / replicas)
        factor = 1 + experts.share * (experts.time_of(replicas) - 1)
        held = self.parameter_bytes - experts.parameter_bytes + part
        joined = self.joined and replace(self.joined, backward_seconds=self.joined.backward_seconds * factor)
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
            input_seconds=None if self.input_seconds is None else self.input_seconds * factor,
            weight_seconds=None if self.weight_seconds is None else self.weight_seconds * factor,
            accumulate_seconds=self.accumulate_seconds * factor,
            parameter_bytes=held,
            update_seconds=self.update_seconds * (held / self.parameter_bytes if self.parameter_bytes else 1),
            largest_bytes=None if self.largest_bytes is None else min(self.largest_bytes, held),
            joined=joined,
            experts=replace(experts, parameter_bytes=part, replicas=replicas),
        )

    @property
    def least_part(self) -> float:
        """The part of its seconds that it takes at least, however many replicas share its experts."""
        return 1.0 if self.experts is None else 1 + self.experts.share * (self.experts.least_time - 1)

    @property
    def own_bytes(self) -> int:
        """Bytes of trained parameters that no other replica has."""
        return self.experts.parameter_bytes if self.experts and self.experts.replicas > 1 else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of tokens that a microbatch sends to experts of all replicas."""
        return self.experts.token_bytes if self.experts and self.experts.replicas > 1 else 0

    @property
    def num_exchanges(self) -> int:
        """The modules whose tokens replicas exchange."""
        return self.experts.num_modules if self.experts and self.experts.replicas > 1 else 0

    @property
    def largest_parameter_bytes(self) -> int:
        """Bytes of the largest trainable parameter; where it is not known, of all of them."""
        return self.parameter_bytes if self.largest_bytes is None else self.largest_bytes

    @property
    def returned_bytes(self) -> int:
        """Bytes that come back over a cut after this layer."""
        return self.output_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def input_backward_seconds(self) -> float:
        """Seconds of the half of a backward that computes the gradients of the inputs."""
        if self.input_seconds is None:
            return self.backward_seconds - self.weight_backward_seconds
        return self.input_seconds

    @property
    def weight_backward_seconds(self) -> float:
        """Seconds of the half of a backward that computes the weight gradients; 0 without weights.

        Where it was not measured, it is half of the backward: the assumption of zero-bubble schedules (T_F =
        T_B = T_W; Qi et al., ICLR 2024, section 2), true of large matrix products.
        """
        if not self.parameter_bytes:
            return 0.0
        return self.backward_seconds / 2 if self.weight_seconds is None else self.weight_seconds


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several layers use, such as a tied embedding, or a buffer that training writes to.

    Args:
        name: its first key in the model, for people.
        layers: the layers that use it, in ascending order, each of which counts it in `parameter_bytes`.
        parameter_bytes: its size; 0 if it is frozen or a buffer.
        separable: False if its layers must stay in one stage under every schedule.
    """

    name: str
    layers: tuple[int, ...]
    parameter_bytes: int
    separable: bool = True

    def __post_init__(self) -> None:
        non_negative_int("parameter_bytes", self.parameter_bytes)
        for layer in self.layers:
            non_negative_int("layers", layer)
        if len(self.layers) < 2 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must be several in ascending order, got {list(self.layers)}")


@dataclass(frozen=True, slots=True)
class Measurement:
    """The layers of a model at one size of the microbatch.

    Args:
        tensor: shards of a replica, of one of which the figures are.
        shared: as in `ModelProfile`, of such a shard.
    """

    samples: int
    layers: tuple[LayerProfile, ...]
    tensor: int = 1
    shared: tuple[SharedParameter, ...] = ()

    def __post_init__(self) -> None:
        positive_int("samples", self.samples)
        positive_int("tensor", self.tensor)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """All layers of a model in order, and the circumstances of the measurement.

    Args:
        layers, samples: the size of the microbatch that every layer's figures belong to.
        state_factor: the optimizer's state in units of the parameters (0 for SGD, 1 with momentum, 2 for
            Adam).
        copied_factor: copies of the weights in another type, in the same units; each replica has them whole.
        others: the same layers at other measured sizes of the microbatch, and as other numbers of shards have
            them.
        load: ranks of a machine that computed at once during the measurement.
        shared: the parameters that several layers use.
        why_whole: the reason why the model is one layer, for people; "" if nothing prevents cuts.
        tensor: shards of a replica, of one of which the figures are.
    """

    layers: tuple[LayerProfile, ...]
    samples: int
    device: str = "cpu"
    dtype: str = "float32"
    state_factor: float = 0.0
    copied_factor: float = 0.0
    others: tuple[Measurement, ...] = ()
    load: int = 1
    shared: tuple[SharedParameter, ...] = ()
    why_whole: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    tensor: int = 1
    format: str = PROFILE_FORMAT

    def __post_init__(self) -> None:
        if self.format != PROFILE_FORMAT:
            raise ValueError(f"format must be {PROFILE_FORMAT!r}, got {self.format!r}")
        if not self.layers:
            raise ValueError("layers must hold at least one layer, got none")
        positive_int("samples", self.samples)
        positive_int("load", self.load)
        positive_int("tensor", self.tensor)
        non_negative("state_factor", self.state_factor)
        non_negative("copied_factor", self.copied_factor)
        for i, other in enumerate(self.others):
            if len(other.layers) != len(self.layers):
                raise ValueError(
                    f"others[{i}].layers must hold the same {self.num_layers} layers, got {len(other.layers)}"
                )
        self._check_shared()
        measured = [(self.samples, self.tensor), *((other.samples, other.tensor) for other in self.others)]
        if len(set(measured)) < len(measured):
            sizes = [samples for samples, _ in measured]
            raise ValueError(f"others must be of different samples or tensor each, got {sizes}")

    def _check_shared(self) -> None:
        """Raises ValueError for shared parameters of layers that are too few or too small."""
        rest = {i: layer.parameter_bytes for i, layer in enumerate(self.layers)}
        for n, shared in enumerate(self.shared):
            for i in shared.layers:
                if i not in rest:
                    raise ValueError(f"shared[{n}].layers must be < {self.num_layers}, got {i}")
                rest[i] -= shared.parameter_bytes
                if rest[i] < 0:
                    raise ValueError(
                        f"shared[{n}].parameter_bytes must be a part of layers[{i}].parameter_bytes = "
                        f"{self.layers[i].parameter_bytes}, got {shared.parameter_bytes}"
                    )

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        """True if replicas may share experts of some layer."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The measured sizes of the microbatch, smallest first."""
        others = (other.samples for other in self.others if other.tensor == self.tensor)
        return tuple(sorted((self.samples, *others)))

    @property
    def tensors(self) -> tuple[int, ...]:
        """The measured numbers of shards, smallest first."""
        return tuple(sorted({self.tensor, *(other.tensor for other in self.others)}))

    @property
    def of_one_size(self) -> "ModelProfile":
        """The profile without other sizes of the microbatch."""
        splits = (self.split_over(tensor) for tensor in self.tensors if tensor != self.tensor)
        others = (Measurement(each.samples, each.layers, each.tensor, each.shared) for each in splits)
        return replace(self, others=tuple(others))

    def split_over(self, tensor: int) -> "ModelProfile":
        """Return the profile of one of `tensor` shards, for as many samples.

        Raises:
            ValueError: no such shard was measured.
        """
        if tensor == self.tensor:
            return self
        mine = [other for other in self.others if other.tensor == tensor]
        if not mine:
            measured = " or ".join(map(str, self.tensors))
            raise ValueError(f"tensor must be {measured}, as the profile was measured, got {tensor}")
        first, *others = mine
        split = replace(
            self,
            layers=first.layers,
            samples=first.samples,
            shared=first.shared,
            tensor=tensor,
            others=tuple(others),
        )
        return split.scaled_to(self.samples)

    def scaled_to(self, samples: int) -> "ModelProfile":
        """Return the profile of a microbatch of another size.

        Times lie on straight lines between the measured sizes, and beyond them on the line through the two
        nearest. With one measured size they are in proportion, which underestimates small microbatches. Sizes
        of activations and outputs are in proportion.
        """
        if samples == self.samples:
            return self
        positive_int("samples", samples)
        mine = [other for other in self.others if other.tensor == self.tensor]
        measured = {other.samples: other.layers for other in mine} | {self.samples: self.layers}
        if samples in measured:
            layers = measured.pop(samples)
        else:
            layers = tuple(map(_line(samples, sorted(measured)), *(measured[n] for n in sorted(measured))))
        own = (Measurement(n, measured[n], self.tensor, self.shared) for n in sorted(measured))
        others = tuple(other for other in self.others if other.tensor != self.tensor)
        return replace(self, layers=layers, samples=samples, others=(*own, *others))


def _line(samples: int, sizes: list[int]) -> Callable[..., LayerProfile]:
    """Return a function from a layer at each of `sizes` to the layer at `samples`."""
    right = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)  # 0 where only one size is known
    left = max(right - 1, 0)
    factor = samples / sizes[right]

    def seconds(low: float, high: float) -> float:
        if left == right:
            return low * samples / sizes[left]
        slope = (high - low) / (sizes[right] - sizes[left])
        return max(0.0, low + slope * (samples - sizes[left]))

    def num_bytes(at_right: int | None) -> int | None:
        return None if at_right is None else round(at_right * factor)

    def layer(*measured: LayerProfile) -> LayerProfile:
        low, high = measured[left], measured[right]
        backward = seconds(low.backward_seconds, high.backward_seconds)
        weight = of_inputs = joined = None
        if low.joined is not None and high.joined is not None and high.joined.microbatches > factor:
            joined = JoinedProducts(  # else one microbatch fills a product, and joins none
                seconds(low.joined.backward_seconds, high.joined.backward_seconds),
                (low.joined.product_seconds + high.joined.product_seconds) / 2,
                seconds(low.joined.microbatch_seconds, high.joined.microbatch_seconds),
                math.ceil(high.joined.microbatches / factor),
                round(high.joined.kept_bytes * factor),
            )
        if low.weight_seconds is not None and high.weight_seconds is not None:
            weight = seconds(low.weight_seconds, high.weight_seconds)
            if low.input_seconds is None or high.input_seconds is None:
                weight = min(weight, backward)
            else:
                of_inputs = seconds(low.input_seconds, high.input_seconds)
        return replace(
            high,
            forward_seconds=seconds(low.forward_seconds, high.forward_seconds),
            backward_seconds=backward,
            weight_seconds=weight,
            input_seconds=of_inputs,
            accumulate_seconds=min(seconds(low.accumulate_seconds, high.accumulate_seconds), backward),
            joined=joined,
            output_bytes=round(high.output_bytes * factor),
            gradient_bytes=num_bytes(high.gradient_bytes),
            split_bytes=num_bytes(high.split_bytes),
            workspace_bytes=num_bytes(high.workspace_bytes),
            activation_bytes=round(high.activation_bytes * factor),
            experts=high.experts and high.experts.scaled(factor),
            sums=high.sums and high.sums.scaled(factor),
        )

    return layer
