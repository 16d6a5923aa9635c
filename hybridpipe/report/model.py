"""Report on a model: what was made of it, as text. Takes data, returns text."""

from collections.abc import Iterator, Sequence

from hybridpipe.model.explanation import RECORDED, WHOLE, ForbiddenCut, LayerFacts, ModelExplanation
from hybridpipe.planning.profile import SharedParameter
from hybridpipe.planning.quantities import size
from hybridpipe.report.table import table
from hybridpipe.report.words import few


def model_text(found: ModelExplanation) -> str:
    """Describe what was made of a model: its layers, what crosses behind them, and why."""
    return "\n".join([*_headline(found), "", _layers(found), *_particulars(found)])


def _headline(found: ModelExplanation) -> Iterator[str]:
    count = len(found.layers)
    kind = "" if found.kind == WHOLE else f"{found.kind}: "
    yield f"{kind}{count} layers, so up to {count} stages" if count > 1 else f"{kind}one layer, so one stage"
    if found.reason:
        yield f"why: {found.reason}"


def _layers(found: ModelExplanation) -> str:
    rows = [
        {
            "layer": i,
            "name": layer.name,
            "parameters": f"{layer.parameters:,}" if layer.parameters else "-",
            **({"crosses behind": _crossing(layer, found.layers[-1])} if len(found.layers) > 1 else {}),
            **(_recorded(layer) if found.kind == RECORDED else {}),
        }
        for i, layer in enumerate(found.layers)
    ]
    return table(rows)


def _crossing(layer: LayerFacts, last: LayerFacts) -> str:
    if layer is last or layer.crossing_bytes is None:
        return "-"
    return f"{size(layer.crossing_bytes)}, {layer.crossing_tensors} tensor(s)"


def _recorded(layer: LayerFacts) -> dict[str, str]:
    return {
        "free calls": str(layer.free_calls or "-"),
        "needs inputs": few(layer.inputs, ", ") or "-",
    }


def _particulars(found: ModelExplanation) -> Iterator[str]:
    if found.kind != RECORDED:
        if len(found.layers) > 1:
            yield "(crosses behind: `hybridpipe profile` measures it)"
    else:
        yield "(crosses behind: for the recorded microbatch; free calls: made by each stage that needs them)"
    joint = (each for each in found.layers if len(each.units) > 1)
    yield from _list("several modules", (f"{each.name}: {few(each.units, ', ')}" for each in joint))
    yield from _list("no cut", map(_forbidden, found.forbidden))
    yield from _list("opened", (f"{path}: {reason}" for path, reason in found.opened.items()))
    yield from _list("free, since it follows from the inputs alone", found.free, short=True)
    yield from _list("read from the inputs; if it changes, the forward is recorded anew", found.guards)
    yield from _list("draws random numbers", found.draws, short=True)
    yield from _list("shared", (_shared(each, found.layers) for each in found.shared))
    yield from _list("not used by the forward", found.unused, short=True)


def _list(title: str, items: Iterator[str] | Sequence[str], short: bool = False) -> Iterator[str]:
    """Yield the lines of one list, if it has items; a short one stands in one line."""
    found = list(items)
    if found and short:
        yield f"{title}: {few(found, ', ')}"
    elif found:
        yield f"{title}:"
        yield from (f"  {each}" for each in found)


def _forbidden(cut: ForbiddenCut) -> str:
    places = "" if cut.places == 1 else f" ({cut.places} places)"
    return f"between {cut.after} and {cut.before}{places}: {cut.reason}"


def _shared(each: SharedParameter, layers: Sequence[LayerFacts]) -> str:
    users = few([layers[i].name for i in each.layers], ", ")
    where = "" if each.separable else "; they stay in one stage"
    return f"{each.name} ({size(each.parameter_bytes)}) by {users}{where}"
