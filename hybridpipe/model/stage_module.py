"""Stage module: the layers of one stage, how they are called, and the keys of their tensors.

Here they are called one after the other; a recorded model runs them in its own way. Invariant: modules
are the model's own. A tensor that several stages hold belongs to the first of them, its owner.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.recording.refusals import writes_weight
from hybridpipe.model.recording.watch import Watch
from hybridpipe.model.rng import may_draw_from_python
from hybridpipe.model.signature import module_signature
from hybridpipe.model.tensors import Tree, tensors_in

SHAPES = 2**32  # forms from here on are of shapes, those below are numbers of samples

# Seeds the generators with a key; the flag tells whether to seed Python's and NumPy's, too.
Seed = Callable[[int, bool], None]


class StageModule:
    """The layers of one stage, and the keys of their tensors in the whole model's `state_dict()`.

    A path names a tensor or a module in the stage, such as "0.weight".

    Args:
        layers: the layers, in order.
        first_layer: index of the first layer in the whole model.
        names: the layers' names in the model; by default their indices.
        shared: the first key in the model of each tensor that layers outside the stage also hold, by its key.
        precision: in which the layers run.

    Attributes:
        shapes_vary: microbatches of as many samples may differ in shape; their inputs tell them apart.
        alternates: each microbatch's backward runs before the next one's forward, and no forward again;
            otherwise no forward may write to parameters (`Plan.alternates`).
        device: on which the layers are; None: where the model was.
    """

    shapes_vary = False
    alternates = True
    device: torch.device | None = None

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int = 0,
        names: Sequence[str] | None = None,
        shared: Mapping[str, str] | None = None,
        precision: Precision = FP32,
    ) -> None:
        self.module, self.first_layer, self.precision = nn.Sequential(*layers), first_layer, precision
        self.names = names or [str(first_layer + i) for i in range(len(layers))]
        self._calls: list[Callable[[Tree], Tree]] = [
            layer if name or calls_children(layer) else partial(_call_with, layer)
            for name, layer in zip(self.names, layers, strict=True)
        ]
        self.renew()
        self._shared, self._has_run = shared or {}, False
        buffers = self.module.named_buffers(remove_duplicate=False)
        self.shared_buffers = [path for path, _ in buffers if self.key(path) in self._shared]

    def renew(self) -> None:
        """Adopt the layers' present hooks; call it between two runs."""
        self._draws_from_python = list(map(may_draw_from_python, self.module))

    def move(self, device: torch.device) -> nn.Sequential:
        """Move the layers to a device, and return them."""
        self.device = device
        return self.module.to(device)

    def needs_inputs(self, training: bool) -> bool:
        """Return True if `run` uses the model's inputs.

        Args:
            training: False in an evaluation, where a forward may do something else.
        """
        return self.first_layer == 0

    @property
    def draws_from_python(self) -> bool:
        """True if a layer may draw from Python's or NumPy's generators."""
        return any(self._draws_from_python)

    @property
    def loss_key(self) -> int:
        """The loss's place in random keys, behind the last layer's."""
        return self.first_layer + len(self.module)

    def form(self, num_samples: int, inputs: Callable[[], Tree], training: bool) -> int:
        """Return the form of a microbatch: equal for microbatches whose values have equal shapes and types.

        Args:
            num_samples: samples in the microbatch.
            inputs: returns the model's inputs; called if `needs_inputs(training)` or `shapes_vary`.
        """
        if not self.shapes_vary:
            return num_samples
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(inputs())]
        return SHAPES + zlib.crc32(repr(shapes).encode())

    def run(self, received: Tree, inputs: Tree, seed: Seed, training: bool, form: int = 0) -> Tree:
        """Run the layers on one microbatch.

        Args:
            received: what the stage before has sent; None in the first stage.
            inputs: the model's inputs; None unless `needs_inputs(training)`.
            seed: called before each layer, with the layer's place in random keys.
            training: False in an evaluation.
            form: of the microbatch, as `form` has given it to this stage.

        Returns:
            what the next stage receives; the last stage's is the model's output.
        """
        value = inputs if received is None else received
        if not (self._has_run or self.alternates) and training:
            self._has_run = True
            return self._first_run(value, seed)
        for i in range(len(self._calls)):
            value = self._run_layer(i, value, seed)
        return value

    def _run_layer(self, i: int, value: Tree, seed: Seed) -> Tree:
        seed(self.first_layer + i, self._draws_from_python[i])
        return self._calls[i](value)

    def _first_run(self, value: Tree, seed: Seed) -> Tree:
        """Run the layers, and refuse one that writes to a parameter."""
        for i in range(len(self._calls)):
            parameters = dict(self.module[i].named_parameters())
            with Watch(parameters.values()) as watch:
                value = self._run_layer(i, value, seed)
            for name, parameter in parameters.items():
                if parameter.requires_grad and watch.storage(parameter) in watch.overwritten:
                    what = self.described(f"{i}.{name}")
                    raise writes_weight(f"the forward writes to {what}, whose numbers backwards still need")
        return value

    def signature(self) -> str:
        """Return a text that is equal for layers that take as long, if they receive equal values."""
        return repr(list(map(module_signature, self.module)))

    def key(self, path: str) -> str:
        """Return the key in the whole model of the tensor at a path."""
        index, _, rest = path.partition(".")
        return joined(self.names[int(index)], rest)

    def numbered(self, path: str) -> str:
        """Return the path in the whole model, with the layer's index: "3.norm"."""
        index, dot, rest = path.partition(".")
        return f"{self.first_layer + int(index)}{dot}{rest}" if self.names[int(index)] else rest or "model"

    def described(self, path: str) -> str:
        """Return a description of a path for messages: "layer 3 (Linear), weight"."""
        index, _, rest = path.partition(".")
        what = f"layer {self.first_layer + int(index)}" if self.names[int(index)] else "the model"
        return f"{what} ({type(self.module[int(index)]).__name__}), {rest}"

    def foreign(self, parameter: Tensor) -> str:
        """Return a description for messages of a parameter that the stage does not hold."""
        return f"a parameter of shape {tuple(parameter.shape)}"

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the stage's `state_dict()`, not detached, by key."""
        held = self.module.state_dict(keep_vars=True)
        return {self.key(path): tensor for path, tensor in held.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers among `tensors`, by key."""
        return {k: t for k, t in self.tensors().items() if not isinstance(t, nn.Parameter)}

    def parameters(self) -> dict[Tensor, str]:
        """Return the key of each parameter; a tied one has its first key in the whole model."""
        found: dict[Tensor, str] = {}
        for path, parameter in self.module.named_parameters(remove_duplicate=False):
            found.setdefault(parameter, self._shared.get(self.key(path), self.key(path)))
        return found

    def owned_parameters(self) -> dict[Tensor, str]:
        """Return `parameters` without those that an earlier stage owns."""
        others = {first for key, first in self._shared.items() if first not in self._shared}
        return {parameter: key for parameter, key in self.parameters().items() if key not in others}

    def weights(self, weights: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return a version's leaves by the keys of the parameters that they replace.

        Args:
            weights: one mapping a layer, from the parameter's name within the layer to the leaf.
        """
        wanted = {key for parameter, key in self.parameters().items() if parameter.requires_grad}
        named = {
            joined(layer, name): leaf
            for layer, leaves in zip(self.names, weights, strict=True)
            for name, leaf in leaves.items()
        }
        return {key: leaf for key, leaf in named.items() if key in wanted}


def joined(path: str, name: str) -> str:
    """Return a path with a name behind it: "blocks.0", "weight" become "blocks.0.weight"."""
    return f"{path}.{name}" if path else name


def calls_children(module: nn.Module) -> bool:
    """Return True if a module only calls its children in order, as `nn.Sequential` does."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _call_with(model: nn.Module, value: Tree) -> Tree:
    if isinstance(value, Mapping):
        return model(**value)
    return model(*value) if isinstance(value, tuple | list) else model(value)
