"""What a model costs, layer by layer, for one microbatch on one rank at full speed.

Lives here: the data and its sums over consecutive layers. Not known here: how it was measured
(`hybridpipe.stage.measure`) and where the layers will run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from hybridpipe.planning.checks import non_negative, non_negative_int, positive_int

PROFILE_FORMAT = "hybridpipe-profile/1"


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer: the unit of the profile, the smallest thing a cut can separate.

    Args:
        name: the layer's name in the model, for people.
        forward_seconds, backward_seconds: compute for one microbatch.
        parameter_bytes: the layer's trainable parameters, which is also what its gradients weigh.
        output_bytes: what a cut after this layer carries forward for one microbatch: every tensor
            alive there. The gradient that comes back weighs the same at most.
        activation_bytes: what one microbatch keeps in this layer until its backward.
        update_seconds: the optimizer's step over the layer's parameters.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "backward_seconds", "update_seconds"):
            non_negative(name, getattr(self, name))
        for name in ("parameter_bytes", "output_bytes", "activation_bytes"):
            non_negative_int(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """All layers of a model in order, and the circumstances of the measurement.

    `samples` is the size of the microbatch that every figure belongs to; `state_factor` is the
    optimizer's state in units of the parameters (0 for SGD, 1 with momentum, 2 for Adam).
    """

    layers: tuple[LayerProfile, ...]
    samples: int
    device: str = "cpu"
    dtype: str = "float32"
    state_factor: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    format: str = PROFILE_FORMAT

    def __post_init__(self) -> None:
        if self.format != PROFILE_FORMAT:
            raise ValueError(f"format must be {PROFILE_FORMAT!r}, got {self.format!r}")
        if not self.layers:
            raise ValueError("layers must hold at least one layer, got none")
        positive_int("samples", self.samples)
        non_negative("state_factor", self.state_factor)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def prefix_sums(self, value: Callable[[LayerProfile], float]) -> list[float]:
        """Running sums: the layers `[start, stop)` together cost `sums[stop] - sums[start]`."""
        return list(accumulate((value(layer) for layer in self.layers), initial=0.0))

    def scaled_to(self, samples: int) -> "ModelProfile":
        """The profile of a microbatch of another size: compute and activations in proportion.

        A straight line through one measurement; small microbatches cost more than it says.
        """
        if samples == self.samples:
            return self
        factor = samples / self.samples
        layers = tuple(
            replace(
                layer,
                forward_seconds=layer.forward_seconds * factor,
                backward_seconds=layer.backward_seconds * factor,
                output_bytes=round(layer.output_bytes * factor),
                activation_bytes=round(layer.activation_bytes * factor),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, samples=samples)
