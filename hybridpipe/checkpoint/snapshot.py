"""Snapshots: the state of all ranks, copied at a resume point and written in the background.

The training thread copies, or waits; a thread on each rank writes, and rank 0's publishes when all have.
The threads have their own communicator, and poll it rather than wait inside MPI.
Invariant: a published checkpoint is the state after one minibatch on every rank. An error ends the job.
"""

import platform
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic_core import to_jsonable_python

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.shard import FileEntry, write_shard
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import CHECKPOINT, rank_status
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import NotSaved, UserError
from hybridpipe.health import failure, faults
from hybridpipe.model.held_part import whole_forms
from hybridpipe.model.tensors import not_finite
from hybridpipe.notices import notices
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.stage.state import (
    StageState,
    described,
)

PAUSE_SECONDS = 2e-3  # between two polls for a message
# A rank that cannot write removes the directory before it reports its error. Other ranks then miss the
# directory, which is no first cause: they wait this long before they report, longer than any other delay.
GIVEN_UP_SECONDS = 4.0
BEGUN, WRITTEN, PUBLISHED = range(3)  # tags

JSON = Any


class Snapshot(NamedTuple):
    """This rank's files of a checkpoint, before they are written.

    Args:
        step: minibatches trained on.
        files: state by file name.
        learnt: keys of the trained parameters and running statistics.
    """

    step: int
    files: dict[str, StageState]
    learnt: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for file in self.files.values() for tensor in file.tensors.values())

    def not_finite(self) -> str | None:
        """Describe the first learnt tensor or optimizer state with NaN or infinity; None if there is none.

        Frozen parameters and other buffers may hold infinity, as masks do. It takes 0.1 s/GB on one core, a
        copy 0.7 s/GB.
        """
        for file in self.files.values():
            for name, tensor in file.tensors.items():
                kind, _, key = name.partition(".")
                of_model = kind in ("model", "part") and key in self.learnt
                wanted = kind in ("optimizer", "version") or of_model
                found = not_finite(tensor) if wanted else None
                if found is not None:
                    return f"after step {self.step} {name.removeprefix('model.')} is not finite: {found}"
        return None


def stage_file(stage: int) -> str:
    """Name of a stage's file, which its first replica writes."""
    return f"stage-{stage:03d}.safetensors"


def rank_file(rank: int) -> str:
    """Name of the file of a rank's own state."""
    return f"rank-{rank:04d}.safetensors"


def plan_json(plan: Plan) -> dict[str, JSON]:
    """Plan as in plan.json, without its prediction."""
    document: dict[str, JSON] = to_jsonable_python(asdict(plan))
    return {name: value for name, value in document.items() if name != "predicted" and value is not None}


def take(worker: Worker, step: int, point: ResumePoint, room: int | None = None) -> tuple[Snapshot, bool]:
    """Return this rank's state after `step` minibatches, and whether it is a copy.

    Where one rank's copy does not fit, none copies: the state must be written before the training goes on.
    Under an asynchronous schedule it cannot wait for that: it copies, and says so. Collective under others.

    Args:
        point: the resume point in the current stream.
        room: bytes that this process may still take; None: not limited.

    Raises:
        UserError: optimizer or scheduler have state that a checkpoint cannot hold.
    """
    faults.at("save-snapshot", step=step)
    found = referred(worker, step, point)
    lacks = room is not None and found.num_bytes > room
    if not worker.plan.is_asynchronous:
        with rank_status.waiting("agreement on a checkpoint", range(worker.control.size)):
            copies = not any(worker.control.allgather(lacks))
        if not copies:
            return found, False
    elif room is not None and lacks:
        needs = f"a checkpoint's copy takes {found.num_bytes / 1e6:,.0f} MB of {room / 1e6:,.0f} left"
        notices.tell(f"rank {worker.control.rank}: {needs}: under asynchronous schedules it is made anyway")
    return found._replace(files={name: state.copied() for name, state in found.files.items()}), True


def check_finite(worker: Worker, step: int, point: ResumePoint) -> None:
    """Check resumed state for NaN and infinity: older versions saved it without this check. Collective.

    Raises:
        NotSaved: the state is not finite; raised on every rank.
    """
    found = referred(worker, step, point).not_finite()
    for line in worker.control.allgather(found):
        if line is not None:
            raise NotSaved(f"{line}, and so it is in the resumed checkpoint: take an earlier one", step)


