"""Turns: which plans of a search are trained by turns, and what their times say. Pure.

What was measured is a list of plans a job, `auto`'s choice first: of each its name, what was predicted, and
the seconds of a minibatch in each turn. A machine whose speed drifts treats the plans of one turn about
alike, so ratios are taken within a turn, and then the median over the turns.
"""

import statistics
from collections.abc import Iterator, Sequence

from hybridpipe.planning.search.search import Candidate

Shape = tuple[str, str, int]  # where the layers are cut is left out: plans that differ in that only are alike
NEXT_BEST = 4
ALWAYS = ("dp", "straight")  # the best of each is trained, whatever its place among the candidates
TOO_SLOW = 2.0  # times `auto`'s choice, by prediction: what takes longer is not trained


def trained(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of all candidates, best first, those to train: the first is `auto`'s choice. Of each shape the best."""
    fast = [each for each in candidates if each.seconds <= TOO_SLOW * candidates[0].seconds]
    best: dict[Shape, Candidate] = {}
    for each in fast:
        best.setdefault(_shape(each), each)
    chosen = list(best)[: 1 + NEXT_BEST]
    for origin in ALWAYS:
        chosen += [_shape(each) for each in fast if each.origin == origin][:1]
    return [best[shape] for shape in dict.fromkeys(chosen)]


def _shape(candidate: Candidate) -> Shape:
    plan = candidate.plan
    return plan.name, plan.schedule, plan.num_microbatches


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
