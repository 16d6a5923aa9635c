"""Experts, measured: how many tokens each of them gets, the bytes of these, and their part of a layer's time.

Knows modules that hold experts, and a stopwatch; no ranks. Invariant: the modules are as they were before.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.measure.stopwatch import Lap, Stopwatch
from hybridpipe.model.experts import Experts
from hybridpipe.model.recording import is_recording
from hybridpipe.planning.layer_parts import ExpertsProfile
from hybridpipe.stage.stage import Stage


class CountedExperts:
    """Takes the place of a module's `forward` while its calls are counted.

    Attributes:
        tokens: that each expert has got.
        token_bytes: of rows and weights of these tokens.
        laps: the time of each call.
    """

    def __init__(self, module: nn.Module, num_experts: int, watch: Stopwatch) -> None:
        self.module, self._forward, self._watch = module, module.forward, watch
        self.tokens = torch.zeros(num_experts, dtype=torch.int64)
        self.token_bytes, self.laps = 0, list[Lap]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and count what it is called with."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if is_recording() or len(given) != 3:
            return self._forward(*args, **kwargs)
        hidden, index, weights = given
        self.tokens += torch.bincount(index.reshape(-1), minlength=len(self.tokens)).cpu()
        row_bytes = hidden.shape[-1] * hidden.element_size() + weights.element_size()
        self.token_bytes += index.numel() * row_bytes
        began = self._watch.now()
        out = self._forward(*args, **kwargs)
        self.laps.append(self._watch.since(began))
        return out


@contextmanager
def counting(
    model: nn.Module, experts: Sequence[Experts], watch: Stopwatch
) -> Iterator[list[CountedExperts]]:
    """Count the calls of a model's experts inside this context."""
    modules = [(model.get_submodule(each.path), each.num_experts) for each in experts]
    counted = [CountedExperts(module, count, watch) for module, count in modules]
    own = [vars(each.module).get("forward") for each in counted]  # of a module that has been given one
    for each in counted:
        each.module.forward = each
    try:
        yield counted
    finally:
        for each, forward in zip(counted, own, strict=True):
            del each.module.forward
            if forward is not None:
                each.module.forward = forward


def profiles(
    stages: Sequence[Stage],
    counted: Sequence[CountedExperts],
    timed: Sequence[CountedExperts],
    forwards: Mapping[int, Lap],
    which: Sequence[int],
    watch: Stopwatch,
) -> dict[int, ExpertsProfile]:
    """Return the experts of each layer that has some.

    Args:
        counted: in a pass of all layers.
        timed: in a pass of those that are run.
        forwards: the time of each of these layers in that pass.
        which: for each layer the one that is run for it.
    """
    in_experts = watch.read({(n, i): lap for n, each in enumerate(timed) for i, lap in enumerate(each.laps)})
    in_layers = watch.read(forwards)
    found: dict[int, ExpertsProfile] = {}
    for i, stage in enumerate(stages):
        held = {id(module) for module in stage.module.modules()}
        mine = [each for each in counted if id(each.module) in held and each.laps]
        if not mine:
            continue
        run = {id(module) for module in stages[which[i]].module.modules()}
        seconds = sum(
            in_experts[n, lap].seconds
            for n, each in enumerate(timed)
            for lap in range(len(each.laps))
            if id(each.module) in run
        )
        trained = (p for each in mine for p in each.module.parameters() if p.requires_grad)
        found[i] = ExpertsProfile(
            parameter_bytes=sum(p.nbytes for p in trained),
            share=min(1.0, seconds / (in_layers[which[i]].seconds or 1.0)),
            token_bytes=sum(each.token_bytes for each in mine),
            tokens=tuple(tuple(each.tokens.tolist()) for each in mine),
        )
    return found
