"""Predict: a timeline and its figures, from programs or from a plan; no torch, no MPI.

Sends are buffered, as the engine's `Isend`, or last until the message has arrived (`waiting`). A synchronous
minibatch is simulated from its start to its flush; an asynchronous pipeline until its pace repeats, or over
the minibatches of `_window`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import StageCost, measured_speed, stage_costs
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, Prediction
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules.generators import UNLIMITED, ceil_div, in_flight_per_stage, programs
from hybridpipe.planning.schedules.instructions import Backward, Program
from hybridpipe.planning.schedules.registry import DEFAULT
from hybridpipe.planning.shards import of_shards, pooled
from hybridpipe.planning.simulator.simulator import Deadlock, Simulation
from hybridpipe.planning.simulator.waiting import WaitingSimulation
from hybridpipe.planning.timeline import TimedEvent, Timeline

__all__ = ["MAX_INSTRUCTIONS", "Deadlock", "is_simulated", "predict", "simulate"]

# Beyond this number, a few seconds, a minibatch is not simulated whole where that can be avoided.
MAX_INSTRUCTIONS = 400_000
# Beyond these a plan is not simulated at all: they take a minute, and some hundred megabytes.
MOST_INSTRUCTIONS, MOST_ROUTES = 4_000_000, 4_000_000
MOST_KEPT = 20_000  # instructions of programs that are kept, some megabytes
STEADY = 1e-4  # relative: rounds that differ by less take equally long


def simulate(
    programs: Mapping[int, Program],
    plan: Plan,
    costs: Sequence[StageCost],
    cluster: Cluster,
    *,
    until: Callable[[TimedEvent], bool] | None = None,
) -> Timeline:
    """Run one program a rank and return the predicted timeline.

    Args:
        programs: by rank, such as `generators.programs(plan)`.
        costs: one for each stage.
        until: a condition, checked after each event of the plan's first rank, that ends the simulation.
            Instructions under way are cut short.

    Raises:
        Deadlock: nothing can advance, although some rank is not done.
    """
    kind = WaitingSimulation if cluster.waits_for_messages else Simulation
    return kind(programs, plan, costs, cluster, until).run()


def predict(
    plan: Plan, profile: ModelProfile, cluster: Cluster, limit: float = math.inf
) -> tuple[Timeline, Prediction]:
    """Return the timeline and the figures of a full minibatch under the plan.

    The profile is that of the plan's microbatch. An asynchronous pipeline's timeline runs from the start over
    some minibatches until it repeats itself, or has drained. Its figures are those of one minibatch while it
    is full.

    A synchronous minibatch of more than MAX_INSTRUCTIONS is extrapolated from two shorter ones, because a
    full pipeline repeats itself; the timeline is then that of the longer one. An asynchronous pipeline that
    takes more instructions to fill has the pace of `estimate.estimate`.

    Args:
        limit: seconds after which the simulation of a synchronous minibatch ends. It is then predicted to
            take forever.

    Raises:
        ValueError: plan and profile differ in layers, or the plan names a rank that the cluster lacks, or has
            more microbatches or replicas than can be simulated in a minute or so, or shards that cannot be
            predicted (`shards.pooled`).
    """
    plan.check_world(cluster.num_ranks)
    if plan.splits_tensors:
        few, split, machines = pooled(plan, profile, cluster)
        timeline, predicted = predict(few, split, machines, limit)
        return _of_all_shards(timeline, plan.stages[0].tensor), of_shards(predicted, plan.stages[0].tensor)
    _check_size(plan)
    costs = stage_costs(profile, plan, measured_speed(profile, cluster))
    if plan.is_asynchronous:
        timeline, seconds, bubble_fraction = _steady(plan, costs, profile, cluster)
    else:
        timeline, seconds, bubble_fraction = _flushed(plan, costs, cluster, limit)
    samples = profile.samples * plan.num_microbatches
    return timeline, Prediction(
        minibatch_seconds=seconds,
        samples_per_second=samples / seconds if seconds else 0.0,
        bubble_fraction=bubble_fraction,
        peak_memory_bytes=peak_memory_bytes(profile, plan),
    )


def _of_all_shards(timeline: Timeline, tensor: int) -> Timeline:
    """Return what all shards do, from what their leaders do, whose ranks are numbered without the others."""
    leaders = timeline.events.items()
    return Timeline({leader * tensor + i: events for leader, events in leaders for i in range(tensor)})


def _programs(plan: Plan, num_microbatches: int) -> Mapping[int, Program]:
    """Return the plan's programs. Its cuts change none, so short ones are kept for plans with others."""
    if num_microbatches * _instructions_per_microbatch(plan) > MOST_KEPT:
        return programs(plan, num_microbatches)
    stages = tuple(replace(stage, start=s, stop=s + 1) for s, stage in enumerate(plan.stages))
    return _programs_of(
        replace(plan, stages=stages, num_layers=len(stages), predicted=None), num_microbatches
    )


