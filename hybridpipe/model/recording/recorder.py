"""Recorder: runs a user's forward once and writes down its events.

Knows the model while it records; the record that it gives back does not.
Invariant: a tensor in an event is a value, a weight or a constant, or the forward is refused with its line.
"""

import itertools
import pickle
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpipe import torch_private
from hybridpipe.model.attributes import PLAIN
from hybridpipe.model.recording import refusals
from hybridpipe.model.recording.births import Births
from hybridpipe.model.recording.carried import Carried
from hybridpipe.model.recording.compute import compute
from hybridpipe.model.recording.events import (
    PLAIN_OF_TORCH,
    Ambient,
    Constant,
    Event,
    Submodule,
    Unsplittable,
    Value,
    ValueInfo,
    Weight,
    fact,
    line_of_forward,
)
from hybridpipe.model.recording.record import Record
from hybridpipe.model.recording.under_way import recording_now
from hybridpipe.model.recording.watch import Watch, storage_of
from hybridpipe.model.rng import preserved_state, seed_generators
from hybridpipe.model.tensors import tensors_in
from hybridpipe.torch_private import FakeTensor, FakeTensorMode, pytree

UNRECORDED = ("_set_grad_enabled", "__repr__", "__format__", "__hash__")
READERS = ("tolist", "numpy", "__array__")  # which the dispatcher does not see
TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")  # a slice would run without them
SETS_MEMORY = ("set data", "set_")
CHANGERS = ("set requires_grad", "requires_grad_", *SETS_MEMORY)  # likewise
CPU = torch.device("cpu")
MOVERS = torch.device | Tensor  # arguments of `to` that may move a tensor


