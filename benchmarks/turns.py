"""Turns: which plans of a search are trained by turns, and what their times say. Pure.

What was measured is a list of plans a job, `auto`'s choice first: of each its name, what was predicted, and
the seconds of a minibatch in each turn. A machine whose speed drifts treats the plans of one turn about
alike, so ratios are taken within a turn, and then the median over the turns.
"""

import statistics
from collections.abc import Iterator, Sequence

from hybridpipe.planning.search import Candidate

NEXT_BEST = 4
ALWAYS = ("dp", "straight")  # wherever the prediction has them, up to:
TOO_SLOW = 2.0  # times `auto`'s choice


def trained(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of all candidates, best first, those to train: the first is `auto`'s choice. Of each shape the best."""
    shapes: dict[tuple[str, str, int], Candidate] = {}
    for each in candidates:
        plan = each.plan
        if each.seconds <= TOO_SLOW * candidates[0].seconds:
            shapes.setdefault((plan.name, plan.schedule, plan.num_microbatches), each)
    best = list(shapes.values())
    chosen = best[: 1 + NEXT_BEST]
    for origin in ALWAYS:
        first = next((each for each in best if each.origin == origin), None)
        if first is not None and first not in chosen:
            chosen.append(first)
    return chosen


def ratios(of_job: Sequence[dict]) -> list[list[float]]:
    """How many times as fast as `auto`'s choice each plan was, by turn."""
    chosen = of_job[0]["seconds"]
    return [[own / other for own, other in zip(chosen, each["seconds"], strict=True)] for each in of_job]


def rows(found: Sequence[Sequence[dict]]) -> Iterator[dict[str, str]]:
    """Of the table: for each job its plans, `auto`'s first."""
    for of_job in found:
        for i, (each, by_turn) in enumerate(zip(of_job, ratios(of_job), strict=True)):
            yield {
                "model": each["model"],
                "network": each["network"],
                "told": each["told"],
                "plan": each["plan"] + " (auto)" * (i == 0),
                "predicted, ms": f"{each['predicted'] * 1e3:.0f}",
                "measured, ms": f"{statistics.median(each['seconds']) * 1e3:.0f}",
                "× auto": f"{statistics.median(by_turn):.2f}",
                "by turn": ", ".join(f"{ratio:.2f}" for ratio in by_turn) if i else "",
            }


def verdict(of_job: Sequence[dict]) -> str:
    """How fast `auto`'s choice is beside the best of the job's plans."""
    medians = [statistics.median(by_turn) for by_turn in ratios(of_job)]
    best = max(range(len(of_job)), key=medians.__getitem__)
    where = ", ".join(of_job[0][name] for name in ("model", "network", "told"))
    plan = of_job[best]["plan"]
    return f"{where}: auto is {1 / medians[best]:.2f} times as fast as the best, {plan}"
