"""Slices: a part of a record's events, run with real tensors.

Knows a record, and asks a `Lookup` for modules, parameters and buffers by name.
Invariant: guards run before anything that has an effect, and no user Python runs outside leaf modules.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridpipe.model.recording.events import (
    Constant,
    Diverged,
    Event,
    Submodule,
    Unsplittable,
    Value,
    Weight,
    content,
    fact,
)
from hybridpipe.model.recording.record import Record
from hybridpipe.model.signature import module_signature, tensor_signature
from hybridpipe.torch_private import pytree

Key = Value | Weight
Seed = Callable[[Event], None]
Call = Callable[[list[Any]], Any]


class Lookup(Protocol):
    """Finds a model's parts by name."""

    def module(self, path: str) -> nn.Module:
        """Return a module; asked once."""

    def weight(self, name: str) -> Tensor:
        """Return a parameter or buffer as it is now; asked in every run."""

    def assign(self, name: str, tensor: Tensor) -> None:
        """Replace a buffer."""


class ModelLookup:
    """Finds the parts of one whole model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners: dict[str, tuple[nn.Module, str]] = {}

    def module(self, path: str) -> nn.Module:
        """Return a module."""
        return self._model.get_submodule(path)

    def weight(self, name: str) -> Tensor:
        """Return a parameter or buffer as it is now."""
        module, attribute = self._owner(name)
        tensor: Tensor = getattr(module, attribute)
        return tensor

    def assign(self, name: str, tensor: Tensor) -> None:
        """Replace a buffer."""
        module, attribute = self._owner(name)
        module._buffers[attribute] = tensor

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        if name not in self._owners:
            path, _, attribute = name.rpartition(".")
            self._owners[name] = self._model.get_submodule(path), attribute
        return self._owners[name]


class _Step(NamedTuple):
    """An event, made ready to run.

    Attributes:
        event: for its seed and its facts.
        seeds: the event draws random numbers.
        call: takes the list of leaves.
        leaves: of the arguments; places of values and weights are filled in from `reads`.
        reads: places among the leaves and what to put there.
        dead: values that nothing behind this step uses.
    """

    event: Event
    seeds: bool
    call: Call
    leaves: list[Any]
    reads: list[tuple[int, Key]]
    dead: list[Value]


class Slice:
    """Events `[start, stop)` of a record, with the free events, the guards and the views that they need.

    Attributes:
        takes: values received at its beginning; none for the first slice.
        gives: values that the next slice takes; none for the last, which returns the model's output.
        free: events that follow from the inputs alone, those among them that it runs.
        needs: indices of the leaves of the model's inputs that it uses, or the guards do.
        leaf_modules: paths of the modules that it calls, or passes to a call.
        weights: names of the parameters and buffers that it uses.
    """

    def __init__(
        self,
        record: Record,
        start: int,
        stop: int,
        lookup: Lookup,
        guards: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """Choose the events.

        Args:
            guards: check all guards in each run; False where those that follow from the inputs are known to
                hold (`Records.find`).
            device: takes the place of the device that a forward has asked a tensor for; None: no other does.
        """
        self._record, self._lookup, self._device = record, lookup, device
        self.last = stop == len(record.events)
        crossing = record.crossing(start)
        self.takes = crossing.values if start else ()
        differentiates = record.derivatives and not record.base.grad  # in an evaluation nothing has a graph
        self._roots = {v for v in self.takes if differentiates and record.needs_gradient(v, start)}
        self.gives = () if self.last else record.crossing(stop).values
        ends = record.output_values if self.last else set(self.gives)
        free = {i for i, event in enumerate(record.events) if event.free}
        own = {*range(start, stop)} - free | (crossing.views if start else set())
        checked = {i for i in free if record.events[i].checked}
        chosen = _chosen(record, own | checked, ends)
        used = {value for i in chosen for value in record.events[i].uses} | ends
        needs = {value for value in used if record.values[value].maker < 0} - set(self.takes)
        self.needs = tuple(i for i, leaf in enumerate(record.inputs) if _is_value(leaf) and leaf in needs)
        chosen = chosen if guards else _chosen(record, own | record.random_guards, ends)
        events = [record.events[i] for i in chosen]
        self.free = tuple(event for event in events if event.free)
        self._copied = {i for i in self.needs if record.storage(record.inputs[i]) in record.rewritten()}
        makers = set(chosen)
        self._assigned = [(w, v) for w, v in record.assigned if record.values[v].maker in makers]
        submodules = (leaf for event in events for leaf in event.arguments if leaf.__class__ is Submodule)
        leaf_modules = (event.name for event in events if event.is_module)
        self.leaf_modules = tuple(dict.fromkeys(map(str, itertools.chain(leaf_modules, submodules))))
        weights = {weight for event in events for weight in event.weights}
        returned = {leaf for leaf in record.outputs if self.last and leaf.__class__ is Weight}
        self.weights = tuple(sorted({*map(str, weights | returned), *(w for w, _ in self._assigned)}))
        self._read = {leaf for event in events for leaf in event.arguments if leaf.__class__ is Weight}
        steps = self._steps(events, ends | {value for _, value in self._assigned})
        self._segments = [
            (ambient, list(group))
            for ambient, group in itertools.groupby(steps, lambda step: step.event.ambient)
        ]

    @property
    def draws(self) -> bool:
        """True if an event draws random numbers."""
        return any(step.seeds for _, steps in self._segments for step in steps)

    @property
    def checkpointed(self) -> bool:
        """True if the user's forward checkpoints a part, so that leaf modules run again in the backward."""
        return any(ambient.checkpointed for ambient, _ in self._segments)

    def signature(self) -> str:
        """Return what decides over its time: no paths, and values and weights in the order of their use."""
        seen: dict[Any, int] = {}

        def described(leaf: Any) -> Any:
            if leaf.__class__ is Submodule:
                return module_signature(self._lookup.module(leaf))
            if leaf.__class__ is Weight:
                return seen.setdefault(leaf, len(seen)), tensor_signature(self._lookup.weight(leaf))
            if leaf.__class__ is not Value:
                return content(leaf)
            info = self._record.values[leaf]
            return seen.setdefault(leaf, len(seen)), info.shape, info.dtype, info.gradient_from is None

        parts: list[Any] = [self.last, [*map(described, self.takes)]]
        for event in (step.event for _, steps in self._segments for step in steps):
            what = module_signature(self._lookup.module(event.name)) if event.is_module else event.name
            ambient = event.ambient._replace(checkpointed=bool(event.ambient.checkpointed))
            parts.append((what, [*map(described, event.arguments)], str(event.spec), ambient))
        return repr([*parts, [*map(described, self.gives)]])

    def run(self, received: Sequence[Tensor], leaves: Sequence[Any] | None, seed: Seed) -> Any:
        """Run the events, in the caller's contexts and those that the user's forward enters.

        Args:
            received: tensors for `takes`, in its order; in-place events write to them.
            leaves: of the model's inputs, those at `needs`; others are not looked at.
            seed: called before each event that draws random numbers.

        Returns:
            The tensors for `gives`; of the last slice, the model's output.

        Raises:
            Diverged: a guard does not hold; nothing has had an effect yet.
            Unsplittable: a leaf module returns another shape or number than recorded.
        """
        values: dict[Key, Any] = {weight: self._lookup.weight(weight) for weight in self._read}
        values.update(zip(self.takes, received, strict=True))
        values.update((value, _with_graph(values[value])) for value in self._roots)
        for i in self.needs:
            assert leaves is not None, "this slice needs inputs of the model"
            values[self._record.inputs[i]] = leaves[i].clone() if i in self._copied else leaves[i]
        for ambient, steps in self._segments:
            with nullcontext() if ambient == self._record.base else ambient.entered(self._record.base):
                (_run_region if ambient.checkpointed else _run_steps)(steps, values, seed)
        for name, value in self._assigned:
            self._lookup.assign(name, values[value].detach())
        return self._output(values) if self.last else tuple(values[value] for value in self.gives)

    def _output(self, values: dict[Key, Any]) -> Any:
        def leaf(reference: Any) -> Any:
            if reference.__class__ is Value:
                return values[reference]
            if reference.__class__ is Weight:
                return self._lookup.weight(reference)
            return reference.tensor if isinstance(reference, Constant) else reference

        return pytree.tree_unflatten(map(leaf, self._record.outputs), self._record.output_spec)

    def _steps(self, events: Sequence[Event], ends: set[Value]) -> list[_Step]:
        steps, seen = [], set(ends)
        for event in reversed(events):
            dead = {*event.uses, *event.made()} - seen
            seen |= dead
            steps.append(self._step(event, sorted(dead)))
        return steps[::-1]

    def _step(self, event: Event, dead: list[Value]) -> _Step:
        function = event.function or self._lookup.module(event.name)
        leaves = [self._known(leaf) for leaf in event.arguments]
        reads = [(i, leaf) for i, leaf in enumerate(leaves) if leaf.__class__ in (Value, Weight)]
        seeds = event.draws or event.draws_python
        return _Step(event, seeds, _calling(function, event.spec), leaves, reads, dead)

    def _known(self, leaf: Any) -> Any:
        if leaf.__class__ is Submodule:
            return self._lookup.module(leaf)
        if isinstance(leaf, torch.device):
            return self._device or leaf
        return leaf.tensor if isinstance(leaf, Constant) else leaf


