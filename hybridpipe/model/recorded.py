"""Recorded: a model of any class as layers by the record of its forward, and the stages of a plan.

Knows the record and the model's modules; nothing of ranks and messages.
Invariant: a stage holds the model's own modules and parameters, under the model's own names.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hybridpipe.model.copies import copied
from hybridpipe.model.explanation import (
    RECORDED,
    LayerFacts,
    ModelExplanation,
    facts_of,
    forbidden_cuts,
    input_names,
)
from hybridpipe.model.plan_fit import check_num_layers, check_shared, check_writes
from hybridpipe.model.recording.events import Diverged, Event, Unsplittable, call_arguments
from hybridpipe.model.recording.record import Record
from hybridpipe.model.recording.records import MOST_SHAPES, Records
from hybridpipe.model.recording.refusals import random_path, writes_weight
from hybridpipe.model.recording.slices import ModelLookup, Slice
from hybridpipe.model.settings import Settings
from hybridpipe.model.stage_module import Seed, StageModule, joined
from hybridpipe.model.tensors import map_tensors, tensors_in, tensors_of
from hybridpipe.planning.plan import Plan
from hybridpipe.torch_private import pytree
from hybridpipe.types import Loss


class RecordedModel:
    """A model as the layers of its first record.

    Args:
        records: of the model's forward.
        inputs: the model's inputs for one microbatch, samples in the first dimension; a dict goes by
            keyword, a tuple by position.
        loss, targets: checked with the first record (`record`).

    Raises:
        Unsplittable: the forward cannot be recorded, or the loss reads what it does not return.
    """

    def __init__(
        self,
        model: nn.Module,
        records: Records,
        inputs: Any,
        loss: Loss | None = None,
        targets: Any = None,
    ) -> None:
        self.model, self.records, self.precision = model, records, records.precision
        self._inputs = map_tensors(Tensor.clone, inputs)  # users may refill theirs
        self._by_size: dict[tuple[int, bool], Record] = {}
        self.record = records.find(inputs, training=True, loss=loss, targets=targets)
        self.names = [layer.name for layer in self.record.layers]
        self.first_names = _first_names(model)  # once, since a forward may replace buffers
        leaf_modules = {path for each in self._slices for path in each.leaf_modules}
        self.settings = Settings(model, leaf_modules, {name for name, _ in self.record.assigned})
        records.around = self.settings.recording

    @property
    def num_layers(self) -> int:
        """Number of layers that a plan cuts."""
        return len(self.names)

    @property
    def path(self) -> str:
        """Text that is the same on ranks whose forwards do the same."""
        return f"{len(self.record.events)} calls ({self.record.digest:08x})"

    @cached_property
    def why_whole(self) -> str:
        """The reason why there is one layer; "" if there are several."""
        if self.num_layers > 1:
            return ""
        if forbidden := forbidden_cuts(self.record):
            return forbidden[0].reason
        calls = "".join(f", {path}" for path in self.record.layers[0].leaf_modules if path)
        return f"its forward calls {'one module only' if calls else 'no modules between which to cut'}{calls}"

    def explain(self) -> ModelExplanation:
        """Return what was made of the model, without what layers share."""
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        inputs = input_names(self._inputs)
        layers = tuple(
            LayerFacts(
                name=layer.name,
                parameters=sum(sizes.get(name, 0) for name in names),
                units=layer.leaf_modules,
                crossing_bytes=self.precision.sent_bytes(self.record.what_crosses(layer.stop)),
                crossing_tensors=len(part.gives),
                free_calls=len(part.free),
                inputs=tuple(inputs[i] for i in part.needs),
            )
            for layer, names, part in zip(self.record.layers, self.names_held, self._slices, strict=True)
        )
        parameters = dict(self.model.named_parameters())
        unused = tuple(name for name in self._unused if name in parameters)
        return ModelExplanation(RECORDED, layers, self.why_whole, unused=unused, **facts_of(self.record))

    def stage(self, start: int, stop: int) -> "RecordedStage":
        """Return the layers from `start` up to, not including, `stop`."""
        return RecordedStage(self, start, stop)

    def typical(self, training: bool) -> Record:
        """Return the record of the first inputs."""
        first = tensors_in(self._inputs)
        return self.of_size(len(first[0]) if first else 0, training)

    def of_size(self, num_samples: int, training: bool) -> Record:
        """Return the record of inputs like the first ones, with another number of samples.

        It is for stages that need no inputs: nothing that inputs hold decides over their path.
        """
        if (num_samples, training) not in self._by_size:
            inputs = map_tensors(lambda tensor: _resized(tensor, num_samples), self._inputs)
            self._by_size[num_samples, training] = self.records.find(inputs, training)
        return self._by_size[num_samples, training]

    def single(self) -> list[StageModule]:
        """Return each layer as a stage by itself, for measurements."""
        return [self.stage(i, i + 1) for i in range(self.num_layers)]

    def holders(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """Return the stages that hold each tensor, its owner first, by each of its keys in the model."""
        names = [set().union(*self.names_held[stage.start : stage.stop]) for stage in plan.stages]
        return {
            name: tuple(s for s, held in enumerate(names) if first in held)
            for name, first in self.first_names.items()
        }

    def check_plan(self, plan: Plan) -> None:
        """Check that a plan fits the layers.

        Raises:
            ValueError: the number of layers differs, or stages share a tensor that must stay in one of them.
        """
        check_num_layers(plan, self.num_layers, self.why_whole)
        check_writes(plan, self.record.writes)
        check_shared(self.model, plan, self.holders(plan))

    def calls_whole(self, path: str) -> bool:
        """Return True if stages call the module at a path, or one around it, as it is."""
        leaf_modules = (leaf for each in self._slices for leaf in each.leaf_modules)
        return any(not leaf or f"{path}.".startswith(f"{leaf}.") for leaf in leaf_modules)

    def expects(self, inputs: Callable[[], Any]) -> bool:
        """Return True if inputs differ from the first ones in the number of samples and in numbers only."""
        return _forms(inputs()) == _forms(self._inputs)

    def renew(self) -> None:
        """Forget the records, since settings, modes, hooks or requires_grad flags have changed."""
        self.records.clear()
        self._by_size.clear()

    def copied(self) -> "RecordedModel":
        """Return the layers of a copy of the model, for measurements.

        Raises:
            UserError: a part of the model cannot be copied.
        """
        model = copied(self.model)
        return RecordedModel(model, self.records.on(model), self._inputs)

    @cached_property
    def held(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Each layer's leaf modules by path and weights by name; the first layer has the unused ones."""
        (leaf_modules, weights), *held = [(each.leaf_modules, each.weights) for each in self._slices]
        around = {name: self._unused_module(name) for name in self._unused}
        modules = dict.fromkeys(path for path in around.values() if path)
        alone = [name for name, path in around.items() if not path]
        return [((*leaf_modules, *modules), (*weights, *alone)), *held]

    def _unused_module(self, name: str) -> str:
        """Return the path of the largest module around an unused tensor in which nothing is used.

        It is "" if something in the tensor's own module is. Other inputs, or an evaluation, may call it.
        """
        found, path = "", name.rpartition(".")[0]
        while path and path not in self._places_used:
            found, path = path, path.rpartition(".")[0]
        return found

    @cached_property
    def _places_used(self) -> set[str]:
        """Paths of leaf modules and names of weights that the forward uses, and of modules around them."""
        used = {*(path for each in self._slices for path in each.leaf_modules), *self._used}
        return {each[:end] for each in used for end in _ends(each)}

    @cached_property
    def _slices(self) -> list[Slice]:
        """Each layer's slice of the record."""
        lookup = ModelLookup(self.model)
        return [Slice(self.record, layer.start, layer.stop, lookup) for layer in self.record.layers]

    @cached_property
    def _unused(self) -> tuple[str, ...]:
        """First names of the parameters and buffers that the forward does not use."""
        return tuple(name for name in dict.fromkeys(self.first_names.values()) if name not in self._used)

    @cached_property
    def _used(self) -> set[str]:
        """First names of the others."""
        lookup = ModelLookup(self.model)
        leaf_modules = {path for each in self._slices for path in each.leaf_modules}
        names = {joined(path, name) for path in leaf_modules for name in _names(lookup.module(path))}
        names |= {name for each in self._slices for name in each.weights}
        return {self.first_names[name] for name in names}

    @cached_property
    def names_held(self) -> list[set[str]]:
        """First name of each tensor that each layer holds."""
        return [{self.first_names[name] for name in _names(_tree(self.model, *held))} for held in self.held]

    @cached_property
    def keys(self) -> dict[str, list[str]]:
        """Keys in the model's `state_dict()` of each of its tensors, by its first name."""
        keys: dict[str, list[str]] = {}
        for key in self.model.state_dict(keep_vars=True):
            keys.setdefault(self.first_names[key], []).append(key)
        return keys


