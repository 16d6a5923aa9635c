"""Rank time: where the time of a minibatch goes, predicted and measured, for people.

Takes data, returns text. Invariant: a minibatch's parts add up to it, and idle is the same in all of them.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from hybridpipe.planning.quantities import duration
from hybridpipe.planning.timeline import TimeParts
from hybridpipe.report.table import table

TRACED = {  # parts of a rank's minibatch: field -> heading
    "seconds": "minibatch",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "allreduce_seconds": "all-reduce",
    "message_seconds": "message",
    "copying_seconds": "copying",
    "loading_seconds": "loading",
    "idle_seconds": "idle",
    "other_seconds": "other",
}
MEASURED = {  # parts of a minibatch, as predicted: fields of TRACED
    "forward_seconds": ("forward_seconds",),
    "backward_seconds": ("backward_seconds",),
    "step_seconds": ("optimizer_seconds",),
    "traffic_seconds": ("message_seconds", "copying_seconds"),
    "allreduce_seconds": ("allreduce_seconds",),
    "idle_seconds": ("idle_seconds",),
    "other_seconds": ("loading_seconds", "other_seconds"),
}


def compared(predicted: TimeParts, ranks: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Predicted and measured seconds of each part of a minibatch, by their mean shares over the ranks.

    Args:
        ranks: each rank's minibatch by the fields of TRACED; other is what no prediction has.
    """
    whole = max(of_rank["seconds"] for of_rank in ranks.values())
    return {
        part: {
            "predicted": getattr(predicted, part, 0.0),
            "measured": whole * fmean(_share(of_rank, names) for of_rank in ranks.values()),
        }
        for part, names in MEASURED.items()
    }


def _share(of_rank: Mapping[str, float], names: Sequence[str]) -> float:
    return sum(of_rank[name] for name in names) / of_rank["seconds"]


def parts_table(parts: Mapping[str, Mapping[str, float]]) -> str:
    """Table of the result of `compared`."""
    rows = [
        {
            "part": name.removesuffix("_seconds"),
            "predicted": duration(seconds["predicted"]),
            "measured": duration(seconds["measured"]),
        }
        for name, seconds in parts.items()
    ]
    return table(rows)


def ranks_table(ranks: Mapping[int, Mapping[str, float]]) -> str:
    """Table of each rank's time: a whole minibatch, then its parts, which add up to it."""
    rows = [
        {"rank": rank}
        | {TRACED[name]: duration(seconds) if seconds else "-" for name, seconds in of_rank.items()}
        for rank, of_rank in ranks.items()
    ]
    return table(rows)
