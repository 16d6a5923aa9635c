"""NonfiniteCheck: finds and names NaN and infinity in losses and gradients before an update.

Knows stages, no messages: the caller passes in the function by which ranks agree to skip an update.
Invariant: all ranks that update together decide alike.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybridpipe.data.stream import Stream
from hybridpipe.model.tensors import dense, norms, not_finite
from hybridpipe.notices import notices
from hybridpipe.optim.loss_scale import UNSCALED, LossScale
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.stage.stage import Stage

# If several ranks find the same error at the same time, the first report ends the job. Later stages report
# first, since the error arose there and travelled to the earlier ones.
STAGGER_SECONDS = 0.5
MOST_STAGGERS = 4


class NotFinite(RuntimeError):
    """A loss or a gradient is NaN or infinite.

    Args:
        stagger_seconds: delay before this rank reports, so that ranks nearer the origin report first.
    """

    def __init__(self, what: str, stagger_seconds: float) -> None:
        super().__init__(what)
        self.stagger_seconds = stagger_seconds


class NonfiniteCheck:
    """The check of the rank at `place`.

    It computes one norm of all gradients, at the speed of memory (3 ms for 64 MiB on one core), and searches
    for the tensor only if that norm or a loss is not finite.

    Args:
        policy: one of ON_NONFINITE: end the job, skip the update, or check nothing.
        agree: under "skip": returns the largest number of all ranks that update together; collective.
        elsewhere: parameters whose gradients another stage checks.
        parts: the tensor that has this rank's gradients of each parameter; one that is missing has none here.
            By default the parameter itself.
    """

    def __init__(
        self,
        policy: str,
        plan: Plan,
        place: Place,
        stages: Sequence[Stage],
        agree: Callable[[int], int],
        elsewhere: Collection[Tensor] = (),
        parts: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self._policy, self._stages, self._agree = policy, stages, agree
        self._held, self._last = plan.held_stages(place), plan.num_stages - 1
        self._rank, self._num_ranks = plan.rank_at(place), max(plan.ranks) + 1
        behind = min(self._last - max(self._held), MOST_STAGGERS)
        self._stagger_seconds = STAGGER_SECONDS * (behind + 0.5 * (place.replica > 0))
        own = dict.fromkeys(p for stage in stages for p in stage.module.parameters())
        checked = {p: p for p in own} if parts is None else parts
        others = frozenset(elsewhere)
        self._checked = {p: part for p, part in checked.items() if p in own and p not in others}
        self.num_skipped = 0

    def allows(
        self,
        losses: Mapping[int, Tensor],
        stream: Stream,
        step: int,
        has_weight: bool = True,
        scale: LossScale = UNSCALED,
    ) -> bool:
        """Return True if the update at `step` may be made; the same on all ranks that update together.

        A gradient that a smaller scale of the loss may keep finite is no error: the update is skipped under
        every policy.

        Args:
            losses: by microbatch of the stream; means, or sums of (sum, weight).
            has_weight: False if the weights of the losses add up to 0, so that the minibatch's loss is NaN.
            scale: of the losses, the largest one, by which the gradients were divided already.

        Raises:
            NotFinite: a number is not finite, under policy "stop".
        """
        if self._policy == "ignore" and not scale.changes:
            return True
        found = None
        if losses and not has_weight:
            found = self._last + 1, self._without_weight(stream[min(losses)].step)
        elif not self._seem_finite(losses):
            ignored = {} if self._policy == "ignore" else losses  # the scale still needs the gradients
            found = next(self._bad(ignored, stream, step), None)
        overflows = found is not None and scale.explains_overflow and found[0] <= self._last
        if found is not None and not overflows:
            if self._policy == "stop":
                raise NotFinite(found[1], self._stagger_seconds)
            if self._policy == "ignore":
                found = None
        if self._policy == "stop" and not scale.changes:
            return True
        # the largest number chooses the rank that reports: nearest the origin, and one of its replicas
        mine = 0 if found is None else (1 + found[0]) * self._num_ranks + self._rank
        largest = self._agree(mine)
        if found is not None and mine == largest:
            what = f"rank {self._rank}: {found[1]}; the update is skipped"
            if scale.explains_overflow:
                what += f", and the loss scale falls to {scale.after(overflowed=True).value:g}"
            notices.tell(what)
        self.num_skipped += largest > 0
        return largest == 0

    def _seem_finite(self, losses: Mapping[int, Tensor]) -> bool:
        """Return False if a number may not be finite; a norm of finite numbers can overflow as well."""
        gradients = [p.grad for p in self._checked.values() if p.grad is not None]
        numbers = [*norms(gradients), *losses.values()]
        if not numbers:
            return True
        total = torch.stack([number.detach().float() for number in numbers]).sum()
        return bool(total.isfinite())

    def _without_weight(self, step: int) -> str:
        where = f"the loss of step {step} (stage {self._last})"
        return f"{where} is not finite: nan, since the weights that it returned add up to 0"

    def _bad(self, losses: Mapping[int, Tensor], stream: Stream, step: int) -> Iterator[tuple[int, str]]:
        """Yield (nearness to the origin, description) of each number that is not finite, nearest first."""
        for m, loss in losses.items():
            if not loss.isfinite():
                at = stream[m]
                what = f"the loss of step {at.step}, microbatch {at.microbatch}"
                yield self._last + 1, f"{what} (stage {self._last}) is not finite: {loss.item()}"
        for number, stage in sorted(zip(self._held, self._stages, strict=True), key=lambda each: -each[0]):
            for name, parameter in reversed(list(stage.module.named_parameters())):
                gradient = self._checked[parameter].grad if parameter in self._checked else None
                if gradient is None:
                    continue
                found = not_finite(dense(gradient))
                if found is not None:
                    where = f"step {step}, stage {number}, {stage.layers.described(name)}"
                    yield number, f"the gradient of {where} is not finite: {found}"
