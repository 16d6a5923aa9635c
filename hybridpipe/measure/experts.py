"""Experts, measured: the tokens that each of them gets, their part of a layer's time, and the time of fewer.

Knows modules that hold experts, and a stopwatch; no ranks. Invariant: the modules are as they were before.
"""

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.measure.stopwatch import Lap, Stopwatch
from hybridpipe.model.experts import Experts, hold_parts
from hybridpipe.model.recording import is_recording
from hybridpipe.planning.layer_parts import ExpertsProfile
from hybridpipe.stage.stage import Stage

WARM_UP, REPEATS = 1, 5  # of a part of experts


class CountedExperts:
    """Takes the place of a module's `forward` while its calls are counted.

    Attributes:
        tokens: that each expert has got.
        token_bytes: of rows and weights of these tokens.
        laps: the time of each call.
        given: tokens, indices and weights of the last call.
    """

    def __init__(self, module: nn.Module, described: Experts, watch: Stopwatch) -> None:
        self.module, self.described = module, described
        self._forward, self._watch = module.forward, watch
        self.given: tuple[Tensor, Tensor, Tensor] | None = None
        self.tokens = torch.zeros(described.num_experts, dtype=torch.int64)
        self.token_bytes, self.laps = 0, list[Lap]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and count what it is called with."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if is_recording() or len(given) != 3:
            return self._forward(*args, **kwargs)
        hidden, index, weights = given
        self.given = hidden.detach(), index, weights.detach()
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
    counted = [CountedExperts(model.get_submodule(each.path), each, watch) for each in experts]
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
    parts: dict[int, tuple[tuple[int, float], ...]] = {}  # of each layer that is run
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
        if which[i] not in parts:
            here = [each for each in timed if id(each.module) in run and each.laps]
            with stage.layers.precision.context(stage.device):
                parts[which[i]] = _of_parts(here, watch)
        trained = (p for each in mine for p in each.module.parameters() if p.requires_grad)
        found[i] = ExpertsProfile(
            parameter_bytes=sum(p.nbytes for p in trained),
            share=min(1.0, seconds / (in_layers[which[i]].seconds or 1.0)),
            token_bytes=sum(each.token_bytes for each in mine),
            tokens=tuple(tuple(each.tokens.tolist()) for each in mine),
            parts=parts[which[i]],
        )
    return found


def _of_parts(modules: Sequence[CountedExperts], watch: Stopwatch) -> tuple[tuple[int, float], ...]:
    """Return the numbers of replicas that all modules can be shared by, and the seconds of a part beside all.

    Every number of tokens is that of one replica, dealt to the experts of the part.
    """
    counts = [each.described.num_experts for each in modules]
    least = min(counts, default=0)
    tried = [m for m in (2**k for k in range(least.bit_length())) if not any(count % m for count in counts)]
    seconds = {m: sum(_seconds_of_part(each, m, watch) for each in modules) for m in tried}
    whole = seconds.get(1) or 1.0
    return tuple((m, taken / whole) for m, taken in seconds.items() if m > 1)


def _seconds_of_part(experts: CountedExperts, replicas: int, watch: Stopwatch) -> float:
    """Return the seconds of a forward and a backward of the first part of some experts."""
    assert experts.given is not None
    hidden, index, weights = experts.given
    part = nn.Module()
    part.add_module("experts", copy.deepcopy(experts.module))
    described = experts.described._replace(path="experts")
    hold_parts(part, [described], 0, replicas, None)
    laps: dict[int, Lap] = {}
    for repetition in range(WARM_UP + REPEATS):
        tokens, of_part = hidden.clone().requires_grad_(), index % (described.num_experts // replicas)
        began = watch.now()
        with torch.enable_grad():
            made = part.get_submodule("experts")(tokens, of_part, weights)
        made.backward(torch.ones_like(made))
        laps[repetition] = watch.since(began)
    took = watch.read(laps)
    return statistics.median(took[i].running_seconds for i in range(WARM_UP, WARM_UP + REPEATS))