_programs_of = lru_cache(maxsize=16)(programs)


def is_simulated(plan: Plan) -> bool:
    """True if `predict` takes all figures from a simulation, which takes a few seconds at most."""
    if plan.is_asynchronous:
        count = sum(_window(plan)) * plan.num_microbatches
    else:
        count = _representative(plan)[-1]
    return count * _instructions_per_microbatch(plan) <= MAX_INSTRUCTIONS


def _check_size(plan: Plan) -> None:
    """Raises ValueError for a plan whose simulation would not end in reasonable time."""
    routes = max((math.lcm(*pair) for pair in pairwise(plan.replicas)), default=1)
    num_instructions = sum(_representative(plan)) * _instructions_per_microbatch(plan)
    if not plan.is_asynchronous and num_instructions > MOST_INSTRUCTIONS:
        told = f"its num_microbatches make {num_instructions} instructions"
    elif routes > MOST_ROUTES:
        told = f"replicas of neighbouring stages make {routes} routes"
    else:
        return
    raise ValueError(f"plan is too large to simulate: {told}")


def _flushed(
    plan: Plan, costs: Sequence[StageCost], cluster: Cluster, limit: float
) -> tuple[Timeline, float, float]:
    """Return the timeline, seconds and bubble of a synchronous minibatch."""
    total = plan.num_microbatches
    counts = _representative(plan)

    def is_late(event: TimedEvent) -> bool:
        return event.end_seconds > limit

    until = is_late if limit < math.inf else None
    runs = [simulate(_programs(plan, count), plan, costs, cluster, until=until) for count in counts]
    last = runs[-1]
    if last.seconds > limit:
        return last, math.inf, 1.0
    if len(runs) == 1:
        return last, last.seconds, last.bubble_fraction
    beyond = (total - counts[1]) / (counts[1] - counts[0])

    def extended(short: float, long: float) -> float:
        return long + beyond * (long - short)

    seconds = extended(*(run.seconds for run in runs))
    busy = extended(*(sum(map(run.busy_seconds, run.events)) for run in runs))
    return last, seconds, _idle_share(busy, seconds, plan.num_ranks)


