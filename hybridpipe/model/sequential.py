"""Sequential: a model's layers in order, the layers of a stage, and the keys of their tensors.

A plan cuts an `nn.Sequential` between its children; any other model is one layer here. Invariant: a stage's
modules are the model's own. A tensor that several stages hold belongs to the first of them, its owner.
"""

import copy
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain

from torch import Tensor, nn

from hybridpipe.errors import UserError
from hybridpipe.model.rng import may_draw_from_python
from hybridpipe.model.signature import module_signature
from hybridpipe.model.tensors import Tree, tensors_in
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import SharedParameter

WHOLE = ""  # the name of the one layer of a model that no plan can cut: the model itself

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
        shared: the first key in the model of each tensor that layers outside the stage hold, too, by its key.

    Attributes:
        shapes_vary: microbatches of as many samples may differ in shape; their inputs tell them apart.
    """

    shapes_vary = False

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int = 0,
        names: Sequence[str] | None = None,
        shared: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.first_layer = nn.Sequential(*layers), first_layer
        self.names = names or [str(first_layer + i) for i in range(len(layers))]
        self._calls: list[Callable[[Tree], Tree]] = [
            layer if name or type(layer).forward is nn.Sequential.forward else partial(_call_with, layer)
            for name, layer in zip(self.names, layers, strict=True)
        ]
        self.renew()
        self._shared = shared or {}
        buffers = self.module.named_buffers(remove_duplicate=False)
        self.shared_buffers = [path for path, _ in buffers if self.key(path) in self._shared]

    def renew(self) -> None:
        """Adopt the layers' present hooks; call it between two runs."""
        self._draws_from_python = list(map(may_draw_from_python, self.module))

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
            form: of the microbatch, as `form` has told it to this stage.

        Returns:
            what the next stage receives; the last stage's is the model's output.
        """
        value = inputs if received is None else received
        for i, (call, python_too) in enumerate(zip(self._calls, self._draws_from_python, strict=True)):
            seed(self.first_layer + i, python_too)
            value = call(value)
        return value

    def signature(self) -> str:
        """Return a text that is equal for layers that take as long, if they receive equal values."""
        return repr(list(map(module_signature, self.module)))

    def key(self, path: str) -> str:
        """Return the key in the whole model of the tensor at a path."""
        index, _, rest = path.partition(".")
        return _key(self.names[int(index)], rest)

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
            _key(layer, name): leaf
            for layer, leaves in zip(self.names, weights, strict=True)
            for name, leaf in leaves.items()
        }
        return {key: leaf for key, leaf in named.items() if key in wanted}


def _key(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _call_with(model: nn.Module, value: Tree) -> Tree:
    if isinstance(value, Mapping):
        return model(**value)
    return model(*value) if isinstance(value, tuple | list) else model(value)


def is_sequential(model: nn.Module) -> bool:
    """Return True if the model only calls its children in order, so that a plan can cut it."""
    is_plain = type(model).forward is nn.Sequential.forward and not (model._parameters or model._buffers)
    return isinstance(model, nn.Sequential) and is_plain


def num_layers(model: nn.Module) -> int:
    """Return the number of layers that a plan cuts.

    Raises:
        TypeError: the model is not an `nn.Module`.
        ValueError: it is an empty `nn.Sequential`.
    """
    return len(_layers_of(model))


def stage_module(model: nn.Module, start: int, stop: int) -> StageModule:
    """Return the layers from `start` up to, not including, `stop`."""
    layers = list(_layers_of(model).items())[start:stop]
    names = [name for name, _ in layers]
    shared: dict[str, str] = {}
    for uses in _uses(model).values():
        inside = [key for key, _ in uses if _layer_of(key, names) in names]
        if len(inside) < len(uses):
            shared |= dict.fromkeys(inside, uses[0][0])
    return StageModule([layer for _, layer in layers], start, names, shared)


def single_layers(model: nn.Module) -> list[StageModule]:
    """Return each layer as a stage by itself that shares nothing, for measurements."""
    return [StageModule([layer], i, [name]) for i, (name, layer) in enumerate(_layers_of(model).items())]


def holders(model: nn.Module, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each tensor of the model, its owner first, by each of the tensor's keys."""
    layers = list(_layers_of(model))
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in layers[stage.start : stage.stop]}

    def stages(*keys: str) -> tuple[int, ...]:
        return tuple(sorted({stage_of[_layer_of(key, layers)] for key in keys}))

    found = {key: stages(key) for key in model.state_dict()}
    for uses in _uses(model).values():
        keys = [key for key, _ in uses]
        found |= dict.fromkeys(keys, stages(*keys))
    return found


def shared_parameters(
    model: nn.Module, layers_of: Mapping[str, tuple[int, ...]]
) -> tuple[SharedParameter, ...]:
    """Return the parameters that several layers hold, and such buffers that training writes to.

    Frozen parameters count no bytes, as in their layers.

    Args:
        layers_of: the layers that hold each tensor, by each of its keys.
    """
    parameters, found = dict(model.named_parameters()), []
    for uses in _uses(model).values():
        key, stays = uses[0][0], _reason_to_stay(uses)
        if len(layers_of[key]) > 1 and (key in parameters or stays):
            parameter = parameters.get(key)
            num_bytes = parameter.nbytes if parameter is not None and parameter.requires_grad else 0
            found.append(SharedParameter(key, layers_of[key], num_bytes, separable=stays is None))
    return tuple(found)


