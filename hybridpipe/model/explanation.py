"""Explanation: what was made of a user's model, as data for people.

Knows records, no modules and no plans. Text is made of it in `hybridpipe.report.model`.
Invariant: it holds plain Python only, so that it can be written as JSON.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridpipe.model.recording import Event, Record, call_arguments
from hybridpipe.planning.profile import SharedParameter
from hybridpipe.torch_private import pytree

SEQUENTIAL, RECORDED, WHOLE = "nn.Sequential", "recorded", "one layer"
LONGEST_FACT = 40  # characters of what a guard has read


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer, and what a cut behind it costs for one microbatch.

    Args:
        name: the layer's name in the plan table.
        parameters: number of its parameters' elements; a shared parameter counts in each of its layers.
        units: paths of the leaf modules that it calls.
        crossing_bytes: bytes that a cut behind it sends forward; 0 behind the last layer; None: not known
            without a measurement.
        crossing_tensors: number of tensors that cross there; None: likewise.
        free_calls: number of calls that follow from the model's inputs alone; a stage of this layer makes
            them itself.
        inputs: names of the model's inputs that it uses.
    """

    name: str
    parameters: int
    units: tuple[str, ...] = ()
    crossing_bytes: int | None = None
    crossing_tensors: int | None = None
    free_calls: int = 0
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForbiddenCut:
    """Neighbouring places between modules where no cut is allowed, for one reason.

    Args:
        after: the module call before the first place.
        before: the module call behind the last place.
        places: number of places.
        reason: one line that begins with that of the user's forward.
    """

    after: str
    before: str
    places: int
    reason: str


@dataclass(frozen=True, slots=True)
class ModelExplanation:
    """Facts about what was made of a model.

    Args:
        kind: "nn.Sequential", "recorded" or "one layer".
        layers: what a plan cuts between.
        reason: why there is one layer, and so one stage; "" if there are several.
        forbidden: places without an allowed cut; the modules around them are in one layer.
        opened: why a module is not called whole, by its path; modules that only hold others are left out.
        free: calls that follow from the model's inputs alone, so that every stage may make them.
        guards: what the forward has read from its inputs; inputs that say otherwise are recorded again.
        draws: calls that draw random numbers.
        shared: parameters that several layers use, and buffers among them that must stay in one stage.
        unused: parameters that the forward does not use; the first stage holds them.
    """

    kind: str
    layers: tuple[LayerFacts, ...]
    reason: str = ""
    forbidden: tuple[ForbiddenCut, ...] = ()
    opened: Mapping[str, str] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    shared: tuple[SharedParameter, ...] = ()
    unused: tuple[str, ...] = ()


def forbidden_cuts(record: Record) -> tuple[ForbiddenCut, ...]:
    """Return the places between two neighbouring leaf module calls of a record where no cut is allowed."""

    def places() -> Iterator[tuple[Event, Event, str]]:
        calls = [i for i, event in enumerate(record.events) if event.is_module]
        for a, b in itertools.pairwise(calls):
            if all(cut in record.forbidden for cut in range(a + 1, b + 1)):
                yield record.events[a], record.events[b], record.forbidden[a + 1]

    found: list[ForbiddenCut] = []
    for first, second, reason in places():
        last = found[-1] if found else None
        if last is not None and (last.before, last.reason) == (first.label, reason):
            found[-1] = ForbiddenCut(last.after, second.label, last.places + 1, reason)
        else:
            found.append(ForbiddenCut(first.label, second.label, 1, reason))
    return tuple(found)


def facts_of(record: Record) -> dict[str, Any]:
    """Return the fields of a `ModelExplanation` that a record says by itself."""
    events = record.events
    return {
        "forbidden": forbidden_cuts(record),
        "opened": dict(record.opened),
        "free": _each(event for event in events if event.free),
        "guards": tuple(dict.fromkeys(_guard(e) for e in events if e.free and e.checked)),
        "draws": _each(event for event in events if event.draws or event.draws_python),
    }


def input_names(inputs: Any) -> list[str]:
    """Return a name for each leaf of a model's inputs: its keyword, or "input 0" by position."""
    return [_input_name(*path) for path, _ in pytree.tree_flatten_with_path(call_arguments(inputs))[0]]


def _input_name(_: Any, first: Any, *rest: Any) -> str:
    own = first.key if isinstance(first, pytree.MappingKey) else f"input {first.idx}"
    return f"{own}{pytree.keystr(rest)}"


def _each(events: Iterator[Event]) -> tuple[str, ...]:
    """Return each leaf module call's label, and each other call's name and line once."""
    return tuple(dict.fromkeys(e.label if e.is_module else f"{e.name} ({e.where})" for e in events))


def _guard(event: Event) -> str:
    read = event.facts[0] if len(event.facts) == 1 else event.facts
    text = repr(read)
    shown = text if len(text) <= LONGEST_FACT else text[: LONGEST_FACT - 3] + "..."
    return f"{event.where}: {event.name} gave {shown}"