def _with_graph(tensor: Tensor) -> Tensor:
    """Return a tensor of the same numbers from which a graph begins, and which may be written to."""
    with torch.enable_grad():
        return tensor.detach().requires_grad_().clone()


def _is_value(leaf: Any) -> bool:
    return leaf.__class__ is Value


def _chosen(record: Record, wanted: set[int], ends: set[Value]) -> list[int]:
    """Return the events to run for those wanted: free ones first, since guards are among them."""
    free = {i for i, event in enumerate(record.events) if event.free}
    chosen = wanted
    while True:
        used = {value for i in chosen for value in record.events[i].uses} | ends
        stores = {record.storage(value) for value in used}
        makers = {record.values[value].maker for value in used} & free
        writers = {i for i in free if not stores.isdisjoint(record.changed_storages(i))}
        if makers | writers <= chosen:
            return sorted(chosen, key=lambda i: (i not in free, i))
        chosen = chosen | makers | writers


def _calling(function: Callable[..., Any], spec: pytree.TreeSpec) -> Call:
    """Return the call of a function with a list of the leaves of `(args, kwargs)`."""
    args, kwargs = spec.children()
    if not all(child.is_leaf() for child in (*args.children(), *kwargs.children())):

        def from_tree(leaves: list[Any]) -> Any:
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return function(*args, **kwargs)

        return from_tree
    count, names = args.num_leaves, tuple(kwargs.context or ())
    if not names:
        return lambda leaves: function(*leaves)
    return lambda leaves: function(*leaves[:count], **dict(zip(names, leaves[count:], strict=True)))


