"""Restarts: what is to follow an attempt that has ended. Pure: knows no processes, files and clocks.

A job is started again where another attempt may go better: a rank was lost, or it failed. It is not where the
same would come again: the user's mistake, or the same error at the same step twice in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpipe.health.exit_report import PREEMPTED, Outcome

MISTAKE = 2
# A rank that a signal killed cannot tell, and what its peers tell then is not the first cause. ALRM is not
# among them: a rank whose MPI_Abort hangs has told, and ends itself by it.
LOST = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL", 139: "SIGSEGV"}


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended: the exit code, the first cause, and the error and step that a rank has told."""

    ranks: int
    code: int
    cause: str
    error: str = ""
    step: int | None = None
    has_begun: bool = True  # a rank was up
    overdue: bool = False  # asked to stop, it did not by the deadline


def attempt(returncode: int, told: Sequence[Outcome], ranks: int, has_begun: bool) -> Attempt:
    """What an attempt came to, by the launcher's return code and what the ranks have told, earliest first."""
    code = 128 - returncode if returncode < 0 else returncode
    failures = [outcome for outcome in told if outcome.code != PREEMPTED]
    if failures and returncode not in LOST:  # a launcher that was killed itself says nothing
        first = failures[0]
        return Attempt(ranks, first.code, first.cause, first.error, first.step, has_begun)
    if told and not failures:
        return Attempt(ranks, PREEMPTED, told[0].cause, "", told[0].step, has_begun)
    if code in LOST:
        who = "a rank was lost" if returncode > 0 else "the launcher was ended"
        return Attempt(ranks, code, f"{who}: {LOST[code]}", has_begun=has_begun)
    if code == 0 and not has_begun:  # srun's word for it that it could launch no task (Slurm 22.05)
        return Attempt(ranks, 1, "the launcher ended with exit code 0, but no rank was up", has_begun=False)
    cause = "" if code == 0 else f"the launcher ended with exit code {code}, and no rank told why"
    return Attempt(ranks, code, cause, has_begun=has_begun)


def why_not_again(attempts: Sequence[Attempt], max_restarts: int) -> str | None:
    """Why the last attempt is not followed by another one; None if it is."""
    last = attempts[-1]
    if last.code in (0, PREEMPTED):
        return ""
    if last.code == MISTAKE:
        return "it would fail again"
    if len(attempts) > max_restarts:
        return f"no restarts are left of {max_restarts}" if max_restarts else "--max-restarts is 0"
    if len(attempts) > 1 and _same(attempts[-2], last):
        where = "before any rank was up"
        if last.has_begun:
            where = "outside of training" if last.step is None else f"at step {last.step}"
        return f"the same error came {where} twice in a row"
    return None


def stopped_instead(last: Attempt) -> Attempt:
    """An attempt that another one would have followed from a checkpoint, had nobody asked to stop."""
    if last.overdue:  # it was to save and could not, which whoever asked has to know
        return last
    cause = f"asked to stop, and so not started again ({last.cause})"
    return replace(last, code=PREEMPTED, cause=cause)


def _same(before: Attempt, last: Attempt) -> bool:
    """Would a third attempt fare the same? A rank that was killed says nothing of it."""
    if not (before.has_begun or last.has_begun):
        return before.code == last.code
    return bool(last.error) and (before.error, before.step) == (last.error, last.step)


def ranks_left(asked: int, min_ranks: int, slots: int) -> int | None:
    """On how many ranks the job goes on with `slots` left of all that there were; None: on too few."""
    left = min(asked, slots)
    return left if left >= max(min_ranks, 1) else None