class RecordedStage(StageModule):
    """Some layers of a recorded model.

    Each layer's module is a tree of plain modules, with its leaf modules and weights at their paths.
    """

    def __init__(self, recorded: RecordedModel, start: int, stop: int) -> None:
        self._recorded, names = recorded, recorded.names
        self._begin = None if start == 0 else names[start]
        self._end = None if stop == len(names) else names[stop]
        trees = [_tree(recorded.model, *held) for held in recorded.held[start:stop]]
        super().__init__(trees, start, names[start:stop], precision=recorded.precision)
        self._before = set().union(*recorded.names_held[:start])
        outside = self._before.union(*recorded.names_held[stop:])
        buffers = self.module.named_buffers()
        self.shared_buffers = [path for path, _ in buffers if self._first_name(path) in outside]

    def renew(self) -> None:
        """Forget the slices of records, and adopt the model's present buffers; call it between two runs."""
        self._slices: dict[int, Slice] = {}  # by the digest of the record, which is the form
        for layer in self.module:
            _adopt_buffers(self._recorded.model, layer)
        self._lookup = _StageLookup(self._recorded.model, self.module)

    def needs_inputs(self, training: bool) -> bool:
        """Return True if `run` uses the model's inputs."""
        if self.shapes_vary or self._begin is None:
            return True
        return bool(self._slice(self._recorded.typical(training)).needs)

    @property
    def draws_from_python(self) -> bool:
        """True: a leaf module may draw from Python's or NumPy's generators."""
        return True

    @property
    def loss_key(self) -> int:
        """The loss's place in random keys, which no event has."""
        return -1

    def form(self, num_samples: int, inputs: Callable[[], Any], training: bool) -> int:
        """Return the form of a microbatch: the digest of its record, whose guards have run."""
        if self.needs_inputs(training):
            record = self._recorded.records.find(inputs(), training)
        else:
            record = self._recorded.of_size(num_samples, training)
        self._slice(record)
        return record.digest

    def run(self, received: Any, inputs: Any, seed: Seed, training: bool, form: int = 0) -> Any:
        """Run the layers on one microbatch, as `StageModule.run` does."""
        taken = () if received is None else tensors_of(received)
        leaves = None if inputs is None else pytree.tree_leaves(call_arguments(inputs))

        def seed_event(event: Event) -> None:
            seed(event.key, event.draws_python)

        try:
            return self._slices[form].run(taken, leaves, seed_event)
        except Diverged as error:  # guards that inputs decide over hold, as `form` has seen
            raise random_path(str(error)) from None

    def signature(self) -> str:
        """Return a text that is equal for layers that take as long, if they receive equal values."""
        return self._slice(self._recorded.typical(training=True)).signature()

    def key(self, path: str) -> str:
        """Return the key in the whole model of the tensor at a path."""
        return path.partition(".")[2]

    def numbered(self, path: str) -> str:
        """Return the path in the whole model."""
        return self.key(path)

    def described(self, path: str) -> str:
        """Return a description of a path for messages: "blocks.0.norm (LayerNorm), weight"."""
        module, _, name = self.key(path).rpartition(".")
        kind = type(self._recorded.model.get_submodule(module)).__name__
        return f"{module or 'the model'} ({kind}), {name}"

    def foreign(self, parameter: Tensor) -> str:
        """Return a description of a parameter that another stage holds."""
        named = self._recorded.model.named_parameters()
        return next((name for name, each in named if each is parameter), super().foreign(parameter))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the stage's `state_dict()`, not detached, by each of their keys."""
        held, keys = self.module.state_dict(keep_vars=True), self._recorded.keys
        return {key: tensor for path, tensor in held.items() for key in keys[self._first_name(path)]}

    def weights(self, weights: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return a version's leaves by the keys of the parameters that they replace."""
        wanted = {key for parameter, key in self.parameters().items() if parameter.requires_grad}
        first, named = self._recorded.first_names, [item for leaves in weights for item in leaves.items()]
        return {first[name]: leaf for name, leaf in named if first[name] in wanted}

    def parameters(self) -> dict[Tensor, str]:
        """Return the key of each parameter; a tied one has its first key in the model."""
        return {p: self._first_name(path) for path, p in self.module.named_parameters()}

    def owned_parameters(self) -> dict[Tensor, str]:
        """Return `parameters` without those that an earlier stage owns."""
        return {p: key for p, key in self.parameters().items() if key not in self._before}

    def _first_name(self, path: str) -> str:
        return self._recorded.first_names[self.key(path)]

    def _slice(self, record: Record) -> Slice:
        if record.digest not in self._slices:
            if record.writes and not self.alternates:
                raise writes_weight(record.writes)
            start = 0 if self._begin is None else record.cut(self._begin)
            stop = len(record.events) if self._end is None else record.cut(self._end)
            self._slices[record.digest] = Slice(
                record, start, stop, self._lookup, guards=False, device=self.device
            )
            if len(self._slices) > MOST_SHAPES:
                del self._slices[next(iter(self._slices))]  # the oldest
        return self._slices[record.digest]


class _StageLookup:
    """Finds leaf modules and weights among a stage's layers."""

    def __init__(self, model: nn.Module, layers: nn.Sequential) -> None:
        self._model, self._layers = model, layers
        self._owners: dict[str, tuple[nn.Module, str]] = {}

    def module(self, path: str) -> nn.Module:
        """Return a module."""
        for layer in self._layers:
            if (found := _at(layer, path)) is not None:
                return found
        whole = self._model.get_submodule(path)
        if next(iter(_named(whole)), None) is None:  # nothing to train: any stage may run it
            return whole
        raise self._missing(path)

    def weight(self, name: str) -> Tensor:
        """Return a parameter or buffer as it is now."""
        module, attribute = self._owner(name)
        held: Tensor = getattr(module, attribute)
        return held

    def assign(self, name: str, tensor: Tensor) -> None:
        """Replace a buffer, in the model as well, unless other values stand in its place for a while."""
        path, _, attribute = name.rpartition(".")
        of_model = self._model.get_submodule(path)._buffers
        for layer in self._layers:
            module = _at(layer, path)
            if module is None or attribute not in module._buffers:
                continue
            if module._buffers[attribute] is of_model[attribute]:
                of_model[attribute] = tensor
            module._buffers[attribute] = tensor

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        if name not in self._owners:
            path, _, attribute = name.rpartition(".")
            modules = (_at(layer, path) for layer in self._layers)
            owner = next((m for m in modules if m is not None and hasattr(m, attribute)), None)
            if owner is None:
                raise self._missing(name)
            self._owners[name] = owner, attribute
        return self._owners[name]

    def _missing(self, name: str) -> Unsplittable:
        return Unsplittable(
            f"this forward uses {name}, which the first training step did not use, so that the first stage "
            "holds it and this one does not: begin with inputs and settings that use it, or use plan='dp'"
        )


def _resized(tensor: Tensor, num_samples: int) -> Tensor:
    """Return a tensor with another number of samples, each like the first."""
    if len(tensor) == num_samples:
        return tensor
    return tensor[:1].expand(num_samples, *tensor.shape[1:]).clone()


def _tree(model: nn.Module, leaf_modules: Collection[str], weights: Iterable[str]) -> nn.Module:
    """Return plain modules with some leaf modules and weights of a model at their paths."""
    if "" in leaf_modules:  # a model without children is its only leaf module
        return model
    root = nn.Module()
    for path in sorted(leaf_modules, key=lambda path: path.count(".")):
        if _at(root, path) is None:
            parent, _, name = path.rpartition(".")
            _made(root, parent).add_module(name, model.get_submodule(path))
    for weight in weights:
        path, _, name = weight.rpartition(".")
        owner, held = model.get_submodule(path), _made(root, path)
        if name in owner._parameters:
            held._parameters[name] = owner._parameters[name]
        elif held is not owner:
            held.register_buffer(name, owner._buffers[name], name not in owner._non_persistent_buffers_set)
    return root


def _forms(inputs: Any) -> list[tuple[Any, ...]]:
    return [(tensor.shape[1:], tensor.dtype) for tensor in tensors_in(inputs)]


def _adopt_buffers(model: nn.Module, tree: nn.Module) -> None:
    """Put the model's present buffers into a tree of plain modules: users may have replaced some."""
    for path, held in tree.named_modules():
        owner = model.get_submodule(path)
        if held is not owner:
            held._buffers.update({name: owner._buffers[name] for name in held._buffers})


def _ends(path: str) -> Iterator[int]:
    """Yield where each part of a path ends."""
    yield from (i for i, character in enumerate(path) if character == ".")
    yield len(path)


def _made(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a path; make plain ones where there are none."""
    module = root
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module._modules[name]  # type: ignore[assignment]  # none is None
    return module


def _at(root: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = root
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module


def _names(module: nn.Module) -> Iterable[str]:
    return (name for name, _ in _named(module))


def _named(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield every name of every parameter and buffer."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor by each of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _named(module)}
