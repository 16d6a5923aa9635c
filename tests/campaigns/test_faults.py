"""The matrix of faults: every way to fail, at every point, on every kind of rank.

    pytest -m campaign tests/campaigns/test_faults.py                        all of it, an hour on two cores
    pytest -m campaign tests/campaigns/test_faults.py -k "kill and 2-1"      those whose names contain both
    pytest -m campaign tests/campaigns/test_faults.py --campaign 20          so many, drawn by --campaign-seed

Off by default. Each is a job of its own under mpirun; `faulting.Case` runs it and says what must hold. The
longest times until the job is over are printed by kind of rank and of fault.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from tabulate import tabulate

from tests.mpi.faulting import LIMIT_SECONDS, Case, Ended

KINDS = ("raise", "exit", "thread", "kill", "segv")
# plan, schedule, rank: what it is
RANKS = {
    ("1-1-1", "1f1b", 0): "first stage",
    ("1-1-1", "1f1b", 1): "middle stage",
    ("1-1-1", "gpipe", 2): "last stage",
    ("2-1", "1f1b", 1): "replica of the first stage",
    ("1-2", "1f1b", 2): "replica of the last stage",
    ("2", "1f1b", 1): "replica of the only stage",
    ("1-2", "pipedream", 0): "first stage, asynchronous",
    ("2-1", "pipedream-2bw", 0): "replica of the first stage, asynchronous",
}


def points(plan: str, schedule: str, rank: int) -> Iterator[str]:
    """The points that the rank passes."""
    replicas = [int(count) for count in plan.split("-")]
    stage = next(s for s in range(len(replicas)) if rank < sum(replicas[: s + 1]))
    first, last = stage == 0, stage == len(replicas) - 1
    yield from ("forward", "backward", "step", "evaluate")
    if first or last:
        yield "load"
    if not first:
        yield from ("receive-activation", "send-gradient")
    if not last:
        yield from ("send-activation", "receive-gradient")
    if replicas[stage] > 1 or schedule != "pipedream":
        yield "all-reduce"


def cases() -> list[Case]:
    """The whole matrix."""
    return [
        Case(plan, schedule, rank, point, kind)
        for plan, schedule, rank in RANKS
        for point in points(plan, schedule, rank)
        for kind in KINDS
    ]


def pytest_generate_tests(metafunc):
    chosen, count = cases(), metafunc.config.getoption("--campaign")
    if count is not None:
        seed = metafunc.config.getoption("--campaign-seed")
        chosen = random.Random(seed).sample(chosen, min(count, len(chosen)))
    metafunc.parametrize("case", chosen, ids=str)


def table(found: Sequence[tuple[Case, Ended]]) -> str:
    """The longest time until the end, and in how many jobs, by kind of rank and fault."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, ended in found:
        rank = RANKS[case.plan, case.schedule, case.rank]
        seconds[f"{rank} ({case.plan} {case.schedule})"][case.kind].append(ended.seconds)
    rows = [
        {"seconds until the end, at most": rank}
        | {kind: f"{max(each):.1f} ({len(each)})" for kind, each in kinds.items()}
        for rank, kinds in seconds.items()
    ]
    return tabulate(rows, headers="keys", tablefmt="github")


@pytest.fixture(scope="module")
def ended_jobs(tell):
    """The ends of all jobs; told when they are over."""
    found: list[tuple[Case, Ended]] = []
    yield found
    tell(table(found))


@pytest.mark.campaign
@pytest.mark.timeout(LIMIT_SECONDS + 30)
def test_the_job_is_over_and_tells_why(case, ended_jobs):
    ended, mistakes = case.run()
    ended_jobs.append((case, ended))
    assert not mistakes, f"{mistakes}\n{ended.output}"
