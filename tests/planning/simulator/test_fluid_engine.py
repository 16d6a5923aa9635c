import math
import random

import pytest
from pytest import approx

from hybridpipe.planning.simulator.fluid_engine import Engine, Resource, Shares, even


class Run:
    """An engine that notes when each named job is done."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.ends: dict[str, float] = {}

    def note(self, name: str) -> None:
        self.ends[name] = self.engine.now

    def start(self, name: str, work: float, *resources: Resource, at=0.0, cap=math.inf) -> None:
        begin = lambda _: self.engine.start(work, resources, self.note, name, cap)  # noqa: E731
        self.engine.after(at, begin, None)

    def done(self) -> dict[str, float]:
        self.engine.run()
        return self.ends


def test_jobs_share_evenly():
    run, link = Run(), Resource(even(10.0))
    run.start("first", 20, link)  # 1 s alone, then half speed until the second is done, then alone
    run.start("second", 5, link, at=1.0)
    run.start("elsewhere", 20, Resource(even(10.0)))
    assert run.done() == approx({"first": 2.5, "second": 2.0, "elsewhere": 2.0})


def test_a_measured_share_need_not_be_even():
    run, processors = Run(), Resource(Shares({1: 1.0, 2: 0.9, 3: 0.6}.__getitem__))
    for name in "abc":
        run.start(name, 6, processors)
    assert run.done() == approx(dict.fromkeys("abc", 10.0))


def test_the_scarcest_resource_sets_the_pace_and_leaves_the_others_their_share():
    run, narrow, wide = Run(), Resource(even(1.0)), Resource(even(8.0))
    run.start("through", 4, narrow, wide)
    run.start("wide only", 12, wide)  # a half each is set aside, though the other cannot use it
    assert run.done() == approx({"through": 4.0, "wide only": 3.0})


def test_a_cap_holds_alone_and_a_share_below_it_in_company():
    run, link = Run(), Resource(even(10.0))
    run.start("capped", 12, link, cap=4.0)
    run.start("b", 5, link)
    run.start("c", 5, link)  # a third each until 1.5 s, when 7 are left of the first
    assert run.done() == approx({"b": 1.5, "c": 1.5, "capped": 1.5 + 7 / 4})


def naive(jobs: list[tuple[float, float, list[int], float]], shares: list) -> list[float]:
    """Ends of jobs (start, work, resources, cap): every rate anew after every event."""
    left, ends, now = {}, [0.0] * len(jobs), 0.0
    coming = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    while coming or left:
        count = [sum(r in jobs[i][2] for i in left) for r in range(len(shares))]
        rate = {i: min([jobs[i][3], *(shares[r](count[r]) for r in jobs[i][2])]) for i in left}
        steps = [left[i] / rate[i] for i in left] + [jobs[i][0] - now for i in coming[:1]]
        step = min(steps)
        now += step
        left = {i: work - step * rate[i] for i, work in left.items()}
        for i in [i for i, work in left.items() if work <= 1e-9]:
            ends[i] = now
            del left[i]
        while coming and jobs[coming[0]][0] <= now + 1e-12:
            started = coming.pop(0)
            left[started] = jobs[started][1]
    return ends


@pytest.mark.parametrize("flows", [3, 20], ids=["in few flows", "in many"])
@pytest.mark.parametrize("seed", range(30))
def test_any_jobs_end_when_the_naive_simulation_says(seed, flows):
    draw = random.Random(seed)
    shares = [
        draw.choice([lambda n: 2.0 / n, lambda n: 1.0, lambda n: [1.0, 0.9, 0.7, 0.5][min(n, 4) - 1]])
        for _ in range(4)
    ]
    resources = [Resource(Shares(share)) for share in shares]
    paths = [(draw.sample(range(4), draw.randint(1, 3)), draw.choice([0.3, math.inf])) for _ in range(flows)]
    jobs = [(draw.randint(0, 20) / 4, draw.randint(0, 12) / 4, *draw.choice(paths)) for _ in range(20)]
    run = Run()
    for i, (start, work, used, cap) in enumerate(jobs):
        run.start(str(i), work, *(resources[r] for r in used), at=start, cap=cap)
    assert run.done() == approx({str(i): end for i, end in enumerate(naive(jobs, shares))})


def test_equal_times_go_in_the_order_of_starting():
    run, link = Run(), Resource(even(1.0))
    for name in ("b", "a", "c"):
        run.start(name, 1, link)
    run.start("z", 3, Resource(even(1.0)))
    assert list(run.done()) == ["b", "a", "c", "z"] and set(run.ends.values()) == {3.0}


@pytest.fixture
def looked_at(monkeypatch):
    """Grows with every flow whose rate and next end are looked at."""
    flows, look = [], Engine._schedule
    monkeypatch.setattr(Engine, "_schedule", lambda self, flow: (flows.append(flow), look(self, flow)))
    return flows


def test_no_job_is_looked_at_where_its_share_does_not_change(looked_at):
    engine = Engine()
    free = Resource(Shares(lambda n: 1.0))
    for i in range(100):
        engine.start(1.0 + i, (free,), lambda _: None, None, cap=2.0 + i)  # flows of their own
        engine.start(1.0 + i, (Resource(even(1.0)),), lambda _: None, None)
    engine.run()
    assert engine.now == 100 and len(looked_at) == 200  # as they start


def test_jobs_of_a_flow_cost_no_more_to_slow_down_than_one(looked_at):
    """Each of a thousand messages on a link was looked at whenever one came or went: 3 s a simulation."""
    engine, link = Engine(), Resource(even(1.0))
    for i in range(1000):
        engine.after(i, lambda i: engine.start(1e6 + i, (link,), lambda _: None, None), i)
    engine.run()
    assert engine.now == approx(1e9 + 999 * 1000 / 2) and len(looked_at) <= 2 * 1000


def test_a_job_that_follows_another_at_once_disturbs_no_one(looked_at):
    engine, link = Engine(), Resource(even(1.0))

    def follow(left: int) -> None:
        if left:
            engine.start(0.5, (link,), follow, left - 1)

    engine.start(100.0, (link,), lambda _: None, None, cap=1.0)  # a flow of its own
    follow(10)
    engine.run()
    assert engine.now == approx(105) and len(looked_at) == 10 + 2  # the long one: slowed, and alone again


def test_of_a_link_that_jobs_come_and_go_on_all_see_who_is_there():
    """Simulations ask, when one ends, how many others there are."""
    engine, link = Engine(), Resource(even(1.0))
    seen: list[int] = []
    for work in (1.0, 1.0, 2.0):
        engine.start(work, (link,), lambda _: seen.append(link.num_jobs), None)
    engine.run()
    assert seen == [2, 1, 0]


def test_a_job_that_comes_as_another_goes_disturbs_no_one(looked_at):
    engine, link = Engine(), Resource(even(1.0))
    engine.after(2.0, lambda _: engine.start(1.0, (link,), lambda _: None, None), None)
    engine.start(10.0, (link,), lambda _: None, None, cap=1.0)  # a flow of its own
    engine.start(1.0, (link,), lambda _: None, None)  # until 2.0
    engine.run()
    assert engine.now == approx(12) and len(looked_at) == 2 + 1 + 1  # two at first, the new one, the long one
