"""V-shape: schedules whose stages go down the groups of ranks and back up again, filled by measured times.

Pure: groups and microbatches are integers here, and plans are not known. Invariant: a group holds no more
than there is room for, and no order waits for ever, however uneven the times are.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (NeurIPS 2024). A *building block* says in
which slot a microbatch makes each pass in each group. Blocks repeat every six slots, one for each pass of a
group's two chunks; that gives an order. It is *squeezed*: a pass runs once it can. It is *filled*: a group
that would wait runs a later forward or inputs' half, if there is room for it until its turn, or else a
weights' half. So the rest of the order stays possible, and of its earliest pass all inputs are there.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import product

from hybridpipe.planning.plan import PassTimes
from hybridpipe.planning.schedules.instructions import BackwardInput, BackwardWeight, Forward

Pass = Forward | BackwardInput | BackwardWeight
Orders = Sequence[Sequence[Pass]]  # of each group

SLOTS = 6  # from one microbatch to the next
KINDS = 4  # of passes in a group, as a microbatch makes them: forwards of both chunks, then inputs' halves
ALIKE = PassTimes(1, 1, 1, 0)


def _v_min(p: int, group: int) -> tuple[int, int, int, int]:
    late = 2 * (p % 3 == 0)  # else passes of two microbatches meet in one slot
    return group, 2 * p - 1 - group, 2 * p + late + group, 4 * p + late - 1 - group


def _v_half(p: int, group: int) -> tuple[int, int, int, int]:
    late = 3 * (p % 2 == 0)
    return 2 * group, 3 * p - 2 - group, 3 * p + late - 1 + 2 * group, 6 * p + late - 2 - group


def _zb_v(p: int, group: int) -> tuple[int, int, int, int]:
    return 4 * group, 6 * p - 4 - 2 * group, 6 * p - 3 + 2 * group, 10 * p - 6 - 2 * group


# The slots of a microbatch's passes in a group, by KINDS; called with the number of groups, and the group.
BUILDING_BLOCKS: dict[str, Callable[[int, int], tuple[int, int, int, int]]] = {
    "v-min": _v_min,
    "v-half": _v_half,
    "zb-v": _zb_v,
}


@lru_cache(maxsize=8)
def v_passes(
    schedule: str, num_groups: int, count: int, room: int, times: tuple[PassTimes, ...] | None = None
) -> Orders:
    """Return the order of each group's passes, for microbatches 0 to count - 1.

    Orders are made for these times and for equal ones, filled and only squeezed. The fastest is taken: a
    greedy choice may delay what matters more.

    Args:
        room: the most microbatches that a group holds, summed over its chunks, each from its forward to its
            weights' half. At least the schedule's (`ScheduleTraits.least_room`).
        times: of each stage; None: all passes take equally long, and messages no time.
    """
    alike = (ALIKE,) * (2 * num_groups)
    tried = product(dict.fromkeys((times or alike, alike)), (True, False))
    orders = [_Filling(schedule, num_groups, count, room, each, fills).run() for each, fills in tried]
    return min(orders, key=partial(_duration, times=times or alike))


def _duration(orders: Orders, times: Sequence[PassTimes]) -> int:
    """Return how long groups take that run these orders."""
    last = len(times) - 1
    ends: dict[tuple[bool, int, int], int] = {}  # of forwards or inputs' halves: stage, microbatch
    free, position = [0] * len(orders), [0] * len(orders)
    waiting = deque(range(len(orders)))
    while waiting:
        group = waiting.popleft()
        while position[group] < len(orders[group]):
            done = orders[group][position[group]]
            stage, m = last - group if done.chunk else group, done.microbatch
            took, begin = times[stage], free[group]
            if isinstance(done, BackwardWeight):
                free[group] += took.backward_weight
                position[group] += 1
                continue
            forward = isinstance(done, Forward)
            before = stage - 1 if forward else stage + 1
            if 0 <= before <= last:
                if (forward, before, m) not in ends:
                    waiting.append(group)
                    break
                begin = max(begin, ends[forward, before, m] + times[min(before, stage)].message)
            free[group] = begin + (took.forward if forward else took.backward_input)
            ends[forward, stage, m] = free[group]
            position[group] += 1
    return max(free)


class _Filling:
    """An order of passes, made by running them.

    Pass q of a microbatch is the forward of stage q and, from 2p on, the inputs' half of stage 4p - 1 - q.

    Args:
        fills: a group that would wait runs later passes of the repeated blocks.
    """

    def __init__(
        self, schedule: str, num_groups: int, count: int, room: int, times: Sequence[PassTimes], fills: bool
    ) -> None:
        p, slots = num_groups, BUILDING_BLOCKS[schedule]
        self.p, self.count, self.room, self.times, self.fills = p, count, room, times, fills
        self.slots = [slots(p, group) for group in range(p)]
        forwards = range(2 * p)
        self.lasts = [times[s].forward for s in forwards]
        self.lasts += [times[s].backward_input for s in reversed(forwards)]
        ways = [times[s].message for s in forwards[:-1]]
        self.ways = [0, *ways, 0, *reversed(ways)]  # of the message before each pass
        self.ends: list[list[int]] = [[] for _ in self.lasts]  # of each pass, by microbatch
        self.free = [0] * p  # when each group ends what it runs
        self.live, self.held = [0] * p, [0] * p  # forwards without their inputs' half, without the weights'
        self.late = [deque[BackwardWeight]() for _ in range(p)]
        self.orders: list[list[Pass]] = [[] for _ in range(p)]
        self.events = [(0, group) for group in range(p)]  # when a group may have something to start

    def run(self) -> Orders:
        """Run all passes; return their order."""
        while self.events:
            now, group = heappop(self.events)
            if self.free[group] <= now:
                self.start(group, now)
        return self.orders

    def start(self, group: int, now: int) -> None:
        """Start what a group runs now, if there is anything."""
        kind, late = self.choose(group, now), self.late[group]
        if kind is not None and (kind >= 2 or self.held[group] < self.room):
            self.start_pass(group, kind, now)
        elif late:  # for which a forward without room waits
            done = late.popleft()
            self.held[group] -= 1
            stage = 2 * self.p - 1 - group if done.chunk else group
            self.note(group, done, now + self.times[stage].backward_weight)

    def start_pass(self, group: int, kind: int, now: int) -> None:
        """Start a forward or an inputs' half."""
        q = self.number(group, kind)
        m, end, chunk = len(self.ends[q]), now + self.lasts[q], min(kind, KINDS - 1 - kind)
        self.ends[q].append(end)
        if kind < 2:
            self.live[group] += 1
            self.held[group] += 1
            self.note(group, Forward(m, chunk), end)
        else:
            self.live[group] -= 1
            self.late[group].append(BackwardWeight(m, chunk))
            self.note(group, BackwardInput(m, chunk), end)
        if q + 1 < len(self.ends):
            next_kind, place = divmod(q + 1, self.p)
            receiver = self.p - 1 - place if next_kind % 2 else place
            heappush(self.events, (end + self.ways[q + 1], receiver))

    def note(self, group: int, done: Pass, end: int) -> None:
        """Note what a group runs until `end`."""
        self.orders[group].append(done)
        self.free[group] = end
        heappush(self.events, (end, group))

    def choose(self, group: int, now: int) -> int | None:
        """Return the kind of the first pass in the order of the blocks that may start now."""
        slots = self.slots[group]
        counts = [len(self.ends[self.number(group, kind)]) for kind in range(KINDS)]
        ahead, live = list(counts), self.live[group]
        most = live  # at any time until the turn of the pass in question
        while rest := [(slots[k] + SLOTS * ahead[k], k) for k in range(KINDS) if ahead[k] < self.count]:
            kind = min(rest)[1]
            is_next = ahead[kind] == counts[kind]  # of its kind
            if is_next and self.ready_at(group, kind) <= now and (kind >= 2 or most < self.room):
                return kind
            ahead[kind] += 1
            if not self.fills or all(a > b for a, b in zip(ahead, counts, strict=True)):
                break
            live += 1 if kind < 2 else -1
            most = max(most, live)
        return None

    def ready_at(self, group: int, kind: int) -> float:
        """Return when the input of a group's next pass of a kind is there; infinite while not known."""
        q = self.number(group, kind)
        m, before = len(self.ends[q]), self.ends[q - 1]
        if not q:
            return 0
        return before[m] + self.ways[q] if m < len(before) else math.inf

    def number(self, group: int, kind: int) -> int:
        """Return the number of a group's pass of a kind."""
        return kind * self.p + (self.p - 1 - group if kind % 2 else group)
