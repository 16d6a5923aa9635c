"""Claim: the lock of a folder, which names the training that writes there: its process, host and job.

Torch and MPI are not known here; one process claims for all ranks. Invariant: of two trainings in one folder
the second is refused before it writes anything, and one whose process is gone keeps nobody out.
"""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakSet

from hybridpipe.checkpoint.directory import make_folder
from hybridpipe.checkpoint.names import LOCK
from hybridpipe.environment import this_machine
from hybridpipe.errors import UserError
from hybridpipe.files import parse, writing
from hybridpipe.health.exit_report import ATTEMPT
from hybridpipe.notices import notices

LEASE_SECONDS = 100.0  # a server of NFS 4 keeps the locks of a host that is lost for 90
POLL_SECONDS = 0.2
# Without locks, from writing who has the folder to reading it: another that began at once has written then.
SETTLE_SECONDS = 0.5
_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")  # of schedulers
_STARTS = (ATTEMPT, "SLURM_RESTART_COUNT")  # of the same job, before this one
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """The training that holds a folder, as the lock's file says.

    Args:
        begun: start of the process in ticks, since another one may get its number.
        machine: equal for processes that see each other in /proc.
    """

    pid: int
    begun: str
    machine: str
    host: str
    job: str

    @property
    def is_gone(self) -> bool:
        """True if its process has ended; that of another machine has, if its job was started again."""
        if self.machine == this_machine():
            return _begun(self.pid) != self.begun
        return _is_restart() and self.job == _job()

    def __str__(self) -> str:
        if (self.pid, self.machine) == (os.getpid(), this_machine()):
            return "a Trainer of this process, which is not closed"
        return f"process {self.pid} on {self.host}{self.job and f', job {self.job}'}"


class Claim:
    """The lock of a folder, until `release` or the end of this process.

    A start after a lost one waits for the lock, which a file server may keep for a while.

    Args:
        folder: is made where it is missing.

    Raises:
        UserError: another training holds the folder, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = -1
        make_folder(folder)
        path = folder / LOCK
        seconds = LEASE_SECONDS if _is_restart() else 0.0
        end, waits = time.monotonic() + seconds, False
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _CLAIMS.add(self)
            try:
                while (remedy := self._refused()) is not None:
                    if time.monotonic() >= end:
                        raise UserError(f"{folder}: another running training writes there{remedy}")
                    if not waits:
                        notices.say(f"{folder} is still locked: waiting up to {seconds:g} s for its release")
                    waits = True
                    time.sleep(POLL_SECONDS)
            except BaseException:
                self._close()  # and leave what the other has written
                raise

    def release(self) -> None:
        """Let others have the folder; a second call does nothing."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            self._close()

    __del__ = release

    def _refused(self) -> str | None:
        """Take the lock and write who has it; return None, or what to tell of the holder."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            who = "" if holder is None or holder.is_gone else f" ({holder})"  # it has not said who it is yet
            return f"{who}: end it, or take another folder"
        except OSError:  # a file system without locks: what is written there decides, at last
            holder = self._holder()
            if holder is None or holder.is_gone:
                self._write()
                time.sleep(SETTLE_SECONDS)
                holder = self._holder()
                if holder == _this_process():
                    return None
            who = "" if holder is None else f" ({holder})"
            return f"{who}: take another folder or, if that is gone, remove {LOCK} there"
        self._write()
        return None

    def _write(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(_this_process())).encode(), 0)

    def _holder(self) -> Holder | None:
        try:
            text = os.pread(self._descriptor, _MOST_BYTES, 0)
            return parse(Holder, json.loads(text), LOCK)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # empty, or damaged
            return None

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


_CLAIMS = WeakSet[Claim]()


def _leave_to_parent() -> None:
    """Close the locks in a forked process, which would keep them after its parent's end."""
    for claim in _CLAIMS:
        if claim._descriptor >= 0:
            claim._close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _this_process() -> Holder:
    return Holder(os.getpid(), _begun(os.getpid()), this_machine(), socket.gethostname(), _job())


def _begun(pid: int) -> str:
    """Return when a process of this machine began, in ticks; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _job() -> str:
    return next((os.environ[name] for name in _JOB if name in os.environ), "")


def _is_restart() -> bool:
    """True if a supervisor or a scheduler has started this job before."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in _STARTS)
