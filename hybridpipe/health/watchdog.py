"""Watchdog: a thread of each rank that queries all ranks when its own makes no progress, and ends the job.

Not known here: the rule that names the cause (`hang`). Invariant: it uses a communicator of its own, and time
counts only while the rank is in one instruction or one wait; between steps it belongs to the caller.
"""

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status
from hybridpipe.environment import this_machine
from hybridpipe.health import exit_report, failure, hang
from hybridpipe.health.hang import RankActivity

LONGEST_PAUSE_SECONDS = 1.0  # between two checks
ASK_SECONDS = 2.5  # a rank that can answer does so in this time
YIELD_SECONDS = 4.0  # leaves the report to a lower rank that has queried the ranks, too
QUESTION, ANSWER = 1, 2
_STATES = {  # of /proc/PID/stat, for a process of this machine
    "T": "it is stopped by a signal (SIGSTOP); kill -CONT resumes it",
    "t": "it is stopped by a debugger",
    "Z": "it has ended",
    "D": "it waits for a disk or a network file system",
}
_AT_ITS_END = f"or it has reached the end of its script ({hang.COLLECTIVE})"
_ELSEWHERE = f"it is stopped or lost, its host is down, or the link to it is cut, {_AT_ITS_END}"


class _Process(NamedTuple):
    """The process of a rank."""

    host: str
    machine: str  # equal for processes that see each other in /proc
    pid: int


class Watchdog:
    """The watchdog of this rank. Collective: all ranks of `world` make one.

    A stopped process or a cut link raises no error; MPI and Horovod wait forever. A rank without progress for
    the timeout queries all ranks and prints one report, which names the rank that does not answer or, if all
    answer, the one that the others wait for. A rank that waits for a checkpoint learns from the answers that
    the disks still accept data, and continues to wait.

    Args:
        timeout_seconds: longest time without progress.
    """

    def __init__(self, world: MPI.Comm, timeout_seconds: float) -> None:
        self._communicator = world.Dup()
        self._rank = world.rank
        self._processes = world.allgather(_this_process())
        self._timeout_seconds = timeout_seconds
        self._pause_seconds = min(LONGEST_PAUSE_SECONDS, timeout_seconds / 10)
        self._look()
        self._queried_by: dict[int, float] = {}  # rank -> time of its query
        self._answers: dict[int, RankActivity] = {}
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybridpipe-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before MPI's end

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        """End the thread and free the communicator. Collective."""
        self.stop()
        self._communicator.Free()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(self._pause_seconds):
            self._listen()
            now = time.monotonic()
            # a job may have been suspended as a whole: such a pause counts as two checks at most
            passed, last = min(now - last, 2 * self._pause_seconds), now
            if rank_status.is_busy and not rank_status.has_moved_since(self._doing, self._wait_for):
                self._still_seconds += passed
            else:
                self._look()
            if self._still_seconds >= self._timeout_seconds:
                self._end()

    def _look(self) -> None:
        """Count from now on how long the rank stands still."""
        self._doing, self._wait_for, self._still_seconds = rank_status.doing, rank_status.wait, 0.0

    def _listen(self) -> None:
        """Answer queries, and note the answers to this rank's own."""
        status = MPI.Status()
        while (message := self._communicator.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([data, MPI.BYTE])
            if status.tag == QUESTION:
                self._queried_by[status.source] = time.monotonic()
                self._send(self._activity().encode(), status.source, ANSWER)
            else:
                self._answers[status.source] = RankActivity.decode(bytes(data))
        self._sent = [each for each in self._sent if not each[0].Test()]

    def _send(self, data: bytes, rank: int, tag: int) -> None:
        self._sent.append((self._communicator.Isend([data, MPI.BYTE], rank, tag), data))

    def _activity(self) -> RankActivity:
        wait = rank_status.wait_among_all
        return RankActivity(
            str(rank_status),
            self._still_seconds,
            "" if wait is None else str(wait),
            () if wait is None else tuple(peer for peer in wait.peers if peer != self._rank),
            _stacks(threading.get_ident()),
            rank_status.saving,
            time.monotonic() - rank_status.disk_moved_at,
        )

    def _end(self) -> None:
        """Query all ranks, print the report and end the job, unless there is progress after all."""
        began, doing, wait = time.monotonic(), rank_status.doing, rank_status.wait
        self._answers = {}
        for rank in range(len(self._processes)):
            if rank != self._rank:
                self._send(b"?", rank, QUESTION)
        self._wait(ASK_SECONDS, enough=len(self._processes) - 1)
        if any(rank < self._rank and when >= began - ASK_SECONDS for rank, when in self._queried_by.items()):
            self._wait(YIELD_SECONDS)
        if rank_status.has_moved_since(doing, wait) or self._ended.is_set():
            return
        activities: dict[int, RankActivity | None] = dict.fromkeys(range(len(self._processes)))
        activities.update(self._answers | {self._rank: self._activity()})
        if hang.meets_other_jobs(activities, self._timeout_seconds):
            self._still_seconds = 0.0
            return
        written = hang.seconds_since_saving_moved(activities, self._rank)
        if written is not None and written < self._timeout_seconds:
            self._still_seconds = written
            return
        report = self._report(activities)
        exit_report.tell(1, report[-1].removeprefix("hybridpipe: "), "no progress", rank_status.step)
        failure.print_in_one_piece("\n".join(report))
        failure.end_launcher_if_stuck()
        failure.end_job(1)

    def _wait(self, seconds: float, enough: int | None = None) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and (enough is None or len(self._answers) < enough):
            self._listen()
            time.sleep(0.02)

    def _report(self, activities: dict[int, RankActivity | None]) -> list[str]:
        hosts = {rank: process.host for rank, process in enumerate(self._processes)}
        stacks = [
            f"rank {rank} on host {hosts[rank]}:\n{each.stacks}" for rank, each in activities.items() if each
        ]
        ranks, what = hang.cause(activities, self._rank)
        if len(ranks) > 1 and what == "wait for each other":
            who = f"ranks {', '.join(map(str, ranks))}"
        else:
            who = f"rank {ranks[0]} on host {hosts[ranks[0]]}"
            if activities[ranks[0]] is None:
                others = f" (nor do ranks {', '.join(map(str, ranks[1:]))})" if ranks[1:] else ""
                what = f"gives no answer{others}: {self._fate(ranks[0])}"
        return [
            *stacks,
            f"hybridpipe: no progress for {self._timeout_seconds:g} s (--hang-timeout); the ranks' status:",
            *hang.describe(activities, hosts),
            f"hybridpipe: {who} {what}; reported by rank {self._rank}; ending the job",
        ]

    def _fate(self, rank: int) -> str:
        """Return the likely reason why a rank does not answer."""
        process, this = self._processes[rank], self._processes[self._rank]
        if (process.host, process.machine) != (this.host, this.machine):
            return _ELSEWHERE
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "its process is gone"
        return _STATES.get(
            state, f"its process is alive but blocked outside Python, or its link is cut, {_AT_ITS_END}"
        )


def _this_process() -> _Process:
    return _Process(socket.gethostname(), this_machine(), os.getpid())


def _stacks(excluded_thread: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"  thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != excluded_thread
    )


def watch(world: MPI.Comm, timeout_seconds: float) -> Watchdog | None:
    """Start a watchdog; None: there is one rank only, or the timeout is 0. Collective.

    Args:
        timeout_seconds: longest time without progress.
    """
    if world.size == 1 or timeout_seconds == 0:
        return None
    return Watchdog(world, timeout_seconds)