def referred(worker: Worker, step: int, point: ResumePoint) -> Snapshot:
    """Return this rank's files without copying: training still changes their tensors."""
    state = worker.state_dict(point)
    files = {stage_file(s): of_stage for s, of_stage in state.stages.items()}
    return Snapshot(step, files | {rank_file(worker.control.rank): state.own}, state.learnt)


def software() -> dict[str, str]:
    """Versions of the software that writes a checkpoint."""
    from importlib.metadata import version

    return {
        "hybridpipe": version("hybridpipe"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def described_model(worker: Worker) -> dict[str, JSON]:
    """Types and shapes of the whole model's tensors."""
    return described(whole_forms(worker.model))


class Saver:
    """Writes this rank's part of checkpoints, one at a time.

    Args:
        communicator: of all ranks, used for nothing else.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, snapshot: Snapshot, root: Path, manifest: dict[str, JSON] | None, keep: int) -> None:
        """Write and publish a checkpoint in the background, after the one before is published.

        Collective, but ranks need not call it at the same time.

        Args:
            manifest: the manifest's contents besides step and files, on rank 0.
            keep: number of latest checkpoints that stay.

        Raises:
            Exception: the error of the checkpoint before, in a world of one rank; in others it ends the job.
        """
        self.wait()
        job = (snapshot, root.absolute(), manifest, keep)
        self._thread = threading.Thread(target=self._run, args=job, name="hybridpipe-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the started checkpoint is published. Raises as `start`."""
        if self._thread is not None:
            with rank_status.waiting(CHECKPOINT, range(self._communicator.size)):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait, and free the communicator. Collective."""
        self.wait()
        self._communicator.Free()

    def _run(self, snapshot: Snapshot, root: Path, manifest: dict[str, JSON] | None, keep: int) -> None:
        try:
            if self._communicator.rank == 0:
                assert manifest is not None
                self._lead(snapshot, root, manifest, keep)
            else:
                folder = self._receive(0, BEGUN)
                self._communicator.send(_written(folder, snapshot), 0, WRITTEN)
                self._receive(0, PUBLISHED)
        except BaseException as error:
            # One line suffices for a full disk or a lost mount. NotSaved, unlike UserError, allows a restart.
            failed = NotSaved(str(error), snapshot.step) if isinstance(error, UserError) else error
            if self._communicator.size == 1 or isinstance(failed, NotSaved):
                directory.abandon(root, snapshot.step)
            if self._communicator.size == 1:
                self._error = failed  # raised by the training thread
                return
            if isinstance(failed, NotSaved):
                if isinstance(error.__cause__, FileNotFoundError):
                    time.sleep(GIVEN_UP_SECONDS)
                failure.refuse(failed)
            raise  # the thread's excepthook reports it, and ends the job

    def _lead(self, snapshot: Snapshot, root: Path, manifest: dict[str, JSON], keep: int) -> None:
        with rank_status.in_saving("makes the checkpoint's folder"):
            folder = directory.begin(root, snapshot.step)
        others = range(1, self._communicator.size)
        for rank in others:
            self._communicator.send(folder, rank, BEGUN)
        files = _written(folder, snapshot)
        for rank in others:
            files += self._receive(rank, WRITTEN)
        with rank_status.in_saving("publishes the checkpoint"):
            directory.publish(root, snapshot.step, files, manifest, keep)
        for rank in others:
            self._communicator.send(None, rank, PUBLISHED)

    def _receive(self, rank: int, tag: int) -> Any:
        while not self._communicator.iprobe(rank, tag):
            time.sleep(PAUSE_SECONDS)
        return self._communicator.recv(source=rank, tag=tag)


def _written(folder: Path, snapshot: Snapshot) -> list[FileEntry]:
    if not folder.is_dir():
        raise UserError(
            f"{folder}: does not exist on host {socket.gethostname()}: "
            "the folder of checkpoints must be on a disk that all ranks share"
        ) from FileNotFoundError(folder)
    with rank_status.in_saving("checks that the state is finite"):
        found = snapshot.not_finite()
    if found is not None:
        kept = "nothing is saved; the checkpoint before, if there is one, stays the latest"
        raise NotSaved(f"{found}; {kept}", snapshot.step)
    entries = []
    for name, state in snapshot.files.items():
        with rank_status.in_saving(f"writes {name}"):
            entries.append(write_shard(folder / name, state.tensors, state.meta))
    return entries
