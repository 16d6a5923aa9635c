"""Turns: typical seconds of samplers that take turns, so that a changing speed counts for all of them alike.

Knows a clock; not what is sampled. Invariant: ranks that measure at once agree on equal repetitions.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from hybridpipe.measure.stopwatch import Took
from hybridpipe.types import Agree

_Key = TypeVar("_Key", bound=Hashable)

# Warm-up lets allocators and oneDNN settle. A repetition has enough passes to span many time slices of the
# kernel, which last some milliseconds. The budget keeps big models from taking minutes.
WARM_UP = 2
REPETITION_SECONDS = 0.04
MIN_REPEATS, MAX_REPEATS = 3, 16
BUDGET_SECONDS = 4.0


def typical(samplers: Sequence[Callable[[], Mapping[_Key, Took]]], agree: Agree) -> list[dict[_Key, float]]:
    """Return the typical seconds of each figure, for each sampler.

    The samplers take turns, repetition by repetition. The speed of a machine may change within seconds, by a
    factor of 1.6 on one: otherwise one microbatch size would look cheaper than another.
    """
    lengths, counts = [], []
    for sample in samplers:
        for _ in range(WARM_UP):
            began = time.perf_counter()
            sample()
        slowest = agree(time.perf_counter() - began)
        lengths.append(math.ceil(REPETITION_SECONDS / slowest))
        affordable = int(BUDGET_SECONDS / (lengths[-1] * slowest))
        counts.append(min(MAX_REPEATS, max(MIN_REPEATS, affordable)))
    samples: list[list[Mapping[_Key, Took]]] = [[] for _ in samplers]
    turns = sorted(((n + 0.5) / count, i) for i, count in enumerate(counts) for n in range(count))
    for _, i in turns:  # each sampler's repetitions are spread evenly over the whole time
        samples[i] += [samplers[i]() for _ in range(lengths[i])]
    return [_middle(own, length) for own, length in zip(samples, lengths, strict=True)]


def _middle(samples: Sequence[Mapping[_Key, Took]], length: int) -> dict[_Key, float]:
    """Return typical seconds from repetitions of `length` samples each.

    Where ranks share cores, a layer sometimes waits for a processor. That wait may be longer than the layer,
    and a longer layer waits more often. So the proportions come from the medians of the layers' running
    times, and the sum comes from whole repetitions, waiting included.
    """
    medians = {key: statistics.median(each[key].running_seconds for each in samples) for key in samples[0]}
    totals = [sum(took.seconds for took in each.values()) for each in samples]
    repetitions = sorted(sum(totals[i : i + length]) / length for i in range(0, len(totals), length))
    quarter = len(repetitions) // 4
    middle = repetitions[quarter : len(repetitions) - quarter]
    factor = statistics.mean(middle) / (sum(medians.values()) or 1.0)
    return {key: value * factor for key, value in medians.items()}
