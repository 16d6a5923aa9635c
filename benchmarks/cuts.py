"""Cuts: where the peers' models are cut into stages, by our profile."""

import sys
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise

import programs
import torch

from hybridpipe.planning.profile import ModelProfile
from hybridpipe.stage.measure import measure

sys.path.insert(0, str(programs.FOLDER))
from common import TASKS


def balanced(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Where to cut layers that take so long, so that the longest stage is as short as can be."""

    def longest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))

    return min(combinations(range(1, len(seconds)), num_stages - 1), key=longest)


@cache
def cuts(model: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The best balanced, by our profile; the same in all rounds of a call."""
    layers = _profile(model, num_microbatches).layers
    seconds = [
        num_microbatches * (layer.forward_seconds + layer.backward_seconds) + layer.update_seconds
        for layer in layers
    ]
    return balanced(seconds, num_stages)


@cache
def _profile(model: str, num_microbatches: int) -> ModelProfile:
    """At that many microbatches a minibatch, in this process."""
    torch.set_num_threads(1)
    task = TASKS[model]
    inputs, targets = task.samples(task.minibatch // num_microbatches).tensors
    return measure(task.build(), inputs, targets, task.loss, task.optimizer)
