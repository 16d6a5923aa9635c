"""Centre: the weights that groups have in common, and the rules by which groups and centre come together.

Knows an optimizer's parameters and a sum over the groups; no communicator. Sources: EASGD (Zhang, Choromanska
and LeCun 2015), DiLoCo (Douillard et al. 2023), Streaming DiLoCo (Douillard et al. 2025).
Invariant: the centre is the same in all groups, bit for bit.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from hybridpipe.comm.group_sums import SumsOverGroups
from hybridpipe.comm.status import rank_status
from hybridpipe.config.options import GroupOptions
from hybridpipe.stage.state import CENTRE, OUTER_MOMENTUM, TRAVELLING

ELASTIC_RATE = 0.9  # beta of EASGD, over the number of groups

Kept = dict[str, Tensor]  # of a parameter, by the names of `stage.state`


class Centre:
    """The centre of the parameters that a rank's optimizer updates.

    Args:
        parameters: in the same order in all groups; those that are not trained stay as they are.
        sums: adds the other groups' numbers up.
        shared: those that other ranks of the group hold as well: they belong to the first fragment.

    Attributes:
        follows: nothing was trained since the weights were taken: whatever they are now is the centre.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        options: GroupOptions,
        sums: SumsOverGroups,
        shared: Collection[Tensor] = (),
    ) -> None:
        self._shared = frozenset(shared)
        self._parameters = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self._options, self.sums = options, sums
        self._thread = ThreadPoolExecutor(1, "hybridpipe-groups")  # one, so that exchanges stay in order
        # Sums on their way, by fragment.
        self._travelling: dict[int, tuple[list[Tensor], Future[Tensor]]] = {}
        self._kept: dict[Tensor, Kept] = {}
        self.reset()

    def reset(self) -> None:
        """Take the present weights, which are the same in all groups, as the centre."""
        self.load({})
        self.follows = True

    def begin(self) -> None:
        """Begin to train: the present weights are the centre if nothing was trained yet."""
        if self.follows:
            self.load({})

    def after(self, done: int, new: int) -> None:
        """Exchange what is due after an update. Collective over the groups.

        Args:
            done: minibatches in the weights.
            new: those that the update has added.
        """
        options, self.follows = self._options, False
        for number in range(options.fragments):
            begin = number * options.every // options.fragments
            if self._is_due(begin, done, new):
                parameters = self._fragment(number)
                moves = _flat(parameters, lambda p: p.detach() - self._kept[p][CENTRE])
                self._travelling[number] = parameters, self._thread.submit(self.sums.add_up, moves)
            if number in self._travelling and self._is_due(begin + options.delay, done, new):
                parameters, future = self._travelling.pop(number)
                with rank_status.waiting("exchange between groups", self.sums.ranks):
                    total = future.result()
                self._apply(parameters, total)
                self._give_if_asked()

    def take(self, given: Tensor | None) -> None:
        """Take the centre that other groups have given, if any; give this group's to those that ask."""
        if given is not None:
            for name, part in zip(self._given, given.chunk(len(self._given)), strict=True):
                for p, numbers in _divided(self._parameters, part):
                    self._kept[p][name] = numbers.to(self._kept[p][CENTRE].dtype)
            for p in self._parameters:
                p.detach().copy_(self._kept[p][CENTRE])
        self._give_if_asked()

    def _give_if_asked(self) -> None:
        if self.sums.is_asked:
            self.sums.give(torch.cat([_flat(self._parameters, self._kept_as(name)) for name in self._given]))

    def _kept_as(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return what gives the tensor of that name of a parameter; zeros where there is none yet."""
        return lambda p: self._kept[p].get(name, torch.zeros_like(self._kept[p][CENTRE]))

    @property
    def _given(self) -> tuple[str, ...]:
        """Names of what a group that comes is given of each parameter."""
        return (CENTRE, OUTER_MOMENTUM) if self._options.rule == "diloco" else (CENTRE,)

    def kept(self) -> Mapping[Tensor, Kept]:
        """Return what a checkpoint keeps of each parameter. Waits for what travels."""
        self.begin()
        found = {p: dict(kept) for p, kept in self._kept.items()}
        for parameters, future in self._travelling.values():
            for p, total in _divided(parameters, future.result()):
                found[p][TRAVELLING] = total
        return found

    def load(self, kept: Mapping[Tensor, Kept]) -> None:
        """Take what was kept; of a parameter without any the weights become the centre."""
        for _, future in self._travelling.values():
            future.result()
        self.follows = False
        self._kept = {p: {CENTRE: _copied(p)} | kept.get(p, {}) for p in self._parameters}
        self._travelling = {}
        for number in range(self._options.fragments):
            coming = [p for p in self._fragment(number) if TRAVELLING in self._kept[p]]
            if coming:
                arrived = Future[Tensor]()
                arrived.set_result(_flat(coming, lambda p: self._kept[p].pop(TRAVELLING)))
                self._travelling[number] = coming, arrived

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the parameters have the centre inside this context, and their own weights after it."""
        if self.follows:
            yield
            return
        own = [p.detach().clone() for p in self._parameters]
        for p in self._parameters:
            p.detach().copy_(self._kept[p][CENTRE])
        try:
            yield
        finally:
            for p, weights in zip(self._parameters, own, strict=True):
                p.detach().copy_(weights)

    def close(self) -> None:
        """End the thread, once nothing travels."""
        self._thread.shutdown()

    def _is_due(self, begin: int, done: int, new: int) -> bool:
        every = self._options.every
        return (done - begin) // every > (done - new - begin) // every

    def _fragment(self, number: int) -> list[Tensor]:
        """Return the parameters of a fragment, which has about as many elements as each other one."""
        own = [p for p in self._parameters if p not in self._shared]
        found = [] if number else [p for p in self._parameters if p in self._shared]
        most, before = sum(p.numel() for p in own), 0
        for p in own:
            if (before * self._options.fragments) // max(1, most) == number:
                found.append(p)
            before += p.numel()
        return [p for p in found if p.requires_grad]

    @torch.no_grad()
    def _apply(self, parameters: Sequence[Tensor], totals: Tensor) -> None:
        """Move a fragment of the centre and of this group, by the sum of all groups' moves."""
        options, count = self._options, self.sums.count
        for p, total in _divided(parameters, totals):
            own, kept = p.detach(), self._kept[p]
            centre = kept[CENTRE]
            if options.rule == "elastic":
                rate = options.moving_rate or ELASTIC_RATE / options.count
                own.sub_(rate * (own - centre))
                centre.add_(total, alpha=rate)
                continue
            if options.rule == "average":
                centre.add_(total / count)
            else:
                momentum = kept.setdefault(OUTER_MOMENTUM, torch.zeros_like(centre))
                momentum.mul_(options.outer_momentum).sub_(total / count)
                step = momentum * options.outer_momentum - total / count
                centre.sub_(step, alpha=options.outer_lr)
            own.copy_(torch.lerp(centre, own.to(centre.dtype), options.mixing) if options.delay else centre)


def _copied(parameter: Tensor) -> Tensor:
    """Return a copy; of half precision in float32, where the centre's small steps do not round away."""
    kind = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(kind, copy=True)


def _numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _parts(parameters: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with its part of a flat tensor, in place."""
    at = 0
    for p in parameters:
        numbers = _numbers(p)
        part = flat[at : at + numbers.numel()].view(numbers.shape)
        at += numbers.numel()
        yield p, torch.view_as_complex(part) if p.is_complex() else part


def _divided(parameters: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with its part of a flat tensor, on its device."""
    return ((p, part.to(p.device)) for p, part in _parts(parameters, flat))


def _flat(parameters: Sequence[Tensor], made: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor for each parameter, as one of one dimension, on the CPU, in the widest dtype.

    They are made one by one, so that memory is needed once.
    """
    kinds = [torch.float32, *(_numbers(p).dtype for p in parameters)]
    kind = max(kinds, key=lambda dtype: dtype.itemsize)
    flat = torch.empty(sum(_numbers(p).numel() for p in parameters), dtype=kind)
    for p, part in _parts(parameters, flat):
        part.copy_(made(p))
    return flat
