"""When a job is started again, and what its attempt came to: decided from what is known, with no process."""

import pytest

from hybridpipe.health.exit_report import Outcome
from hybridpipe.launch.restarts import Attempt, attempt, no_restart_reason, ranks_left, stopped


def told(code, cause="", step=None, at=0.0, rank=0):
    return Outcome(rank, code, cause, cause, step, at)


LOST = Attempt(4, 137, "a rank was lost: SIGKILL")
RAISED = Attempt(4, 1, "rank 1 on host a, step 7: E", "E", 7)


@pytest.mark.parametrize(
    "returncode, words, code, cause",
    [
        (0, [], 0, ""),
        (1, [told(1, "first"), told(1, "then")], 1, "first"),
        (1, [told(2, "a mistake")], 2, "a mistake"),  # mpirun 4 says 1 whatever they return
        (1, [told(75, "stopped"), told(75, "stopped")], 75, "stopped"),
        (75, [told(75, "stopped"), told(1, "no disk")], 1, "no disk"),
        (137, [told(1, "a peer that missed it")], 137, "a rank was lost: SIGKILL"),
        (142, [told(1, "E")], 1, "E"),  # its MPI_Abort hung, and the alarm ended it
        (-9, [], 137, "the launcher was ended: SIGKILL"),
        (-9, [told(1, "rank 2 gives no answer")], 1, "rank 2 gives no answer"),  # the watchdog ended mpirun
        (213, [], 213, "the launcher ended with exit code 213; no rank reported why: see its output above"),
    ],
)
def test_what_an_attempt_came_to(returncode, words, code, cause):
    found = attempt(returncode, words, 4, has_begun=True)
    assert (found.code, found.cause) == (code, cause)


@pytest.mark.parametrize("returncode, said", [(137, "SIGKILL"), (14, "killed")])
def test_a_lost_rank_is_named_also_where_srun_returns_the_code_of_another(returncode, said):
    found = attempt(returncode, [], 4, has_begun=True, lost="rank 1 on host h2")
    assert found.cause == f"a rank was lost: {said} (rank 1 on host h2)"
    for code in (0, 4):  # the others of a rank that exits with 4 are killed by srun
        assert "lost" not in attempt(code, [], 4, has_begun=True, lost="rank 1 on host h2").cause


def test_a_launcher_that_launched_nobody_has_not_trained():
    """srun returns 0 where its tasks could not be launched: a requeued job was over, and done, untrained."""
    found = attempt(0, [], 4, has_begun=False, has_started=False)
    assert (found.code, found.cause) == (1, "the launcher ended with exit code 0, but started no rank")
    assert no_restart_reason([found], 3) is None


@pytest.mark.parametrize(
    "attempts, max_restarts, why",
    [
        ([Attempt(4, 0, "")], 3, ""),
        ([Attempt(4, 75, "")], 3, ""),
        ([Attempt(4, 2, "a mistake")], 3, "it would fail again"),
        ([LOST], 0, "--max-restarts is 0"),
        ([LOST], 1, None),
        ([LOST, LOST], 1, "no restarts are left of 1"),
        ([LOST, LOST], 2, None),  # says nothing of a third
        ([RAISED, RAISED], 9, "the same error came at step 7 twice in a row"),
        ([Attempt(1, 1, "E", "E")] * 2, 9, "the same error came outside of training twice in a row"),
        ([RAISED, Attempt(4, 1, "E", "E", 9)], 9, None),  # it got further
        ([RAISED, Attempt(4, 1, "F", "F", 7)], 9, None),
        ([RAISED, LOST, RAISED], 9, None),
        (
            [Attempt(4, 213, "", has_begun=False)] * 2,
            9,
            "the same error came before any rank was up twice in a row",
        ),
    ],
)
def test_whether_it_is_started_again(attempts, max_restarts, why):
    assert no_restart_reason(attempts, max_restarts) == why


def test_a_stop_between_two_attempts_is_a_preemption_but_not_one_that_missed_its_deadline():
    assert stopped(LOST).code == 75
    late = Attempt(4, 143, "the job did not stop within the deadline of 9 s", overdue=True)
    assert stopped(late) == late


@pytest.mark.parametrize("slots, left", [(8, 4), (3, 3), (2, 2), (1, None), (0, None)])
def test_fewer_ranks_but_not_too_few(slots, left):
    assert ranks_left(4, 2, slots) == left