def _representative(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of microbatches to simulate: the plan's, or two smaller ones to extrapolate from.

    The smaller ones fill the pipeline and deal the microbatches out to the replicas as the plan's does.
    """
    total, round_length = plan.num_microbatches, math.lcm(*plan.replicas)
    if total * _instructions_per_microbatch(plan) <= MAX_INSTRUCTIONS:
        return (total,)
    if plan.traits.interleaves:  # ranks take turns in groups of this size
        round_length *= plan.num_groups
    step = ceil_div(_depth(plan), round_length) * round_length
    short = total % round_length + 3 * step
    return (short, short + 2 * step) if short + 2 * step < total else (total,)


def _steady(
    plan: Plan, costs: Sequence[StageCost], profile: ModelProfile, cluster: Cluster
) -> tuple[Timeline, float, float]:
    """Return an asynchronous pipeline's timeline, and its seconds a minibatch and bubble while it is full."""
    first, window, last = _window(plan)
    if not is_simulated(plan):
        count = max(1, MAX_INSTRUCTIONS // _instructions_per_microbatch(plan))
        timeline = simulate(programs(plan, count), plan, costs, cluster)
        seconds = estimate(plan, profile, cluster)
        busy = sum(map(timeline.busy_seconds, timeline.events)) / count * plan.num_microbatches
        return timeline, seconds, _idle_share(busy, seconds, plan.num_ranks)
    count = (first + window + last) * plan.num_microbatches
    pace = _Pace(plan)
    # Before a burst has passed, the pipeline would repeat itself at another pace.
    has_bursts = any(level.burst_bytes for level in cluster.levels)
    until = None if has_bursts else pace.repeats
    timeline = simulate(_programs(plan, count), plan, costs, cluster, until=until)
    if pace.is_steady:
        begin, end, window = pace.ends[-1 - pace.span], pace.ends[-1], pace.span * pace.round_length
    else:
        begin, end = (_returned(timeline, plan, minibatch) for minibatch in (first, first + window))
    busy = sum(timeline.busy_seconds(rank, begin, end) for rank in timeline.events)
    return timeline, (end - begin) / window, _idle_share(busy, end - begin, plan.num_ranks)


class _Pace:
    """The times at which rounds of minibatches came back to the first rank of an asynchronous pipeline.

    The pace is steady once as many rounds as are in the pipeline took as long, one by one, as those before
    them. The number is even, as long and short rounds often take turns.
    """

    def __init__(self, plan: Plan) -> None:
        self.round_length = _minibatches(math.lcm(*plan.replicas), plan.num_microbatches)
        self._step = self.round_length * plan.num_microbatches
        self.span = 2 * ceil_div(_depth(plan), 2 * self._step)
        self._next = Backward(0)
        self.ends: list[float] = []
        self.is_steady = False

    def repeats(self, event: TimedEvent) -> bool:
        """Return True if the pace is steady; called after each event of the first rank."""
        if event.instruction == self._next:
            self._next = Backward(self._next.microbatch + self._step)
            self.ends.append(event.end_seconds)
            lasted = [end - begin for begin, end in pairwise(self.ends[-1 - 2 * self.span :])]
            self.is_steady = len(lasted) == 2 * self.span and all(
                math.isclose(now, before, rel_tol=STEADY)
                for now, before in zip(lasted[self.span :], lasted, strict=False)
            )
        return self.is_steady


def _window(plan: Plan) -> tuple[int, int, int]:
    """Return the minibatches that fill an asynchronous pipeline, are measured, and keep it full behind them.

    It is full some time after the first minibatch has come back. Then, unless `_Pace` was steady before, the
    time between two minibatches a whole number of rounds of every stage apart is measured. Where these are
    too many, a part of a round is neglected in a window so long that it counts little (within 2 % under
    9-8-7).
    """
    size = plan.num_microbatches
    depth = ceil_div(_depth(plan), size)
    window = max(depth, ceil_div(32, size))
    round_length = _minibatches(math.lcm(*plan.replicas), size)
    if round_length > 8 * window:
        window, round_length = 8 * window, _minibatches(plan.replicas[0], size)
    return 2 * depth, ceil_div(window, round_length) * round_length, depth


def _minibatches(round_length: int, size: int) -> int:
    """Return the fewest minibatches of `size` microbatches that are whole rounds."""
    return math.lcm(round_length, size) // size


def _returned(timeline: Timeline, plan: Plan, minibatch: int) -> float:
    """Return the end of the first stage's backward of a minibatch's first microbatch."""
    microbatch = minibatch * plan.num_microbatches
    events = timeline.events[plan.rank_of(0, microbatch)]
    return next(event.end_seconds for event in events if event.instruction == Backward(microbatch))


def _depth(plan: Plan) -> int:
    """Return the microbatches that a full pipeline holds; for GPipe, which is never full, 1F1B's."""
    if not plan.traits.has_warm_up:
        plan = replace(plan, schedule=DEFAULT)
    return max(in_flight_per_stage(plan, UNLIMITED)[0], plan.weight_lag or 0) * plan.replicas[0]


def _instructions_per_microbatch(plan: Plan) -> int:
    """Return the number of instructions for a microbatch.

    They are a forward and a backward in each stage, two sends and two receives at each cut, and updates
    without a flush. A split backward counts twice, and a reduction after each of them once.
    """
    halves = plan.num_stages * plan.traits.splits_backward
    halves += sum(plan.zero_of(s) == 2 for s in range(plan.num_stages))
    updates = 2 * plan.num_stages * plan.is_asynchronous // plan.num_microbatches
    return 6 * plan.num_stages - 4 + halves + updates


def _idle_share(busy_seconds: float, seconds: float, num_ranks: int) -> float:
    return 1.0 - busy_seconds / (seconds * num_ranks) if seconds else 0.0