def _uses(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return the keys of each parameter and buffer, and the modules that hold it there, by the tensor's id.

    Keys are in the order of the layers.
    """
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), []).append((_key(path, name), module))
    return found


def _layer_of(key: str, layers: Collection[str]) -> str:
    return WHOLE if WHOLE in layers else key.partition(".")[0]


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by name, in order.

    Raises:
        TypeError: the model is not an `nn.Module`.
        ValueError: it is an empty `nn.Sequential`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not is_sequential(model):
        return {WHOLE: model}
    # not named_children(): it passes over a module that stands in a second place, such as a shared ReLU
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    }
    if not layers:
        raise ValueError("model must have at least one layer, got an empty nn.Sequential")
    return layers


def check_plan(model: nn.Module, plan: Plan, why_whole: str = "") -> None:
    """Check that a plan fits a model.

    Args:
        why_whole: the reason why the model is one layer.

    Raises:
        ValueError: the number of layers differs, a replicated stage holds a SyncBatchNorm, or stages share a
            tensor that must stay in one of them.
    """
    layers = _layers_of(model)
    check_num_layers(plan, len(layers), why_whole)
    for s, stage in enumerate(plan.stages):
        for name in list(layers)[stage.start : stage.stop] if stage.replicas > 1 else ():
            check_no_sync_norm(name, layers[name], f"{plan.name} replicates stage {s}")
    check_shared(model, plan, holders(model, plan))


def check_num_layers(plan: Plan, count: int, why_whole: str) -> None:
    """Raise ValueError if a plan is for another number of layers.

    Args:
        why_whole: the reason why the model is one layer, if it is.
    """
    if plan.num_layers != count:
        told = f"the plan cuts num_layers = {plan.num_layers}, the model has {count} layer{'s' * (count > 1)}"
        raise ValueError(f"{told}: {why_whole}; use plan='dp'" if why_whole else told)


def check_shared(model: nn.Module, plan: Plan, stages_of: Mapping[str, Sequence[int]]) -> None:
    """Check that tensors in several stages may be there.

    Args:
        stages_of: the stages that hold each tensor (`holders`).

    Raises:
        ValueError: a tensor must stay in one stage.
    """
    for uses in _uses(model).values():
        if len(stages_of[uses[0][0]]) > 1:
            _check_may_be_shared(uses, stages_of, plan)


def _reason_to_stay(uses: Sequence[tuple[str, nn.Module]]) -> str | None:
    """Return why a tensor with these uses must stay in one stage under any schedule; None if it need not."""
    for key, module in uses:
        name = key.rpartition(".")[2]
        if name in module._buffers and isinstance(module, nn.modules.batchnorm._NormBase):
            return "to which training writes"
        if name == "weight" and getattr(module, "sparse", False) is True:
            return "whose gradients are sparse (an embedding's sparse=False makes them dense)"
    return None


def _check_may_be_shared(
    uses: Sequence[tuple[str, nn.Module]], stages_of: Mapping[str, Sequence[int]], plan: Plan
) -> None:
    """Raise ValueError if a tensor that several stages hold must stay in one of them."""
    reason = _reason_to_stay(uses)
    if plan.is_asynchronous and any(key.rpartition(".")[2] in module._parameters for key, module in uses):
        reason = f"which the stages would update at different times under {plan.schedule}"
    if reason is not None:
        (first, _), (last, _) = uses[0], uses[-1]
        begin, *_, end = stages_of[first]
        what = f"separates {first} (stage {begin}) and {last} (stage {end}), which are one tensor,"
        if first == last:
            what = f"lets stages {begin} and {end} share {first},"
        raise ValueError(
            f"the plan {what} {reason}; keep the layers that share it in one stage, as plan='dp' does"
        )


def check_no_sync_norm(name: str, layer: nn.Module, why: str) -> None:
    """Raise ValueError if a layer holds a SyncBatchNorm; `why` says which plan replicates it."""
    for path, module in layer.named_modules(prefix=name):
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"layer {path} is a SyncBatchNorm, which synchronises under torch.distributed only, and plan "
                f"{why}: use BatchNorm, whose running statistics replicas average, or GroupNorm, or "
                "a plan with one replica there"
            )


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients, for measurements.

    Raises:
        UserError: a layer cannot be copied; names the layer.
    """
    try:
        copy_of = copy.deepcopy(model)
    except Exception as error:  # whatever a layer's own attributes raise
        raise UserError(f"{_not_copied(model, error)}; give a plan, which needs no measuring") from error
    copy_of.zero_grad(set_to_none=True)
    return copy_of


def _not_copied(model: nn.Module, error: Exception) -> str:
    """Return a message with the first layer that cannot be copied, and its error."""
    for name, layer in _layers_of(model).items():
        try:
            copy.deepcopy(layer)
        except Exception as refused:
            what = f"layer {name} ({type(layer).__name__})" if name else type(layer).__name__
            return f"the model is measured on a copy, and {what} cannot be copied: {refused}"
    return f"the model is measured on a copy, and cannot be copied: {error}"
