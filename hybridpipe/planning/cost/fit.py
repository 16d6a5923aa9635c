"""Fit: from timings to the figures of a `Cluster` and a `ModelProfile`.

Pure functions of numbers; the measurements (`hybridpipe.measure`) are not known here. Timings on shared
machines have outliers, always slow and sometimes many. Fits therefore use medians and least absolute
deviations instead of means and squares.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hybridpipe.planning.layer_parts import ExpertsProfile
from hybridpipe.planning.profile import JoinedProducts, LayerProfile, ModelProfile

# Deviations within the noise of timings; beyond them a link counts as shared, or a machine as different.
SHARING_TOLERANCE = 0.1
SPEED_TOLERANCE = 0.05
LEAST_SECONDS_PER_BYTE = 1e-15  # instead of 0, so that a bandwidth is finite

PRODUCT_TIMES = ("backward_seconds", "product_seconds", "microbatch_seconds")
LAYER_TIMES = ("forward_seconds", "backward_seconds", "update_seconds", "accumulate_seconds")


class Line(NamedTuple):
    """A line `seconds = start_seconds + num_bytes * seconds_per_byte`, and its largest relative deviation."""

    start_seconds: float
    seconds_per_byte: float
    error: float


def fit_line(
    timings: Sequence[tuple[int, float]], least_seconds_per_byte: float = LEAST_SECONDS_PER_BYTE
) -> Line:
    """Return the line through (num_bytes, seconds) with the least sum of absolute logarithms of ratios.

    Ratios make sizes from 64 bytes to megabytes count alike: small ones determine the start and large ones
    the slope, and twice as long is as wrong as half as long. Deviations are not squared, so a few wrong
    timings matter little. The candidates are the lines through two of the points, where least absolute
    deviations have their minimum, and, at the limits of start and slope, through one.

    Args:
        least_seconds_per_byte: a lower limit of the slope, known from elsewhere; the start is at least 0.

    Raises:
        ValueError: fewer than two different sizes, or a size or time that is not positive.
    """
    if len({num_bytes for num_bytes, _ in timings}) < 2:
        raise ValueError(f"timings must hold at least two different sizes, got {list(timings)}")
    for num_bytes, seconds in timings:
        if not (num_bytes > 0 and seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"timings must be of finite numbers > 0, got {(num_bytes, seconds)}")
    sizes, measured = (np.array(values, dtype=float) for values in zip(*timings, strict=True))
    slopes = [*(measured / sizes), least_seconds_per_byte]
    slopes += [
        (measured[j] - measured[i]) / (sizes[j] - sizes[i])
        for i, j in combinations(range(len(sizes)), 2)
        if sizes[i] != sizes[j]
    ]

    def distance(candidate: tuple[float, float]) -> float:
        start, slope = candidate
        return float(np.abs(np.log((start + slope * sizes) / measured)).sum())

    allowed = [slope for slope in slopes if slope >= least_seconds_per_byte]
    starts = {slope: np.maximum(measured - slope * sizes, 0.0) for slope in allowed}
    start, slope = min(((start, slope) for slope in allowed for start in starts[slope]), key=distance)
    error = np.abs((start + slope * sizes) / measured - 1).max()
    return Line(float(start), float(slope), float(error))


def shared_bandwidth(one: float, together: float, num_pairs: int) -> float | None:
    """Return the bandwidth of a link that pairs of ranks share; None if the pairs do not slow each other
    down.

    Args:
        one: bytes per second of one pair alone.
        together: bytes per second of all pairs together.
    """
    return None if together >= (1 - SHARING_TOLERANCE) * num_pairs * one else together


def burst_bytes(rested: Sequence[tuple[int, float]], message: Line) -> float | None:
    """Return the bytes that a rested link lets pass at once; None where no size took less than half its time.

    Args:
        rested: (num_bytes, seconds one way) by growing size, each sent after the link had rested.
        message: the line of a link in use.
    """
    passed = [n - max(0.0, s - message.start_seconds) / message.seconds_per_byte for n, s in rested]
    if all(at_once < 0.5 * n for at_once, (n, _) in zip(passed, rested, strict=True)):
        return None
    return passed[-1] if passed[-1] > 0 else None


def beyond(rested: Sequence[tuple[int, float]], at_once: int) -> list[tuple[int, float]]:
    """Return timings over rested links with only the bytes beyond those that pass at once.

    Of the sizes that pass whole the smallest stays, for the start.

    Args:
        rested: (num_bytes, seconds) by growing size.
    """
    limited = [(num_bytes - at_once, seconds) for num_bytes, seconds in rested if num_bytes > at_once]
    return limited if len(limited) == len(rested) else [rested[0], *limited]


def overlap(compute_seconds: float, allreduce_seconds: float, both_seconds: float) -> float:
    """Return the share of the shorter time that ran behind the longer one, in [0, 1]."""
    hidden = compute_seconds + allreduce_seconds - both_seconds
    return min(1.0, max(0.0, hidden / min(compute_seconds, allreduce_seconds)))


def unevenness(waited: Sequence[Sequence[float]], per_machine: int, processors: float) -> float:
    """Return the seconds that a machine's processors lose because its ranks finish computing at different
    times.

    A rank that is early leaves its share of the processors to the others, which finish sooner for it. Time is
    lost only while fewer ranks compute than there are processors.

    Args:
        waited: by rank, machine by machine, seconds of waiting for the last one in each round.
        processors: the number of ranks of a machine that compute as fast as one alone.

    Returns:
        seconds of all of a machine's processors: the mean over rounds, as the loss adds up over minibatches.
    """
    of_ranks = np.array(waited)
    together = min(per_machine, len(of_ranks))
    by_machine = np.sort(of_ranks.reshape(-1, together, of_ranks.shape[1]), axis=1)
    computing = np.arange(1, together)  # ranks that still compute, from the last one on
    idle = np.maximum(0.0, 1 - computing / min(processors, together))
    lost = np.einsum("mkr,k->mr", np.diff(by_machine, axis=1), idle)
    return float(lost.mean())


def compute_speeds(throughput: Mapping[int, float], num_cores: int) -> tuple[float, ...]:
    """Return the speed of each of n ranks of a machine that compute at once, relative to one alone.

    Args:
        throughput: by n, in any unit; holds 1. Between the measured n it lies on straight lines.
        num_cores: of the ranks together, which limits their total speed. Beyond it something else slowed the
            single rank (four ranks on two cores have seemed to do 2.4 times as much).

    Returns:
        entry n-1 for each n up to the largest, none above 1.
    """
    total = between({n: done / throughput[1] for n, done in throughput.items()})
    return tuple(min(1.0, num_cores / n, done / n) for n, done in enumerate(total, start=1))


def doubling(first: int, last: int) -> list[int]:
    """Return `first`, twice as many, and so on, and `last`; nothing if `first` is beyond it."""
    if first > last:
        return []
    return [*(first * 2**i for i in range(last.bit_length()) if first * 2**i < last), last]


def between(measured: Mapping[int, float]) -> tuple[float, ...]:
    """Return entry n-1 for each n from 1 to the largest measured: on straight lines, 0 below the smallest."""
    if not measured:
        return ()
    known = sorted(measured)
    lines = np.interp(range(1, known[-1] + 1), known, [measured[n] for n in known], left=0.0)
    return tuple(map(float, lines))


def relative_speeds(rates: Sequence[float]) -> tuple[float, ...] | None:
    """Return each machine's speed relative to the first; None if all are within SPEED_TOLERANCE."""
    speeds = tuple(rate / rates[0] for rate in rates)
    return speeds if any(abs(speed - 1) > SPEED_TOLERANCE for speed in speeds) else None


