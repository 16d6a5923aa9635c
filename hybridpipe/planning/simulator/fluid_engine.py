"""Fluid engine: jobs that share resources, each as fast as its scarcest one allows, from event to event.

A job is an amount of work and the resources that it occupies, such as a processor or both ends of a link.
Each of n jobs on a resource gets `shares[n]`, and a job progresses at the least share of its resources. Not
known here: the meaning of resources and work.

Invariant: between two instants every rate is constant. Within an instant, jobs end and start first. Then only
the resources whose share has changed update their flows (all jobs with the same resources and cap are one
flow). A job that follows another at once therefore disturbs no one, and slowing down a thousand jobs on one
link costs no more than slowing down one. Equal times go in the order of scheduling, those of a flow together,
so every run is the same.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Shares(dict[int, float]):
    """`shares[n]`: the share of each of n jobs. One table serves all resources of a kind."""

    def __init__(self, share: Callable[[int], float]) -> None:
        super().__init__()
        self._share = share

    def __missing__(self, num_jobs: int) -> float:
        self[num_jobs] = self._share(num_jobs)
        return self[num_jobs]


def even(capacity: float) -> Shares:
    """Return shares in which each of n jobs gets an n-th."""
    return Shares(lambda num_jobs: capacity / num_jobs)


class Resource:
    """A resource that jobs share."""

    __slots__ = ("flows", "num_jobs", "share", "shares")

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.share = shares[1]
        self.num_jobs = 0
        self.flows: dict[_Flow, None] = {}  # those with jobs: a set in the order of starting


# The function to call at a job's end, and its argument.
_Done = tuple[Callable[[Any], None], Any]


class _Flow:
    """The jobs with the same resources and cap. All have one rate, so their order of completion never
    changes.

    Their time is virtual, as in fair queueing: `served` is the work done for a job that existed from the
    beginning (Demers, Keshav and Shenker, 1989, section 2.2).
    """

    __slots__ = ("cap", "jobs", "next_end", "rate", "resources", "served", "since", "turn")

    def __init__(self, resources: tuple[Resource, ...], cap: float) -> None:
        self.resources, self.cap = resources, cap
        self.jobs: list[tuple[float, int, _Done]] = []  # a heap, by `served` at their end
        self.served = self.since = self.rate = 0.0
        self.next_end = math.nan  # of the job that its entry in the queue is for
        self.turn = -1  # of that entry; older ones are void


class Engine:
    """The clock, and all jobs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_stopped = False  # ends `run`, even with jobs left
        self._queue: list[tuple[float, int, _Flow | _Done]] = []
        self._turn = 0
        self._flows: dict[tuple[tuple[Resource, ...], float], _Flow] = {}
        # In this instant:
        self._started: list[tuple[_Flow, float, _Done]] = []
        self._changed: dict[_Flow, None] = {}  # jobs came, went, or may have got another rate
        self._touched: list[Resource] = []  # jobs came or went

    def start(
        self,
        work: float,
        resources: tuple[Resource, ...],
        done: Callable[[Any], None],
        argument: Any,
        cap: float = math.inf,
    ) -> None:
        """Start a job; after its last bit of work `done(argument)` is called.

        Args:
            cap: the most work that the job can do in a second, whatever its resources give.
        """
        flow = self._flows.get((resources, cap))
        if flow is None:
            flow = self._flows[resources, cap] = _Flow(resources, cap)
        for resource in resources:
            resource.num_jobs += 1
        self._touched += resources
        self._started.append((flow, work, (done, argument)))

    def after(self, seconds: float, done: Callable[[Any], None], argument: Any) -> None:
        """Call `done(argument)` later: a job that nothing slows down."""
        self._turn += 1
        heappush(self._queue, (self.now + seconds, self._turn, (done, argument)))

    def run(self) -> None:
        """Advance until no job is left, or until `is_stopped`."""
        queue = self._queue
        self._settle()
        while queue and not self.is_stopped:
            at, turn, due = heappop(queue)
            if not isinstance(due, _Flow):
                self.now = at
                done, argument = due
                done(argument)
            elif due.turn == turn:
                self.now = at
                self._end(due)
            # Otherwise this instant has further events, or no rate has changed.
            if (self._started or self._changed) and (not queue or queue[0][0] > self.now):
                self._settle()

    def _end(self, flow: _Flow) -> None:
        """End the next job of a flow, and all that end with it."""
        end, jobs = flow.next_end, flow.jobs
        flow.served, flow.since, flow.next_end = end, self.now, math.nan
        self._changed[flow] = None
        while jobs and jobs[0][0] <= end:
            done, argument = heappop(jobs)[2]
            for resource in flow.resources:
                resource.num_jobs -= 1
            self._touched += flow.resources
            done(argument)

    def _settle(self) -> None:
        """Set the rates of started jobs, and of jobs whose share has changed."""
        now, changed = self.now, self._changed
        for flow in changed:
            if not flow.jobs:
                for resource in flow.resources:
                    resource.flows.pop(flow, None)
        for flow, work, done in self._started:
            if flow.jobs:
                flow.served += (now - flow.since) * flow.rate
            else:
                flow.served = flow.rate = 0.0
                for resource in flow.resources:
                    resource.flows[flow] = None
            flow.since = now
            self._turn += 1
            heappush(flow.jobs, (flow.served + work, self._turn, done))
            changed[flow] = None
        for resource in self._touched:
            share = resource.shares[resource.num_jobs or 1]
            if share != resource.share:
                before, resource.share = resource.share, share
                for flow in resource.flows:
                    if flow.rate == before or flow.rate > share:  # otherwise another resource limits it
                        changed[flow] = None
        for flow in changed:
            if flow.jobs:
                self._schedule(flow)
        self._started.clear()
        changed.clear()
        self._touched.clear()

    def _schedule(self, flow: _Flow) -> None:
        now, rate, end = self.now, flow.cap, flow.jobs[0][0]
        for resource in flow.resources:
            if resource.share < rate:
                rate = resource.share
        if rate == flow.rate and end == flow.next_end:
            return
        flow.served += (now - flow.since) * flow.rate
        flow.since, flow.rate, flow.next_end = now, rate, end
        self._turn += 1
        flow.turn = self._turn
        heappush(self._queue, (now + max(0.0, end - flow.served) / rate, flow.turn, flow))
