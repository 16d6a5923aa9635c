"""Sharing: jobs that share resources, each as fast as its scarcest one allows; time goes from event to event.

A fluid model: a job is an amount of work and the resources that it occupies, such as a processor or both
ends of a link. Each of n jobs on a resource gets `shares[n]`, and a job goes on at the least of what its
resources give it. Not known here: what the resources and the work stand for.

Invariant: between two instants every rate is constant. Within an instant, jobs end and start first; then the
resources whose share has changed, and only they, look at their jobs, so that a job that follows another at
once disturbs no one. Equal times go in the order of scheduling, so every run is the same.
"""

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any


class Shares(dict[int, float]):
    """`shares[n]`: what each of n jobs gets. One table serves all resources of a kind."""

    def __init__(self, share: Callable[[int], float]) -> None:
        super().__init__()
        self._share = share

    def __missing__(self, num_jobs: int) -> float:
        self[num_jobs] = self._share(num_jobs)
        return self[num_jobs]


def even(capacity: float) -> Shares:
    """Each of n jobs gets an n-th."""
    return Shares(lambda num_jobs: capacity / num_jobs)


class Resource:
    """What jobs share."""

    __slots__ = ("jobs", "share", "shares")

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.share = shares[1]
        self.jobs: dict[_Job, None] = {}  # a set in the order of starting


class _Job:
    __slots__ = ("argument", "cap", "done", "left", "rate", "resources", "since", "turn")

    def __init__(
        self,
        left: float,
        since: float,
        resources: Sequence[Resource],
        cap: float,
        done: Callable[[Any], None],
        argument: Any,
    ) -> None:
        self.left, self.since, self.resources, self.cap = left, since, resources, cap
        self.done, self.argument = done, argument
        self.rate = 0.0
        self.turn = -1  # of its valid entry in the queue; older ones are void


class Engine:
    """The clock, and all jobs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, _Job]] = []
        self._turn = 0
        self._started: list[_Job] = []  # in this instant
        self._touched: list[Resource] = []  # jobs came or went in this instant

    def start(
        self,
        work: float,
        resources: Sequence[Resource],
        done: Callable[[Any], None],
        argument: Any,
        cap: float = math.inf,
    ) -> None:
        """Begin a job; after its last bit of work `done(argument)` is called.

        Args:
            cap: the most that the job can do in a second, whatever its resources give.
        """
        job = _Job(work, self.now, resources, cap, done, argument)
        for resource in resources:
            resource.jobs[job] = None
        self._touched += resources
        self._started.append(job)

    def after(self, seconds: float, done: Callable[[Any], None], argument: Any) -> None:
        """Call `done(argument)` later: a job that nothing slows down."""
        self.start(seconds, (), done, argument, cap=1.0)

    def run(self) -> None:
        """Go on until no job is left."""
        queue, touched = self._queue, self._touched
        self._settle()
        while queue:
            at, turn, job = heappop(queue)
            if turn == job.turn:
                self.now = at
                for resource in job.resources:
                    del resource.jobs[job]
                touched += job.resources
                job.done(job.argument)
            if not queue or queue[0][0] > self.now:  # else there is more at this instant
                self._settle()

    def _settle(self) -> None:
        """Rates for what has started, and new rates for what has got another share."""
        slowed: dict[_Job, None] = {}
        for resource in self._touched:
            share = resource.shares[len(resource.jobs) or 1]
            if share != resource.share:
                before, resource.share = resource.share, share
                for job in resource.jobs:
                    if job.rate == before or job.rate > share:  # else something else holds it back
                        slowed[job] = None
        self._touched.clear()
        for job in self._started:
            self._schedule(job)
        self._started.clear()
        for job in slowed:
            self._schedule(job)

    def _schedule(self, job: _Job) -> None:
        rate = job.cap
        for resource in job.resources:
            if resource.share < rate:
                rate = resource.share
        if rate == job.rate:
            return
        now = self.now
        job.left = max(0.0, job.left - (now - job.since) * job.rate)
        job.since, job.rate = now, rate
        self._turn += 1
        job.turn = self._turn
        heappush(self._queue, (now + job.left / rate, self._turn, job))