class Recorder(TorchFunctionMode):
    """Records one forward.

    Attributes:
        escapes: reason for each leaf module that must be opened, with the user's line.
        outputs: what the forward returned.
        born: of each tensor that is made, whether inside an event or as its result, and of inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        leaf_modules: Mapping[str, nn.Module],
        watch: Watch,
        fake: FakeTensorMode | None,
        earlier: Births,
    ) -> None:
        """Prepare a recording.

        Args:
            leaf_modules: modules to call whole, by path.
            watch: what operators do.
            fake: computes the shapes of all that is not free; None: everything is computed.
            earlier: `born` of the recordings before.
        """
        super().__init__()
        self.escapes: dict[str, str] = {}
        self.outputs: Any = None
        self._model, self._leaf_modules, self._watch, self._fake = model, leaf_modules, watch, fake
        self.born, self._earlier = Births(), earlier
        self._paths = {id(module): path for path, module in leaf_modules.items()}
        self._submodules = {id(module): Submodule(path) for path, module in model.named_modules()}
        self._parameters = {id(tensor): Weight(name) for name, tensor in model.named_parameters()}
        self._names = self._parameters | {id(tensor): Weight(name) for name, tensor in model.named_buffers()}
        self._buffers = {Weight(name) for name, _ in model.named_buffers()}
        self._own = {path: self._weights_of(module) for path, module in model.named_modules()}
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._stored: dict[int, set[Weight]] = defaultdict(set)  # several may share memory
        for tensor in tensors:
            self._stored[storage_of(tensor)].add(self._names[id(tensor)])
        self._events: list[Event] = []
        self._values: list[ValueInfo] = []
        self._known: dict[int, Value] = {}  # by id; `_sharing` keeps the tensors alive
        self._sharing: dict[int, list[Tensor]] = defaultdict(list)  # by storage
        self._inside: Event | None = None
        self._passed: set[int] = set()  # ids of what the present event is called with
        self._trained = {self._names[id(each)] for each in model.parameters() if each.requires_grad}
        self._overwritten: dict[Weight, str] = {}
        self._touched: set[Weight] = set()  # weights used inside the present event
        self._calls: Counter[str] = Counter()
        self._regions: list[Any] = []  # the hooks of each checkpoint region
        self.carried = Carried(model, leaf_modules.values())
        self._python_state, self._torch_state = _python_state(), torch.get_rng_state()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        """Run the forward on copies of its arguments.

        Raises:
            Unsplittable: no list of events does the same.
        """
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # it may write to them
        leaves, spec = pytree.tree_flatten((args, kwargs))
        base = Ambient.now()
        given = Event("the inputs", None, spec, base, "", 0)
        inputs = [self._new(leaf, -1, given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        buffers = {path: dict(module._buffers) for path, module in self._model.named_modules()}
        with self._intercepted(), recording_now(), self:
            self.outputs = self._model(*args, **kwargs)
        self._refuse_python_draws("the end of the forward")
        self.carried.end()
        for tensor, _ in self._watch.moved():
            what = f"set_ or swap_tensors of {self._names[id(tensor)]}"
            raise refusals.changes_weight("the end of the forward", what)
        leaves, spec = pytree.tree_flatten(self.outputs)
        self._refuse_hidden(leaves, "the model's output")
        return Record(
            events=self._events,
            values=self._values,
            inputs=inputs,
            outputs=[self._reference(leaf) for leaf in leaves],
            output_spec=spec,
            assigned=self._assigned(buffers),
            parameters=frozenset(self._parameters.values()),
            base=base,
            overwritten=self._overwritten,
        )

    def made(self, tensor: Tensor) -> bool:
        """Return True for a tensor that the forward has made, or a copy of an input."""
        return self.born.of(tensor) is not None

    # --- calls ---

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """See calls of leaf modules and of custom autograd functions, which a function mode does not see."""
        classes = {type(each): vars(type(each)).get("__call__") for each in self._leaf_modules.values()}
        apply = torch.autograd.Function.__dict__["apply"]

        def function_call(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = apply.__get__(None, cls)
            return self._whole(f"{cls.__name__}.apply", bound, bound, args, kwargs)

        for cls in classes:
            cls.__call__ = self._leaf_module_call(cls.__call__)  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(function_call)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            for cls, own in classes.items():
                if own is None:
                    del cls.__call__
                else:
                    cls.__call__ = own  # type: ignore[method-assign]

    def _leaf_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if path is None:
                return original(module, *args, **kwargs)
            return self._whole(path, None, lambda *a, **k: original(module, *a, **k), args, kwargs)

        return call

    def _whole(self, name: str, function: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call as one event, and see what is made inside."""
        if self._inside is not None:
            return original(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch_private.EnableTorchFunction():
                return original(*args, **kwargs)

        with torch_private.DisableTorchFunction():
            return self._event(name, function, call, args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a function between leaf modules; inside an event, note results and weights."""
        kwargs, name, inside = kwargs or {}, _name_of(func), self._inside
        if inside is None:
            return self._event(name, func, func, args, kwargs)
        if name in SETS_MEMORY and not self.born.is_of(args[0], inside):
            raise refusals.changes_weight(line_of_forward(), name)
        if name == "backward" and kwargs.get("inputs") is None:
            raise refusals.calls_backward(line_of_forward())
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self._names:
                self._touched.add(self._names[id(tensor)])
            else:
                self._look(inside, tensor)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            self.born.add(tensor, inside)
        return out

    def _look(self, inside: Event, tensor: Tensor) -> None:
        """Open the leaf modules between which a tensor goes without being passed."""
        if id(tensor) in self._passed or self.born.is_of(tensor, inside):
            return
        if birth := self.born.of(tensor):
            known, maker = id(tensor) in self._known, birth.event
            what = "it uses" if known else f"{inside.name} uses"
            self._open(
                inside if known else maker, f"{what} a tensor of {maker.name} that is not passed to it"
            )
        elif (
            birth := self._earlier.of(tensor)
        ) and inside.name not in birth.holders:  # else it keeps its own
            raise refusals.left_earlier(line_of_forward(), inside.name, birth.event.name)

    def _open(self, event: Event, reason: str) -> None:
        """Open a leaf module, or refuse a function."""
        line = line_of_forward()
        if event.name not in self._leaf_modules:
            raise Unsplittable(f"{line}: {event.name}: {reason}")
        self.escapes[event.name] = f"{line}: {reason}"

    # --- an event ---

    def _event(self, name: str, function: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in UNRECORDED:
            return call(*args, **kwargs)
        if name in TENSOR_HOOKS:
            raise Unsplittable(f"{line_of_forward()}: {name} outside leaf modules (call it inside a module)")
        if name == "backward":
            raise refusals.calls_backward(line_of_forward())
        leaves, spec = pytree.tree_flatten((args, kwargs))
        line = line_of_forward()
        self._refuse_python_draws(line)
        self.carried.look(line)
        event = Event(name, function, spec, self._ambient(), line, self._calls[name])
        event.arguments = [self._reference(leaf) for leaf in leaves]
        event.weights = set().union(*map(self._weights_in, event.arguments))
        if name in CHANGERS and event.arguments[0].__class__ is not Value:
            raise refusals.changes_weight(line, name)
        if event.is_module:
            event.weights |= self._own[name]
        event.free = self._may_be_free(event)
        out = self._run(event, call, args, kwargs)
        if name == "to" and out is leaves[0] and any(isinstance(each, MOVERS) for each in leaves[1:]):
            out = out.view_as(out)  # a value of its own, as it is a copy where the stage is on a GPU
        results = pytree.tree_leaves(out)
        self._learn(event, results)
        self._refuse_unseen(event, leaves)
        if not (tensors_in(results) or event.changes or event.checked):
            return out  # a shape or a type: a constant of this record
        if event.checked and not event.free and not event.is_module:
            raise refusals.reads_data(line, name)
        self._refuse_hidden(leaves, f"{line}: an argument of {name}", name if event.is_module else None)
        if not event.is_module:
            self._refuse_hidden(results, f"{line}: the result of {name}")
        self._write_down(event, results)
        return out

    def _run(self, event: Event, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call; it draws its own random numbers, and none that follow."""
        with preserved_state(CPU, python_too=True):
            seed_generators(event.key, CPU, python_too=True)
            seeded = _python_state()
            self._inside, self._touched = event, set()
            tensors = tensors_in((args, kwargs))
            self._passed = set(map(id, tensors))
            self.born.pass_to(tensors, event)
            self._watch.reset()
            try:
                return compute(event, call, args, kwargs, self._fake, self._watch)
            finally:
                event.draws_python = _python_state() != seeded
                self._inside = None
                self.carried.pass_over()

    def _learn(self, event: Event, results: list[Any]) -> None:
        """Note what the call did."""
        watch = self._watch
        event.changes |= {self._known[id(t)] for s in watch.written for t in self._sharing.get(s, ())}
        event.changes |= set().union(*(self._stored.get(s, ()) for s in watch.written))
        if event.name in CHANGERS:
            event.changes.add(event.arguments[0])
        event.weights |= {weight for weight in event.changes if weight.__class__ is Weight}
        for weight in set().union(*(self._stored.get(s, ()) for s in watch.overwritten)) & self._trained:
            self._overwritten.setdefault(weight, event.where)
        self._place_touched(event)
        event.draws = watch.draws
        event.free = self._may_be_free(event)
        numbers = any(isinstance(result, int | float) for result in results)
        event.checked = watch.reads or event.name in READERS or (event.is_module and numbers)

    def _place_touched(self, event: Event) -> None:
        """Open a leaf module, and refuse a function, that uses weights which are not its own."""
        for submodule in (argument for argument in event.arguments if argument.__class__ is Submodule):
            event.weights |= self._own[submodule]
        foreign = self._touched - event.weights
        if foreign and event.is_module:
            self.escapes[event.name] = f"{event.where}: it uses {min(foreign)}, which is not its own"
        elif foreign:
            hint = " (use_reentrant=False)" if event.name == "CheckpointFunction.apply" else ""
            raise Unsplittable(f"{event.where}: {event.name} uses {min(foreign)} out of sight{hint}")

    def _write_down(self, event: Event, results: list[Any]) -> None:
        index, old = len(self._events), self._known.keys() | self._names.keys()
        tensors = [r if isinstance(r, Tensor) and id(r) not in old else None for r in results]
        event.results = [None if tensor is None else self._new(tensor, index, event) for tensor in tensors]
        event.facts = list(map(fact, results))
        made = tensors_in(results)
        alone = len(set(event.uses)) == 1 and not (event.weights or event.changes)
        if alone and made and not event.is_module:
            base = event.uses[0]
            shared = {*map(self._watch.storage, made)} == {self._values[base].storage}
            event.view = base if shared else None
        for changed in (value for value in event.changes if value.__class__ is Value):
            for tensor in self._sharing[self._values[int(changed)].storage]:
                info = self._values[self._known[id(tensor)]]
                if tensor.requires_grad and info.gradient_from is None:
                    info.gradient_from = index  # it begins to with this write
        self._calls[event.name] += 1
        self._events.append(event)

    def _may_be_free(self, event: Event) -> bool:
        makers = (self._values[value].maker for value in event.uses)
        return (
            not event.is_module
            and event.weights <= self._buffers
            and not event.changes & self._buffers
            and all(maker < 0 or self._events[maker].free for maker in makers)
        )

    def _weights_of(self, module: nn.Module) -> set[Weight]:
        own = itertools.chain(module.parameters(), module.buffers())
        return {self._names[id(tensor)] for tensor in own if id(tensor) in self._names}

    def _ambient(self) -> Ambient:
        hooks = torch_private.top_saved_tensors_hooks(True)
        if hooks is None:
            return Ambient.now()
        if "checkpoint" not in hooks[0].__qualname__:
            raise Unsplittable(f"{line_of_forward()}: saved_tensors_hooks outside leaf modules")
        if hooks[0] not in self._regions:
            self._regions.append(hooks[0])
        return Ambient.now(1 + self._regions.index(hooks[0]))

    # --- leaves ---

    def _new(self, tensor: Tensor, maker: int, event: Event) -> Value:
        value = self._known[id(tensor)] = Value(len(self._values))
        begins, storage = maker if tensor.requires_grad else None, self._watch.storage(tensor)
        self._values.append(ValueInfo(tensor.shape, tensor.dtype, storage, maker, begins))
        self._sharing[storage].append(tensor)
        self.born.add(tensor, event)
        return value

    def _weights_in(self, argument: Any) -> set[Weight]:
        """Return the weights that an argument is, or a view of."""
        if argument.__class__ is Constant:
            return self._stored.get(self._watch.storage(argument.tensor), set())
        return {argument} if argument.__class__ is Weight else set()

    def _reference(self, leaf: Any) -> Any:
        """Return an argument as an event holds it."""
        if isinstance(leaf, nn.Module):
            if id(leaf) not in self._submodules:
                raise Unsplittable(
                    f"{line_of_forward()}: a {type(leaf).__name__} that is no part of the model"
                )
            return self._submodules[id(leaf)]
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._known:
            return self._flowing(leaf)
        if id(leaf) in self._names:
            return self._names[id(leaf)]
        return self._found(leaf)

    def _flowing(self, tensor: Tensor) -> Value:
        value = self._known[id(tensor)]
        if tensor.requires_grad != (self._values[value].gradient_from is not None):
            raise Unsplittable(
                f"{line_of_forward()}: a tensor got its gradient out of sight, such as from the `apply` of a "
                "custom autograd function that was bound before"
            )
        return value

    def _found(self, tensor: Tensor) -> Constant:
        if torch_private.is_wrapped_by_transform(tensor):
            what = "vmap or grad outside leaf modules"
            raise Unsplittable(f"{line_of_forward()}: {what} (call it inside a module)")
        birth = self.born.of(tensor)
        if birth is not None and birth.event.name in self._leaf_modules:
            self._open(birth.event, "a tensor made inside is used without being returned")
        elif (
            birth is not None
            or isinstance(tensor, FakeTensor)
            or tensor.grad_fn is not None
            or tensor.is_meta
        ):
            raise Unsplittable(
                f"{line_of_forward()}: a tensor that was made out of sight (by TorchScript, an extension, or "
                "an earlier call)"
            )
        viewed = self._stored.get(self._watch.storage(tensor), set()) - self._buffers
        if viewed:
            what = f"a view of {min(viewed)} that was made before the forward"
            raise Unsplittable(f"{line_of_forward()}: {what} (make it in the forward)")
        return Constant(tensor)

    def _refuse_unseen(self, event: Event, leaves: list[Any]) -> None:
        """Refuse glue whose effect a later run on another rank would not see."""
        if event.is_module:
            return
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise Unsplittable(
                f"{event.where}: {event.name} draws from a generator of the user's (leave it out: random "
                "numbers are keyed)"
            )
        constants = (leaf.tensor for leaf in event.arguments if isinstance(leaf, Constant))
        if any(self._watch.storage(tensor) in self._watch.written for tensor in constants):
            raise Unsplittable(
                f"{event.where}: {event.name} writes to a tensor that is no buffer (register it as one)"
            )

    def _refuse_hidden(self, leaves: list[Any], what: str, module: str | None = None) -> None:
        """Refuse tensors in objects that are no pytrees; a leaf module that takes some is opened."""
        for leaf in filter(_hides, leaves):
            if module is None:
                raise refusals.hides_tensors(what, type(leaf).__name__)
            self.escapes[module] = f"{line_of_forward()}: it takes tensors in a {type(leaf).__name__}"

    def _refuse_python_draws(self, line: str) -> None:
        if not torch.equal(torch.get_rng_state(), self._torch_state):
            raise Unsplittable(
                f"{line}: before it the forward seeds torch's random numbers (leave it out: they are keyed)"
            )
        if _python_state() != self._python_state:
            raise Unsplittable(
                f"{line}: before it the forward draws Python's or NumPy's random numbers outside its leaf "
                "modules (use torch's, such as torch.rand or F.dropout)"
            )

    def _assigned(self, before: Mapping[str, Mapping[str, Tensor | None]]) -> list[tuple[Weight, Value]]:
        """Buffers that glue has replaced, such as `self.mean = ...`."""
        assigned = []
        for path, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer is before[path].get(name):
                    continue
                weight, birth = Weight(f"{path}.{name}".lstrip(".")), self.born.of(buffer)
                maker = "" if birth is None else birth.event.name
                if id(buffer) in self._known:
                    assigned.append((weight, self._known[id(buffer)]))
                elif birth is None or maker not in self._leaf_modules:
                    raise Unsplittable(f"the forward sets {weight} to a tensor that it does not compute")
                elif not f"{path}.".startswith(f"{maker}."):  # else the leaf module does so in every run
                    self.escapes[maker] = f"a tensor made inside becomes {weight}"
        return assigned


def _name_of(function: Any) -> str:
    """Return a function's name; of a property's getter or setter, the property's."""
    name: str = function.__name__
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        name = owner.__name__ if name == "__get__" else f"set {owner.__name__}"
    return name


def _hides(leaf: Any, depth: int = 4) -> bool:
    """Return True for an object, no pytree, with tensors inside."""
    if isinstance(leaf, (*PLAIN, *PLAIN_OF_TORCH, torch.Generator, Tensor, nn.Module)) or depth == 0:
        return False
    inside = pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
    return any(isinstance(each, Tensor) or _hides(each, depth - 1) for each in inside if each is not leaf)


def _python_state() -> tuple[Any, bytes]:
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))
