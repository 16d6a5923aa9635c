"""Record: a forward as a list of events and values, and the places where it may be cut.

Knows no module and no parameter but by name, so that it runs on a copy of the model and on another rank.
Invariant: what crosses a cut is alive there and not free; of values that share memory only the base crosses.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hybridpipe.model.recording.events import (
    Ambient,
    Event,
    Unsplittable,
    Value,
    ValueInfo,
    Weight,
    content,
    digest,
    identity,
)
from hybridpipe.model.recording.refusals import reads_data
from hybridpipe.torch_private import pytree

RANGE = ".."  # in the name of a layer of several leaf modules


class Crossing(NamedTuple):
    """Values that cross a cut.

    Attributes:
        values: to send, in the order of their making.
        views: indices of the events that make views of them again behind the cut.
    """

    values: tuple[Value, ...]
    views: frozenset[int]


@dataclass(frozen=True)
class RecordedLayer:
    """Events between two candidate cuts.

    Attributes:
        start: index of its first event.
        stop: index behind its last event.
        name: label of its only leaf module call, "first..last" of several; with "#2" for a second call.
        leaf_modules: paths of the leaf modules that it calls.
        weights: parameters and buffers that it uses, free glue left out.
    """

    start: int
    stop: int
    name: str
    leaf_modules: tuple[str, ...]
    weights: tuple[str, ...]


@dataclass(eq=False)
class Record:
    """Events of one forward: of one structure and shape of inputs, one mode, one path.

    Attributes:
        events: calls in the order of the user's forward.
        values: facts about each value, by its number.
        inputs: leaves of the call's `(args, kwargs)`: values and plain Python.
        outputs: leaves of the forward's result: values, weights, constants and plain Python.
        output_spec: tree of the result.
        assigned: buffers that glue replaces, and by what.
        parameters: names of the model's parameters.
        base: contexts around the whole forward; those of an event are entered where they differ.
        opened: reason, with the user's line, of each leaf module that the forward opens.
        overwritten: first line that writes to a parameter, of each one that gets a gradient.

    Raises:
        Unsplittable: a guard depends on data that only one stage has.
    """

    events: list[Event]
    values: list[ValueInfo]
    inputs: list[Any]
    outputs: list[Any]
    output_spec: pytree.TreeSpec
    assigned: list[tuple[Weight, Value]]
    parameters: frozenset[Weight]
    base: Ambient
    opened: Mapping[str, str] = field(default_factory=dict)
    overwritten: Mapping[Weight, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._number_storages()
        self._settle_free()
        self._crossings: dict[int, Crossing] = {}

    # --- facts ---

    @property
    def free_events(self) -> tuple[Event, ...]:
        """Events that every stage may compute."""
        return tuple(event for event in self.events if event.free)

    @property
    def output_values(self) -> set[Value]:
        """Values that the forward returns."""
        return {leaf for leaf in self.outputs if leaf.__class__ is Value}

    def is_free(self, value: Value) -> bool:
        """Return True for an input and for what follows from inputs alone."""
        maker = self.values[value].maker
        return maker < 0 or self.events[maker].free

    def storage(self, value: Value) -> int:
        """Return the number of a value's memory."""
        return self.values[value].storage

    def changed_storages(self, event: int) -> set[int]:
        """Return the numbers of the memory of values that an event writes to."""
        changes = self.events[event].changes
        return {self.storage(change) for change in changes if isinstance(change, Value)}

    def needs_gradient(self, value: Value, cut: int) -> bool:
        """Return True if a value requires a gradient when it crosses the cut."""
        begins = self.values[value].gradient_from
        return begins is not None and begins < cut

    def signature(self) -> list[Any]:
        """Return what two records of the same forward in one process have in common."""
        return [event.signature(identity) for event in self.events] + [self._ends(identity)]

    @cached_property
    def digest(self) -> int:
        """Hash of 63 bits, equal on ranks that hold the same model and take the same path."""
        values = [(tuple(info.shape), str(info.dtype), info.gradient_from) for info in self.values]
        return digest([*(event.signature(content) for event in self.events), self._ends(content), values])

    def _ends(self, describe: Any) -> tuple[Any, ...]:
        return (
            [*map(describe, self.outputs)],
            str(self.output_spec),
            self.assigned,
            [*map(describe, self.inputs)],
        )

    @property
    def writes(self) -> str:
        """The first write to a parameter that is trained, in words; "" if there is none."""
        for weight, line in self.overwritten.items() if self.base.grad else ():
            return f"{line}: writes to {weight}, whose numbers the microbatches before still need"
        return ""

    @cached_property
    def written_weights(self) -> dict[Weight, list[int]]:
        """Events that use a parameter or buffer to which one of them writes."""
        written = {change for event in self.events for change in event.changes if isinstance(change, Weight)}
        written |= {weight for weight, _ in self.assigned}
        users: dict[Weight, list[int]] = defaultdict(list)
        for i, event in enumerate(self.events):
            for weight in event.weights & written:
                users[weight].append(i)
        for weight, value in self.assigned:
            users[weight] = sorted({*users[weight], self.values[value].maker})
        return dict(users)

    @cached_property
    def shared_weights(self) -> dict[str, tuple[str, ...]]:
        """Names of the layers that use a parameter, of each parameter that several layers use."""
        users: dict[str, list[str]] = defaultdict(list)
        for layer in self.layers:
            for weight in layer.weights:
                users[weight].append(layer.name)
        shared = {weight: tuple(names) for weight, names in users.items() if len(names) > 1}
        return {weight: names for weight, names in shared.items() if weight in self.parameters}

    # --- what is free ---

    def _number_storages(self) -> None:
        """Replace memory's addresses by numbers."""
        numbers: dict[int, int] = {}
        for info in self.values:
            info.storage = numbers.setdefault(info.storage, len(numbers))

    def _settle_free(self) -> None:
        """Take freedom from glue whose results the stages' events write to, until nothing changes.

        Nor is glue free that reads a changing buffer, or that follows from glue which is not free.
        """
        while wrong := [event for event in self.events if event.free and self._not_free(event)]:
            for event in wrong:
                if event.checked:
                    raise reads_data(event.where, event.name)
                event.free = False
            self.__dict__.pop("_tainted", None)

    def _not_free(self, event: Event) -> bool:
        touched = [*event.made(), *(change for change in event.changes if isinstance(change, Value))]
        return (
            not event.weights.isdisjoint(self.written_weights)
            or not self._assigned_values.isdisjoint(event.made())  # one stage keeps the buffer
            or not all(map(self.is_free, event.uses))
            or any(self.storage(value) in self._tainted for value in touched)
        )

    @cached_property
    def _assigned_values(self) -> set[Value]:
        return {value for _, value in self.assigned}

    @cached_property
    def _tainted(self) -> set[int]:
        """Memory that stages write to, and that free events write to after a stage's event has used it."""
        used: set[int] = set()
        tainted: set[int] = set()
        for i, event in enumerate(self.events):
            if not event.free:
                used |= {*map(self.storage, event.uses)}
            stores = self.changed_storages(i)
            tainted |= stores & used if event.free else stores
        return tainted

    # --- cuts ---

    def rewritten(self, cut: int = 0) -> dict[int, str]:
        """Return the memory of values that events behind a cut write to, with the first such line."""
        lines: dict[int, str] = {}
        for i in range(cut, len(self.events)):
            for storage in self.changed_storages(i):
                lines.setdefault(storage, self.events[i].where)
        return lines

    def crossing(self, cut: int) -> Crossing:
        """Return what crosses between events `cut - 1` and `cut`."""
        if cut not in self._crossings:
            self._crossings[cut] = self._cross(cut)
        return self._crossings[cut]

    def _cross(self, cut: int) -> Crossing:
        live = {
            value
            for value, last in self._last_uses.items()
            if last >= cut > self.values[value].maker and not self.is_free(value)
        }
        views: set[int] = set()
        rewritten = self.rewritten(cut)
        for value in sorted(live, reverse=True):
            base, path = self._base(value, live)
            if path and not self.is_free(base) and (base in live or self.storage(base) in rewritten):
                live = live - {value} | {base}
                views |= set(path)
        return Crossing(tuple(sorted(live)), frozenset(views))

    def _base(self, value: Value, live: set[Value]) -> tuple[Value, list[int]]:
        """Return the value of which this one is a view, or one between which crosses, and the views."""
        base, path = value, []
        while (maker := self.values[base].maker) >= 0 and (view := self.events[maker].view) is not None:
            path.append(maker)
            base = view
            if base in live:
                break
        return base, path

    @cached_property
    def _last_uses(self) -> dict[Value, int]:
        uses = {value: i for i, event in enumerate(self.events) for value in event.uses}
        return uses | dict.fromkeys(self.output_values, len(self.events))

    def what_crosses(self, cut: int) -> list[ValueInfo]:
        """Return the values that cross a cut; none behind the last event."""
        return [self.values[value] for value in self.crossing(cut).values] if cut < len(self.events) else []

    @cached_property
    def forbidden(self) -> Mapping[int, str]:
        """Reason why a cut is not allowed, with the user's line, of each such place."""
        reasons = ((cut, self._reason(cut)) for cut in range(1, len(self.events)))
        return {cut: reason for cut, reason in reasons if reason is not None}

    def _reason(self, cut: int) -> str | None:
        shared = Counter(map(self.storage, self.crossing(cut).values))
        for storage, line in self.rewritten(cut).items():
            if shared[storage] > 1:
                what = "writes to memory that several tensors share which cross here"
                return f"{line}: {what} (write out of place)"
        for weight, users in self.written_weights.items():
            if users[0] < cut <= users[-1]:
                line = self.events[next(user for user in users if user >= cut)].where
                return f"{line}: {weight} is written to, and used on both sides"
        for first, last in self.derivatives:
            if first < cut <= last:
                return f"{self.events[last].where}: takes a derivative of what is computed on both sides"
        return self.writes or self._divides_region(cut)

    @cached_property
    def derivatives(self) -> list[tuple[int, int]]:
        """The first of the stages' events that use the inputs of a call of `autograd.grad`, and the call."""
        calls = [i for i, event in enumerate(self.events) if event.function is torch.autograd.grad]
        return [(self._first_user(self.events[last]), last) for last in calls]

    def _first_user(self, derivative: Event) -> int:
        (_, inputs, *_), _ = pytree.tree_unflatten(derivative.arguments, derivative.spec)
        followed = set(pytree.tree_leaves(inputs))
        for i, event in enumerate(self.events):
            if not followed.isdisjoint({*event.uses, *event.weights}):
                if not event.free:
                    return i
                followed |= {*event.made()}  # every stage computes it
        return len(self.events)

    def _divides_region(self, cut: int) -> str | None:
        """Return the reason if the cut divides a checkpoint that writes behind it to what was made before it.

        The part behind would write again when it is computed again.
        """
        region = self.events[cut].ambient.checkpointed
        if not region or self.events[cut - 1].ambient.checkpointed != region:
            return None
        for i in range(cut, len(self.events)):
            if self.events[i].ambient.checkpointed != region:
                return None
            if not self.changed_storages(i).isdisjoint(map(self.storage, self.crossing(cut).values)):
                return f"{self.events[i].where}: writes in place within a checkpoint, across the cut"
        return None

    @cached_property
    def random_guards(self) -> set[int]:
        """Indices of the guards that follow from random numbers, which each run draws again."""
        random: set[int] = set()
        for i, event in enumerate(self.events):
            if event.free and (event.draws or any(self.values[v].maker in random for v in event.uses)):
                random.add(i)
        return {i for i in random if self.events[i].checked}

    # --- layers ---

    @cached_property
    def layers(self) -> tuple[RecordedLayer, ...]:
        """Events between candidate cuts: the allowed place of fewest bytes between leaf modules' calls."""
        calls = [i for i, event in enumerate(self.events) if event.is_module]
        cuts = [self._best_cut(range(a + 1, b + 1)) for a, b in itertools.pairwise(calls)]
        bounds = [0, *(cut for cut in cuts if cut is not None), len(self.events)]
        return tuple(self._layer(start, stop) for start, stop in itertools.pairwise(bounds))

    def _best_cut(self, places: Sequence[int]) -> int | None:
        """Return the cheapest allowed place, the latest of equals."""
        allowed = [cut for cut in places if cut not in self.forbidden]

        def cost(cut: int) -> tuple[int, int]:
            return sum(value.bytes for value in self.what_crosses(cut)), -cut

        return min(allowed, key=cost, default=None)

    def _layer(self, start: int, stop: int) -> RecordedLayer:
        events = self.events[start:stop]
        calls = [event for event in events if event.is_module]
        names = [calls[0].label, calls[-1].label] if calls else ["forward"]
        weights = {weight for event in events if not event.free for weight in event.weights}
        return RecordedLayer(
            start=start,
            stop=stop,
            name=RANGE.join(dict.fromkeys(names)),
            leaf_modules=tuple(dict.fromkeys(event.name for event in calls)),
            weights=tuple(sorted(map(str, weights))),
        )

    def cut(self, name: str) -> int:
        """Return the index of the first event of the layer that begins with this name's first call.

        Raises:
            Unsplittable: no layer of this record begins there.
        """
        first = name.split(RANGE)[0]
        for layer in self.layers:
            if layer.name.split(RANGE)[0] == first:
                return layer.start
        raise Unsplittable(
            f"this forward has no cut before {first!r}, where the plan cuts that of the first training step: "
            "it takes another path; begin with inputs and settings that take it, or use plan='dp'"
        )