def _medians(measured: Sequence[LayerProfile | JoinedProducts], *names: str) -> dict[str, Any]:
    return {name: median(getattr(each, name) for each in measured) for name in names}


def _known_median(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return median(known) if known else None


def typical(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Return the median profile of several ranks that measured at once, layer by layer.

    All of them measured the same sizes of the microbatch, and numbers of shards.
    """

    def layer(*measured: LayerProfile) -> LayerProfile:
        medians = _medians(measured, *LAYER_TIMES)
        backward = medians["backward_seconds"]
        medians["accumulate_seconds"] = min(medians["accumulate_seconds"], backward)
        joined = [each.joined for each in measured if each.joined is not None]
        of_inputs = _known_median(each.input_seconds for each in measured)
        weight = _known_median(each.weight_seconds for each in measured)
        if weight is not None and of_inputs is None:
            weight = min(weight, backward)  # one rank's half may be longer than another's whole backward
        return replace(
            measured[0],
            joined=replace(joined[0], **_medians(joined, *PRODUCT_TIMES)) if joined else None,
            weight_seconds=weight,
            input_seconds=of_inputs,
            experts=_median_experts([each.experts for each in measured if each.experts is not None]),
            **medians,
        )

    layers = tuple(map(layer, *(profile.layers for profile in profiles)))
    others = tuple(
        replace(of_ranks[0], layers=tuple(map(layer, *(each.layers for each in of_ranks))))
        for of_ranks in zip(*(profile.others for profile in profiles), strict=True)
    )
    return replace(profiles[0], layers=layers, others=others, load=len(profiles))


def _median_experts(measured: Sequence[ExpertsProfile]) -> ExpertsProfile | None:
    """Return the experts of a layer with the medians of their times; None: there are none."""
    if not measured:
        return None
    known = [dict(each.parts) for each in measured]
    counts = [count for count in known[0] if all(count in each for each in known)]
    parts = tuple((count, median(each[count] for each in known)) for count in counts)
    return replace(measured[0], share=median(each.share for each in measured), parts=parts)
