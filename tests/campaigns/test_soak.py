"""The soak: a seed repeats it, it counts what did happen, and a short one is run.

    pytest -m campaign tests/campaigns/test_soak.py --campaign 125 --campaign-seed 7
    pytest -m campaign tests/campaigns/test_soak.py --campaign-seed 7 -k job17        repeats one job

The campaign (off by default) runs so many random jobs, with about four faults each; an hour on two cores. It
prints how often which fault happened where.
"""

from itertools import pairwise

import pytest

from hybridpipe.health import faults
from hybridpipe.planning.plan import Plan, StageSpec
from tests.campaigns import soaking

TWO = Plan((StageSpec(0, 3), StageSpec(3, 6)), schedule="pipedream", num_microbatches=1)
LOG = """hybridpipe: rank 1: injected kill at forward, step 2, microbatch 0, time 1
hybridpipe: attempt 0: a rank was lost: SIGKILL; restarting from where it began
hybridpipe: done after 2 attempts
"""


def test_a_seed_repeats_a_soak_and_asks_for_faults_that_there_are():
    jobs = [soaking.random_job(7, number) for number in range(60)]
    assert jobs == [soaking.random_job(7, number) for number in range(60)]
    assert jobs != [soaking.random_job(8, number) for number in range(60)]
    for job in jobs:
        parsed = faults.parse(";".join(map(str, job.faults)))
        assert [fault.attempt for fault in parsed] == list(range(len(parsed)))
        assert all(fault.rank < job.plan.num_ranks for fault in parsed)
    assert len({job.plan for job in jobs}) > 8


def test_no_fault_comes_twice_in_a_row():
    """Seed 3, job 7: `launch` took the same error while saving the same step for one that always comes."""
    for job in (soaking.random_job(seed, number) for seed in range(5) for number in range(60)):
        told = [(fault.rank, fault.point, fault.kind, fault.step) for fault in job.faults]
        assert all(one != other for one, other in pairwise(told))


def test_only_faults_that_happened_count():
    killed = soaking.Fault(1, "forward", "kill", 2, 0)
    again = soaking.Fault(1, "forward", "kill", 9, 1)
    assert soaking._came(killed, LOG) and not soaking._came(again, LOG)
    outcome = soaking.Outcome(soaking.Job(3, TWO, (killed, again)), (killed,), 5.0, "exit code 1")
    report = soaking.report([outcome])
    assert "1 faults in 1 jobs, 5 s" in report and "1 did not" in report


@pytest.mark.timeout(200)
def test_a_short_soak(tmp_path):
    """A rank is killed with minibatches in flight; rank 0 fails while it saves; a message is wrong."""
    through = (
        soaking.Fault(1, "forward", "kill", 7, 0),
        soaking.Fault(0, "save-manifest", "raise", None, 1),
        soaking.Fault(0, "send-activation", "badsize", 15, 2),
    )
    done = soaking.Soak(tmp_path).run(soaking.Job(0, TWO, through))
    log = tmp_path / "job-0" / "log.txt"
    assert not done.wrong, f"{done.wrong}\n{log.read_text() if log.exists() else ''}"
    assert done.happened == through


def pytest_generate_tests(metafunc):
    if "job" in metafunc.fixturenames:
        seed = metafunc.config.getoption("--campaign-seed")
        jobs = [soaking.random_job(seed, i) for i in range(metafunc.config.getoption("--campaign") or 125)]
        metafunc.parametrize("job", jobs, ids=[f"job{job.number} {job.name}" for job in jobs])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs jobs, with one reference for each plan."""
    return soaking.Soak(tmp_path_factory.mktemp("soak"))


@pytest.fixture(scope="module")
def outcomes(tell):
    """What has come of the jobs; told at the end."""
    found = []
    yield found
    tell(soaking.report(found))


@pytest.mark.campaign
@pytest.mark.timeout(soaking.SECONDS * (soaking.MOST_FAULTS + 3))
def test_a_training_through_faults_ends_as_one_without(job, runs, outcomes):
    outcome = runs.run(job)
    outcomes.append(outcome)
    log = runs.out / f"job-{job.number}" / "log.txt"
    faults = ";".join(map(str, job.faults))
    assert not outcome.wrong, f"{outcome.wrong}: {faults}\n{log.read_text(errors='replace')}"
