"""What a model costs, layer by layer, for one microbatch on one rank at full speed.

Lives here: the data, and what another size of the microbatch makes of it. Not known here: how it was measured
(`hybridpipe.measure.layers`) and where the layers will run.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hybridpipe.planning.checks import non_negative, non_negative_int, positive_int
from hybridpipe.planning.schedules.registry import TRAITS

PROFILE_FORMAT = "hybridpipe-profile/1"


@dataclass(frozen=True, slots=True)
class JoinedProducts:
    """A layer whose weights' gradients are made for several microbatches at once, under schedules that flush.

    Args:
        backward_seconds: of a microbatch; it leaves them to be made.
        product_seconds, microbatch_seconds: of a product, and more for each microbatch in it.
        microbatches: in one product, at most; the last of a minibatch may have fewer.
        kept_bytes: for each of them, until then. Where a layer's weights have unequal rows, products of most
            are made earlier, and this times `microbatches` is more than is ever kept.
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
        """Of a product of so many."""
        return self.product_seconds + self.microbatch_seconds * microbatches

    def last(self, num_microbatches: int) -> int:
        """How many are in the last of a minibatch's products."""
        return (num_microbatches - 1) % self.microbatches + 1


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer: the unit of the profile, the smallest thing a cut can separate.

    Args:
        name: the layer's name in the model, for people.
        forward_seconds, backward_seconds: compute for one microbatch.
        parameter_bytes: the layer's trainable parameters, which is also what its gradients weigh.
        output_bytes: what a cut after this layer carries forward for one microbatch: every tensor
            alive there.
        activation_bytes: what one microbatch keeps in this layer until its backward.
        update_seconds: the optimizer's step over the layer's parameters.
        gradient_bytes: what comes back over a cut after this layer; None: as much as goes forward.
            Tensors without a gradient, such as token numbers and masks, make it less.
        weight_seconds: the half of a backward that makes the weights' gradients, where it is run in halves;
            None: not measured.
        input_seconds: the other half, with what the forward takes more for it; both take a little longer than
            `backward_seconds`. None: what `weight_seconds` leaves of them.
        accumulate_seconds: the part of `backward_seconds`, and of the weights' half, that adds the weights'
            gradients to those of the microbatches before; an update's first has none to add to.
        joined: how the weights' gradients of several microbatches are made at once; None: they are not.
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

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "backward_seconds", "update_seconds", "accumulate_seconds"):
            non_negative(name, getattr(self, name))
        for name in ("parameter_bytes", "output_bytes", "activation_bytes"):
            non_negative_int(name, getattr(self, name))
        if self.gradient_bytes is not None:
            non_negative_int("gradient_bytes", self.gradient_bytes)
        for name in ("weight_seconds", "input_seconds"):
            if getattr(self, name) is not None:
                non_negative(name, getattr(self, name))
        parts = {"accumulate_seconds": self.accumulate_seconds}
        if self.input_seconds is None:
            parts["weight_seconds"] = self.weight_seconds or 0.0
        for name, part in parts.items():
            if part > self.backward_seconds:
                raise ValueError(f"{name} must be <= backward_seconds = {self.backward_seconds}, got {part}")

    def backward(self, schedule: str, num_microbatches: int) -> float:
        """Seconds of a microbatch's backward under a schedule, the mean over those of one replica's update.

        Without the last of the `products`.
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

    def products(self, schedule: str, num_microbatches: int) -> float:
        """Seconds of what the last backward of an update leaves to be made."""
        if self.joined is None or not TRAITS[schedule].batches_wgrad:
            return 0.0
        return self.joined.seconds(self.joined.last(num_microbatches))

    def weights_backward(self, num_microbatches: int) -> float:
        """Seconds of the half of a backward that makes the weights' gradients: the mean, as in `backward`."""
        return max(0.0, self.weight_backward_seconds - self.accumulate_seconds / num_microbatches)

    def kept(self, schedule: str, num_microbatches: int) -> int:
        """Bytes kept at most for joined products under a schedule."""
        if self.joined is None or not TRAITS[schedule].batches_wgrad:
            return 0
        return self.joined.kept_bytes * min(num_microbatches, self.joined.microbatches)

    @property
    def returned_bytes(self) -> int:
        """What comes back over a cut after this layer."""
        return self.output_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def input_backward_seconds(self) -> float:
        """The half of a backward that makes the inputs' gradients."""
        if self.input_seconds is None:
            return self.backward_seconds - self.weight_backward_seconds
        return self.input_seconds

    @property
    def weight_backward_seconds(self) -> float:
        """The half of a backward that makes the weights' gradients; none without weights.

        Where it was not measured, as long as the other: the assumption that zero-bubble schedules are made
        under (T_F = T_B = T_W; Qi et al., ICLR 2024, section 2), true of large matrix products.
        """
        if not self.parameter_bytes:
            return 0.0
        return self.backward_seconds / 2 if self.weight_seconds is None else self.weight_seconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """The layers of a model at one size of the microbatch."""

    samples: int
    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        positive_int("samples", self.samples)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """All layers of a model in order, and the circumstances of the measurement.

    Args:
        layers, samples: the size of the microbatch that every layer's figures belong to.
        state_factor: the optimizer's state in units of the parameters (0 for SGD, 1 with momentum, 2 for
            Adam).
        others: the same layers at other sizes of the microbatch, if they were measured.
        load: how many ranks of a machine computed at once while this was measured.
    """

    layers: tuple[LayerProfile, ...]
    samples: int
    device: str = "cpu"
    dtype: str = "float32"
    state_factor: float = 0.0
    others: tuple[Measurement, ...] = ()
    load: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    format: str = PROFILE_FORMAT

    def __post_init__(self) -> None:
        if self.format != PROFILE_FORMAT:
            raise ValueError(f"format must be {PROFILE_FORMAT!r}, got {self.format!r}")
        if not self.layers:
            raise ValueError("layers must hold at least one layer, got none")
        positive_int("samples", self.samples)
        positive_int("load", self.load)
        non_negative("state_factor", self.state_factor)
        for i, other in enumerate(self.others):
            if len(other.layers) != len(self.layers):
                raise ValueError(
                    f"others[{i}].layers must hold the same {self.num_layers} layers, got {len(other.layers)}"
                )
        sizes = [self.samples, *(other.samples for other in self.others)]
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"others must be of different samples each, got {sizes}")

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the microbatch that were measured, smallest first."""
        return tuple(sorted((self.samples, *(other.samples for other in self.others))))

    def scaled_to(self, samples: int) -> "ModelProfile":
        """The profile of a microbatch of another size.

        Times lie on straight lines between the sizes measured, and beyond them on the line through the two
        nearest; with one size, in proportion, and then small microbatches cost more than it says. Sizes of
        activations and outputs go in proportion.
        """
        if samples == self.samples:
            return self
        positive_int("samples", samples)
        measured = {other.samples: other.layers for other in self.others} | {self.samples: self.layers}
        if samples in measured:
            layers = measured.pop(samples)
        else:
            layers = tuple(map(_line(samples, sorted(measured)), *(measured[n] for n in sorted(measured))))
        others = tuple(Measurement(n, measured[n]) for n in sorted(measured))
        return replace(self, layers=layers, samples=samples, others=others)


def _line(samples: int, sizes: list[int]) -> Callable[..., LayerProfile]:
    """From a layer at each of `sizes` to the layer at `samples`."""
    right = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)  # 0 where only one size is known
    left = max(right - 1, 0)

    def seconds(low: float, high: float) -> float:
        if left == right:
            return low * samples / sizes[left]
        slope = (high - low) / (sizes[right] - sizes[left])
        return max(0.0, low + slope * (samples - sizes[left]))

    def layer(*measured: LayerProfile) -> LayerProfile:
        low, high = measured[left], measured[right]
        factor = samples / sizes[right]
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
            gradient_bytes=None if high.gradient_bytes is None else round(high.gradient_bytes * factor),
            activation_bytes=round(high.activation_bytes * factor),
        )

    return layer
