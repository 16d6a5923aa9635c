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

from hybridpipe.health.out_of_memory import is_out_of_memory
from hybridpipe.measure.stopwatch import Lap, Stopwatch
from hybridpipe.model.experts import Experts, hold_parts
from hybridpipe.model.recording import is_recording
from hybridpipe.planning.layer_parts import ExpertsProfile
from hybridpipe.stage.stage import Stage

MOST_PARTS, REPEATS = 16, 5  # of experts that are run in part


class CountedExperts:
    """Takes the place of a module's `forward` while its calls are counted.

    Attributes:
        tokens: that each expert has got.
        token_bytes: of rows and weights of these tokens.
        laps: the time of each call.
        given: tokens, indices and weights of the last call, if they are kept.
    """

    def __init__(self, module: nn.Module, described: Experts, watch: Stopwatch, keeps: bool) -> None:
        self.module, self.described = module, described
        self._forward, self._watch = module.forward, watch
        self.given: tuple[Tensor, Tensor, Tensor] | None = None
        self._keeps = keeps
        self.tokens = torch.zeros(described.num_experts, dtype=torch.int64)
        self.token_bytes, self.laps = 0, list[Lap]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and count what it is called with."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if is_recording() or len(given) != 3:
            return self._forward(*args, **kwargs)
        hidden, index, weights = given
        if self._keeps and len(args) == len(given):
            self.given = hidden.detach(), index, weights.detach()
        self.tokens += torch.bincount(index.reshape(-1), minlength=len(self.tokens)).cpu()
        row_bytes = hidden.shape[-1] * hidden.element_size() + weights.element_size()
        self.token_bytes += index.numel() * row_bytes
        began = self._watch.now()
        out = self._forward(*args, **kwargs)
        self.laps.append(self._watch.since(began))
        return out

    def part(self, replicas: int) -> "_ExpertsAlone":
        """Return the first part of the experts; ValueError if their last call was not kept."""
        if self.given is None:
            raise ValueError("experts are called otherwise than with three tensors by position")
        tokens, index, weights = self.given
        alone = nn.Module()
        alone.add_module("experts", copy.deepcopy(self.module))
        hold_parts(alone, [self.described._replace(path="experts")], 0, replicas, None)
        here = index % (self.described.num_experts // replicas)
        return _ExpertsAlone(alone.get_submodule("experts"), (tokens, here, weights))


@contextmanager
def counting(
    model: nn.Module, experts: Sequence[Experts], watch: Stopwatch, keeps: bool = False
) -> Iterator[list[CountedExperts]]:
    """Count the calls of a model's experts inside this context.

    Args:
        keeps: keep what the last call was given.
    """
    counted = [CountedExperts(model.get_submodule(each.path), each, watch, keeps) for each in experts]
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
    """Return numbers of replicas that can share all modules, and the seconds of one's part beside all.

    As many tokens as one replica has are dealt to the experts of the part. Parts take turns, since a
    machine's speed changes. Modules that cannot be run in part by themselves have none.
    """
    counts = [each.described.num_experts for each in modules]
    doubled = (2**k for k in range(MOST_PARTS.bit_length()))
    tried = [m for m in doubled if counts and m <= min(counts) and not any(count % m for count in counts)]
    try:
        parts = {m: [each.part(m) for each in modules] for m in tried}
        turns = [
            {m: sum(each.seconds(watch) for each in parts[m]) for m in tried} for _ in range(1 + REPEATS)
        ]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return ()
    ratios = ((m, [turn[m] / turn[1] for turn in turns[1:] if turn[1]]) for m in tried if m > 1)
    return tuple((m, statistics.median(each)) for m, each in ratios if each)


class _ExpertsAlone:
    """A part of experts by itself, and what it is called with."""

    def __init__(self, module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> None:
        self._module, self._given = module, given

    def seconds(self, watch: Stopwatch) -> float:
        """Return the seconds of a forward and a backward."""
        hidden, index, weights = self._given
        tokens = hidden.clone().requires_grad_()
        began = watch.now()
        with torch.enable_grad():
            made = self._module(tokens, index, weights)
        made.backward(torch.ones_like(made))
        return watch.read({0: watch.since(began)})[0].running_seconds
