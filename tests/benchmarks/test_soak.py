"""The soak: a seed repeats it, it counts what did happen, and a short one is run."""

from itertools import pairwise

import pytest
import soak

from hybridpipe.health import faults
from hybridpipe.planning.plan import Plan, StageSpec

TWO = Plan((StageSpec(0, 3), StageSpec(3, 6)), schedule="pipedream", num_microbatches=1)
LOG = """hybridpipe: rank 1: injected kill at forward, step 2, microbatch 0, time 1
hybridpipe launch: attempt 0: a rank was lost: SIGKILL; again, from where it began
hybridpipe launch: done after 2 attempts
"""


def test_a_seed_repeats_a_soak_and_asks_for_faults_that_there_are():
    jobs = [soak.random_job(7, number) for number in range(60)]
    assert jobs == [soak.random_job(7, number) for number in range(60)]
    assert jobs != [soak.random_job(8, number) for number in range(60)]
    for job in jobs:
        parsed = faults.parse(";".join(map(str, job.faults)))
        assert [fault.attempt for fault in parsed] == list(range(len(parsed)))
        assert all(fault.rank < job.plan.num_ranks for fault in parsed)
    assert len({job.plan for job in jobs}) > 8


def test_no_fault_comes_twice_in_a_row():
    """Seed 3, job 7: `launch` took the same error while saving the same step for one that always comes."""
    for job in (soak.random_job(seed, number) for seed in range(5) for number in range(60)):
        told = [(fault.rank, fault.point, fault.kind, fault.step) for fault in job.faults]
        assert all(one != other for one, other in pairwise(told))


def test_only_faults_that_happened_count():
    killed = soak.Fault(1, "forward", "kill", 2, 0)
    again = soak.Fault(1, "forward", "kill", 9, 1)
    assert soak._came(killed, LOG) and not soak._came(again, LOG)
    outcome = soak.Outcome(soak.Job(3, TWO, (killed, again)), (killed,), 5.0, "exit code 1")
    report = soak.report([outcome], seed=7, seconds=5.0)
    assert "seed 7: 1 faults in 1 jobs" in report and "1 did not" in report
    assert "--seed 7 --only 3: 1-1 pipedream: exit code 1: rank=1,step=2,point=forward,kind=kill" in report


@pytest.mark.timeout(200)
def test_a_short_soak(tmp_path):
    """A rank is killed with minibatches in flight; rank 0 fails while it saves; a message is wrong."""
    through = (
        soak.Fault(1, "forward", "kill", 7, 0),
        soak.Fault(0, "save-manifest", "raise", None, 1),
        soak.Fault(0, "send-activation", "badsize", 15, 2),
    )
    done = soak.Soak(tmp_path).run(soak.Job(0, TWO, through))
    log = tmp_path / "job-0" / "log.txt"
    assert not done.wrong, f"{done.wrong}\n{log.read_text() if log.exists() else ''}"
    assert done.happened == through
