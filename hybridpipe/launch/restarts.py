"""Restarts: the decision after an attempt has ended. Pure: processes, files and clocks are not known here.

A job restarts after a lost or failed rank. It does not restart if the failure would repeat: after a user's
mistake, or after the same error at the same step twice in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpipe.health.exit_report import PREEMPTED, Outcome

MISTAKE = 2
PEER_LOST = 14  # of a rank whose Open MPI has lost another; srun returns it in place of 137
NOT_TOLD = "no rank reported why: see its output above"
# A rank that a signal killed reports nothing, and its peers then report consequences, not the cause. ALRM is
# not listed: a rank whose MPI_Abort hangs has reported, and then ends itself by that signal.
LOST = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL", 139: "SIGSEGV"}


@dataclass(frozen=True)
class Attempt:
    """The end of an attempt.

    Args:
        ranks: number of ranks.
        code: exit code.
        cause: the first cause, for people.
        error: the cause without rank and host, as a rank reported it; empty if none did.
        step: the step of the error; None outside of training.
        has_begun: True if a rank was up, or reported its errors.
        overdue: True if the job missed the deadline after a signal to stop.
    """

    ranks: int
    code: int
    cause: str
    error: str = ""
    step: int | None = None
    has_begun: bool = True
    overdue: bool = False


def attempt(
    returncode: int,
    outcomes: Sequence[Outcome],
    ranks: int,
    has_begun: bool,
    has_started: bool = True,
    lost: str = "",
) -> Attempt:
    """Judge an attempt by the launcher's return code and the ranks' outcomes, earliest first.

    Args:
        has_begun: a rank was up, or reported its errors.
        has_started: the launcher has started a process, whatever that does.
        lost: the rank that the launcher saw being killed, if any.
    """
    code = 128 - returncode if returncode < 0 else returncode
    failures = [outcome for outcome in outcomes if outcome.code != PREEMPTED]
    if failures and returncode not in LOST:  # a killed launcher makes its ranks fail, too
        first = failures[0]
        return Attempt(ranks, first.code, first.cause, first.error, first.step, has_begun)
    if outcomes and not failures:
        return Attempt(ranks, PREEMPTED, outcomes[0].cause, "", outcomes[0].step, has_begun)
    if code in LOST or (code == PEER_LOST and lost):
        who = "a rank was lost" if returncode > 0 else "the launcher was ended"
        which = f" ({lost})" if lost else ""
        return Attempt(ranks, code, f"{who}: {LOST.get(code, 'killed')}{which}", has_begun=has_begun)
    if code == 0 and not has_started:  # srun that could launch no task (Slurm 22.05)
        return Attempt(ranks, 1, "the launcher ended with exit code 0, but started no rank", has_begun=False)
    cause = "" if code == 0 else f"the launcher ended with exit code {code}; {NOT_TOLD}"
    return Attempt(ranks, code, cause, has_begun=has_begun)


def no_restart_reason(attempts: Sequence[Attempt], max_restarts: int) -> str | None:
    """Reason that no attempt follows the last one, "" after a success or a stop; None if one follows."""
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


def stopped(last: Attempt) -> Attempt:
    """The attempt as preempted: only a signal to stop prevented a restart from a checkpoint.

    An overdue attempt stays as it is, because its failure to save must be reported.
    """
    if last.overdue:
        return last
    cause = f"the job was asked to stop, and is not restarted ({last.cause})"
    return replace(last, code=PREEMPTED, cause=cause)


def _same(before: Attempt, last: Attempt) -> bool:
    """True if both failed alike, so that a third attempt would as well. A killed rank reports no error."""
    if not (before.has_begun or last.has_begun):
        return before.code == last.code
    return bool(last.error) and (before.error, before.step) == (last.error, last.step)


def ranks_left(ranks: int, min_ranks: int, slots: int) -> int | None:
    """Number of ranks to continue with on hosts that take `slots` ranks; None if they are too few."""
    left = min(ranks, slots)
    return left if left >= max(min_ranks, 1) else None