def _run_steps(steps: Sequence[_Step], values: dict[Key, Any], seed: Seed) -> None:
    for event, seeds, call, template, reads, dead in steps:
        leaves = template.copy()
        for i, key in reads:
            leaves[i] = values[key]
        if seeds:
            seed(event)
        out = call(leaves)
        results = (out,) if out.__class__ is Tensor else pytree.tree_leaves(out)
        if event.checked:
            _check(event, results)
        for value, tensor in zip(event.results, results, strict=True):
            if value is not None:
                values[value] = tensor
        for value in dead:
            del values[value]


def _check(event: Event, results: Sequence[Any]) -> None:
    facts = list(map(fact, results))
    if facts != event.facts and repr(facts) != repr(event.facts):  # NaN is no other NaN, but is written so
        error = Diverged if event.free else Unsplittable
        raise error(f"{event.where}: {event.name} gave {facts}, recorded was {event.facts}")


def _run_region(steps: Sequence[_Step], values: dict[Key, Any], seed: Seed) -> None:
    """Run steps as one checkpoint, computed again in the backward."""
    made = {value for step in steps for value in step.event.made()}
    dead = {value for step in steps for value in step.dead}
    used = list(dict.fromkeys(key for step in steps for _, key in step.reads if key not in made))
    kept = sorted(made - dead)

    def region(*given: Tensor) -> list[Tensor]:
        inner = dict(zip(used, given, strict=True))
        _run_steps(steps, inner, seed)
        return [inner[value] for value in kept]

    out = checkpoint(region, *(values[key] for key in used), use_reentrant=False)
    values.update(zip(kept, out, strict=True))
    for value in dead - made:
        del values[value]
