"""Trial: finds out whether an optimizer that has some of the parameters updates them as one that has all.

Knows torch optimizers and parameters; no stages and no messages. Invariant: parameters, gradients and random
states are as before, and what takes steps is another optimizer of the same factory.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_any

from hybridpipe.errors import told
from hybridpipe.model.rng import preserved_state, seed_generators
from hybridpipe.optim.combined import kind_of, members_of, step_hooks
from hybridpipe.optim.named import STANDS_FOR
from hybridpipe.optim.shares import part_of, take_over

# Those of torch that update an element from its own gradient and state. A subclass may do anything.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
# Those that update a parameter from its own gradient and state; older versions of torch lack some.
TENSORWISE = (
    *ELEMENTWISE,
    torch.optim.SparseAdam,
    *(vars(torch.optim)[name] for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)),
)
NUM_STEPS = 24
LARGEST, MOST = 2**18, 2**20  # elements of a parameter, and of all: those of this rank, and again of others
SMALL = 2**12  # elements of a parameter that has memory while optimizers are only made
TOLERANCE = 1e-3  # of an update, beside rounding; LAMB's differ by half
TRIED_RATE = 0.01  # where the given rate is 0, as before a scheduler's first step


class Round(NamedTuple):
    """Some steps of an optimizer.

    Args:
        scale: norm of the smallest weights and gradients.
        with_gaps: in each step a third of the parameters have no gradient.
        whole_until: the step before which an optimizer of whole parameters is cut into parts, with its state.
    """

    scale: float
    with_gaps: bool = False
    whole_until: int = 0


PLAIN = Round(1.0)
ROUNDS = PLAIN, Round(1e-6), Round(1e-3, whole_until=NUM_STEPS // 2), Round(1e3), Round(1.0, with_gaps=True)
NO_RANGES: Mapping[Tensor, range] = MappingProxyType({})
OVERLAPPING = "more than one element of the written-to tensor"  # torch's word for a write to expanded numbers
Options = dict[Tensor, dict[str, Any]]  # of parameters
Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer | None]


def why_not_apart(
    make: Make,
    everything: Sequence[Tensor],
    own: Sequence[Tensor],
    ranges: Mapping[Tensor, range] = NO_RANGES,
    sparse: Collection[Tensor] = (),
) -> str | None:
    """Return why an optimizer of some parameters, or of parts, does not do as one of all; None if it does.

    Torch's own optimizers pass by their class. All others take the steps of ROUNDS, but none with hooks:
    these are the user's, and may change what no trial gives back.

    Args:
        everything: what the optimizer of all is made with.
        own: what the other one is made with: some of them, or with `ranges` the same.
        ranges: the elements of these that it updates, perhaps none; of others it updates all.
        sparse: parameters whose gradients are sparse.
    """
    # A tensor on the meta device cannot have numbers for a while.
    hollow = [p for p in everything if p.is_meta]
    blank = (torch.empty((), dtype=p.dtype).expand(p.shape) for p in hollow)
    stand = {p: nn.Parameter(each, p.requires_grad) for p, each in zip(hollow, blank)}
    for p, other in stand.items():
        vars(other)[STANDS_FOR] = p  # so that it has a name
    everything, own, sparse = ([stand.get(p, p) for p in each] for each in (everything, own, sparse))
    trial = _Trial(make, everything, own, {stand.get(p, p): part for p, part in ranges.items()}, sparse)
    failed: Exception | None = None
    with trial.lending():
        try:
            optimizer = make(own)
        except Exception as error:  # whatever a user's factory raises
            failed = error
    if failed is not None:
        if OVERLAPPING not in str(failed):
            make(own)  # raises where it fails without a trial, too
        return f"the optimizer {_untried(failed)}"
    name = "the optimizer" if optimizer is None else kind_of(optimizer)
    groups = [] if optimizer is None else optimizer.param_groups
    rates, apart = [group.get("lr") for group in groups], _options(groups)
    if apart and (hook := _hook(optimizer)):
        return f"{name} has the step hook {hook}, which may look beyond and is not run for a trial"
    is_known = not apart or _is_known(optimizer, ranges)
    del optimizer, groups  # with its state
    with trial.lending():
        try:
            why = trial.other_option(apart) or (None if is_known else trial.other_step())
        except Exception as error:
            why = _untried(error)
    if why is None and not is_known and not trial.has_changed and any(rate != 0 for rate in rates):
        why = "could not be tried: it has changed nothing"
    return why and f"{name} {why}"


class _Trial:
    """Optimizers of one factory that take the same steps.

    They are made with the user's own tensors, which have numbers of the trial for a while: a step may look at
    what the factory was given. Large ones are shorter then, and some of many take no steps.

    Args:
        make, everything, own, ranges, sparse: as in `why_not_apart`.
    """

    def __init__(
        self,
        make: Make,
        everything: Sequence[Tensor],
        own: Sequence[Tensor],
        ranges: Mapping[Tensor, range],
        sparse: Collection[Tensor],
    ) -> None:
        self._make, self._sparse, self._device = make, set(sparse), own[0].device
        self._given = everything, own
        held, cut = set(own), {p for p, part in ranges.items() if 0 < len(part) < p.numel()}
        shapes = _sample([*(p for p in own if p in cut), *(p for p in own if p not in cut)])
        shapes |= _sample([p for p in everything if p not in held])
        self._shapes = shapes
        self._all, self._own = ([p for p in tensors if p in shapes] for tensors in (everything, own))
        self._ranges = {p: _scaled(part, p, shapes[p]) for p, part in ranges.items() if p in shapes}
        self._what = "a part of a parameter" if ranges else "a stage's parameters"
        self._than = "the whole" if ranges else "among the whole model's"
        self.has_changed = False

    @cached_property
    def _weights(self) -> dict[Tensor, Tensor]:
        """The numbers of norm 1 that each parameter begins with, times a factor of its own."""
        count = len(self._shapes)
        return {p: _drawn(i, self._shapes[p], p.dtype) * (1 + 9 * i / count) for i, p in enumerate(self._all)}

    @cached_property
    def _gradients(self) -> dict[Tensor, Tensor]:
        return {p: each.view(-1).flip(0).view(each.shape) for p, each in self._weights.items()}

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Lend tensors ones for this context; then give back numbers, gradients and generators' states."""
        everything, held = self._given[0], set(self._given[1])
        kept = [(p, p.data, p.grad) for p in everything]
        try:
            with preserved_state(self._device, python_too=True):
                for p in everything:  # a large one takes no memory: torch's own pass without a step
                    shape = p.shape if p in held else _cut(p.shape, LARGEST)
                    of = shape if shape.numel() <= SMALL else ()
                    p.grad, p.data = None, torch.ones(of, dtype=p.dtype, device=self._device).expand(shape)
                yield
        finally:
            for p, data, gradient in kept:
                p.grad = None  # it has another shape
                p.data, p.grad = data, gradient

    def other_option(self, apart: Options) -> str | None:
        """Return how the factory treats a parameter otherwise among others than among all.

        Args:
            apart: options of the own parameters, as the factory gives them where it has no others.
        """
        if self._ranges:
            return None  # it is called with all
        everything, own = self._given
        optimizer = self._make(everything)
        among_all = _options([] if optimizer is None else optimizer.param_groups)
        for p in own:
            if (p in apart) != (p in among_all):
                return f"takes others of {self._what} than {self._than}"
            one, other = apart.get(p, {}), among_all.get(p, {})
            for name in one | other:
                if not _equal(one.get(name), other.get(name)):
                    return f"gives {self._what} another {name} than {self._than}"
        return None

    def other_step(self) -> str | None:
        """Return how the own optimizer's steps differ from those of one of all parameters."""
        for each in ROUNDS:
            try:
                start, expected = self._steps(each, self._all, NO_RANGES)
            except Exception as error:  # whatever a user's step raises
                if each is PLAIN:
                    return _untried(error)
                continue  # a training would end in such a step, too
            begun = (self._weights[p] * each.scale for p in self._own)
            self.has_changed |= any(not torch.equal(p.cpu(), a) for p, a in zip(self._own, begun))
            try:
                _, found = self._steps(each, self._own, self._ranges)
            except Exception as error:
                return f"could not be tried on {self._what}: {told(error)}"
            if any(map(_differs, start, expected, found)):
                return f"updates {self._what} otherwise than {self._than}"
        return None

    def _begin(self, of: Round) -> None:
        """Give all tensors the numbers that a round begins with."""
        for p, numbers in self._weights.items():
            p.grad, p.data = None, (numbers * of.scale).to(self._device)

    def _steps(
        self, of: Round, given: Sequence[Tensor], ranges: Mapping[Tensor, range]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what this rank updates before and after the steps of an optimizer."""
        self._begin(of)
        start, parts = self._elements(), {p: p for p in given}
        seed_generators(0, self._device, python_too=True)
        optimizer = self._make(given)
        assert optimizer is not None
        for group in optimizer.param_groups:
            if group.get("lr") == 0:
                group["lr"] = TRIED_RATE
        for step in range(NUM_STEPS):
            if ranges and step == of.whole_until:
                cut = {p: nn.Parameter(part_of(p.detach(), ranges[p])) for p in ranges if ranges[p]}
                take_over(optimizer, cut, ranges)
                parts = {p: p for p in given if p not in ranges} | cut
            for i, p in enumerate(self._all):
                p.grad = None
                if p in parts and not (of.with_gaps and (step + i) % 3 == 0):
                    size = of.scale * (1 + step % 5)  # else each element has had the same after a whole turn
                    gradient = (self._gradients[p].roll(step) * size).to(self._device)
                    gradient = gradient.to_sparse(1) if p in self._sparse else gradient
                    is_part = parts[p] is not p
                    parts[p].grad = part_of(gradient, ranges[p]) if is_part else gradient
                elif p in parts:
                    parts[p].grad = None
            optimizer.step()
        return start, self._elements()

    def _elements(self) -> list[Tensor]:
        """Return copies of the elements that this rank updates, of each of its parameters."""
        whole = (range(p.numel()) for p in self._own)
        return [
            p.detach().reshape(-1)[_slice(self._ranges.get(p, every))].clone()
            for p, every in zip(self._own, whole)
        ]


def _is_known(optimizer: torch.optim.Optimizer | None, ranges: Mapping[Tensor, range]) -> bool:
    """Return True for optimizers that are known to update these elements by themselves."""
    cut = {p for p, part in ranges.items() if 0 < len(part) < p.numel()}
    return all(
        _is_of(each, ELEMENTWISE if any(p in cut for p in _parameters_of(each)) else TENSORWISE)
        for each in members_of(optimizer)
    )


def needs_whole(make: Make, parameters: Sequence[Tensor]) -> set[Tensor]:
    """Return the parameters whose optimizer is known to update each by itself, but not each element."""
    real = [p for p in parameters if not p.is_meta]
    with _Trial(make, real, real, NO_RANGES, ()).lending() if real else nullcontext():
        try:
            members = members_of(make(parameters))
        except Exception:  # whatever a user's factory raises; `why_not_apart` says so
            return set()
    found = (each for each in members if _is_of(each, TENSORWISE) and not _is_of(each, ELEMENTWISE))
    return {p for each in found for p in _parameters_of(each)}


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


def _is_of(optimizer: torch.optim.Optimizer, kinds: Collection[type]) -> bool:
    """Return True for an optimizer of these classes whose step is torch's alone."""
    return type(optimizer) in kinds and "step" not in vars(optimizer)


def _hook(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return the name of a function that runs before or after a step, if any."""
    kinds: list[dict[int, Any]] = [of_any._global_optimizer_pre_hooks, of_any._global_optimizer_post_hooks]
    kinds = [*step_hooks(optimizer), *kinds]
    hook = next((hook for hooks in kinds for hook in hooks.values()), None)
    return hook and getattr(hook, "__qualname__", type(hook).__qualname__)


def _untried(error: Exception) -> str:
    """Return in one line why an optimizer could not be tried."""
    writes = f"its factory writes to a parameter of more than {SMALL:,} elements"
    return f"could not be tried: {writes if OVERLAPPING in str(error) else told(error)}"


def _sample(parameters: Sequence[Tensor]) -> dict[Tensor, torch.Size]:
    """Return parameters to try, with their shapes: one of each shape, then more while there is room."""
    given = [p for p in parameters if p.numel() and (p.is_floating_point() or p.is_complex())]
    firsts = dict[object, Tensor]()
    for p in given:
        firsts.setdefault((p.shape, p.dtype), p)
    found, room = dict[Tensor, torch.Size](), MOST
    most = min(LARGEST, MOST // max(1, len(firsts)))
    for p in [*firsts.values(), *given]:
        shape = _cut(p.shape, most)
        if p not in found and shape.numel() <= room:
            found[p], room = shape, room - shape.numel()
    return found


def _cut(shape: torch.Size, most: int) -> torch.Size:
    """Halve the longest dimensions of a shape until it has at most that many elements."""
    sizes = list(shape)
    while math.prod(sizes) > most:
        longest = sizes.index(max(sizes))
        sizes[longest] //= 2
    return torch.Size(sizes)


def _scaled(part: range, parameter: Tensor, shape: torch.Size) -> range:
    """Return the part of a parameter that is shorter for a while."""
    size, whole = shape.numel(), parameter.numel()
    return range(part.start * size // whole, part.stop * size // whole)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _drawn(seed: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Draw numbers of norm 1, from a generator of their own, so that no two parts are alike.

    Types of less than 32 bits become float32, whose steps are not lost in rounding.
    """
    dtype = dtype if dtype.itemsize >= 4 else torch.float32
    numbers = torch.randn(shape.numel(), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    numbers.add_(1).mul_(torch.logspace(-1, 1, shape.numel()))
    return numbers.div_(torch.linalg.vector_norm(numbers)).view(shape)


def _differs(start: Tensor, expected: Tensor, found: Tensor) -> bool:
    """Return True if an update is another one than that of the whole, unless that is not finite."""
    rounding = NUM_STEPS * torch.finfo(start.dtype).eps * expected.norm()
    allowed = TOLERANCE * (expected - start).norm() + rounding
    return bool(expected.isfinite().all()) and not bool((found - expected).norm() <= allowed)


def _options(groups: Sequence[Mapping[str, Any]]) -> Options:
    """Return the options of each parameter that are numbers."""
    numbers = int, float, tuple, Tensor
    kept = [{name: value for name, value in group.items() if isinstance(value, numbers)} for group in groups]
    return {p: options for group, options in zip(groups, kept) for p in group["params"]}


def _equal(one: object, other: object) -> bool:
    """Compare two options."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one == other or (one != one and other != other)
