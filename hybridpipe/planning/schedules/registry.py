"""Registry: the schedules and their traits, one row each.

A new schedule is one generator (`generators.GENERATORS`) and one row. Pure data; knows no plan. Invariant:
nothing else in the package compares the name of a schedule.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

Placement = Literal["loop", "v"]


class ScheduleTraits(NamedTuple):
    """The properties of a schedule that planner, simulator and engine use.

    Args:
        is_asynchronous: the pipeline is never flushed; stages update as they go.
        versions: of the weights. "one": the newest; "stashed": one for each update that microbatches in
            flight need (weight stashing); "two": the newest and the one before (double buffering).
        whole_minibatch: a minibatch is one microbatch. Replicas take turns; each round is an update.
        has_warm_up: a stage starts with a few forwards, then alternates. Without it all forwards come first.
        splits_backward: the gradients of inputs and of weights are separate instructions.
        batches_wgrad: gradients of large weights are computed for several microbatches at once.
        interleaves: each rank holds several stages (chunks), all of which have equal replicas.
        placement: where the chunks lie. "loop": chunk after chunk goes through the groups of ranks in order,
            the last followed by the first. "v": every second chunk goes back, so that the groups at both ends
            hold neighbours.
        spares_memory: of equal stages it is slower than another one, in less memory. A request for any
            schedule considers it where memory is limited.
        takes_max_in_flight: the number of microbatches in flight can be limited.
        least_room: where the order of passes follows their times, the microbatches that a rank must hold, of
            all its chunks; called with the number of groups of ranks.
        most_zero: the most that `StageSpec.zero` may be. Chunks of a rank are reduced together, when the
            gradients of all are whole; an asynchronous stage's gradients are, where it updates at each.
    """

    is_asynchronous: bool = False
    versions: Literal["one", "stashed", "two"] = "one"
    whole_minibatch: bool = False
    has_warm_up: bool = True
    splits_backward: bool = False
    batches_wgrad: bool = False
    interleaves: bool = False
    placement: Placement = "loop"
    spares_memory: bool = False
    takes_max_in_flight: bool = False
    least_room: Callable[[int], int] | None = None
    most_zero: int = 2

    @property
    def takes_lags(self) -> bool:
        """True if a plan may say how many split backwards are in flight, and by how much their halves lag."""
        return self.splits_backward and not self.interleaves

    @property
    def runs_together(self) -> bool:
        """True if the replicas of a stage may run every pass together, to exchange in it."""
        return not self.is_asynchronous and not self.interleaves

    @property
    def takes_pass_times(self) -> bool:
        """True if the order of passes follows their times."""
        return self.least_room is not None

    def num_versions(self, in_flight: int, predicts: bool = False) -> int:
        """Return the versions of the weights that a replica with `in_flight` microbatches in flight keeps.

        Args:
            predicts: those in flight are predicted, so that none of them is the newest.
        """
        more = predicts and in_flight > 1
        return {"stashed": in_flight, "two": 2, "one": 1}[self.versions] + more


_V_SHAPE = ScheduleTraits(splits_backward=True, interleaves=True, placement="v", most_zero=1)

# The simplest first: of schedules that take equally long the planner chooses the first one.
TRAITS = {
    "1f1b": ScheduleTraits(batches_wgrad=True, takes_max_in_flight=True),
    "gpipe": ScheduleTraits(batches_wgrad=True, has_warm_up=False),
    "interleaved-1f1b": ScheduleTraits(batches_wgrad=True, interleaves=True, most_zero=1),
    "zero-bubble": ScheduleTraits(splits_backward=True),
    "zb-v": _V_SHAPE._replace(least_room=lambda p: 2 * p),
    "v-half": _V_SHAPE._replace(least_room=lambda p: 2 * ((p + 2) // 2), spares_memory=True),
    "v-min": _V_SHAPE._replace(least_room=lambda p: 2 * ((p + 4) // 3), spares_memory=True),
    "pipedream": ScheduleTraits(
        is_asynchronous=True,
        versions="stashed",
        whole_minibatch=True,
        takes_max_in_flight=True,
        most_zero=1,
    ),
    "pipedream-2bw": ScheduleTraits(
        is_asynchronous=True, versions="two", takes_max_in_flight=True, most_zero=1
    ),
}
DEFAULT = "1f1b"
SCHEDULES = tuple(TRAITS)
ASYNCHRONOUS = tuple(name for name, traits in TRAITS.items() if traits.is_asynchronous)
SYNCHRONOUS = tuple(name for name, traits in TRAITS.items() if not traits.is_asynchronous)
