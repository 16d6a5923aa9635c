"""Snapshots: all ranks' parts of a checkpoint, taken at a resume point, written in the background.

A snapshot is copied on the training thread, right after the update; from then on training goes its way. A
thread on each rank writes that rank's files and tells rank 0, whose thread publishes them once every rank has
its own on the disk. These threads talk over a communicator of their own, so that their messages, which come
at any time, meet no collective of the training; they wait by looking now and then, not inside MPI. (To agree
through the minibatches' own reductions would take a later minibatch, and at the end there is none; to agree
through files, a shared file system that shows new names at once, as NFS does not.)

Invariant: what is published is the state after one minibatch on every rank, or it is not published. An error
on any rank ends the job with one report, and the checkpoint before stays the latest.
"""

import os
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
from hybridpipe.model.tensors import not_finite
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.stage.state import (
    State,
    described,
)

PAUSE_SECONDS = 2e-3  # between two looks for a message
# A rank that cannot write removes the directory before it tells. What others miss there is not the first
# cause: they tell only if nobody has in this time, which is longer than any rank lets others go first.
GIVEN_UP_SECONDS = 4.0
BEGUN, WRITTEN, PUBLISHED = range(3)  # tags

JSON = Any


class Snapshot(NamedTuple):
    """This rank's files of a checkpoint, before they are written.

    Args:
        learnt: the keys of what training makes of the model: trained parameters and running statistics.
    """

    step: int
    files: dict[str, State]
    learnt: frozenset[str] = frozenset()

    def not_finite(self) -> str | None:
        """The first tensor with NaN or infinity that training has made, or the optimizer keeps, in words.

        Other buffers, and frozen parameters, may well hold infinity, as masks do. A pass at the speed of
        memory: 0.1 s/GB on one core, where a copy takes 0.7.
        """
        for file in self.files.values():
            for name, tensor in file.tensors.items():
                kind, _, key = name.partition(".")
                wanted = kind in ("optimizer", "version") or (kind == "model" and key in self.learnt)
                found = not_finite(tensor) if wanted else None
                if found is not None:
                    return f"after step {self.step} {name.removeprefix('model.')} is not finite: {found}"
        return None


def stage_file(stage: int) -> str:
    """The name of a stage's file, which its first replica writes."""
    return f"stage-{stage:03d}.safetensors"


def rank_file(rank: int) -> str:
    """The name of the file of what a rank has of its own."""
    return f"rank-{rank:04d}.safetensors"


def plan_json(plan: Plan) -> dict[str, JSON]:
    """What a plan does, as in plan.json; what was predicted of it is left out."""
    document: dict[str, JSON] = to_jsonable_python(asdict(plan))
    return {name: value for name, value in document.items() if name != "predicted" and value is not None}


def take(worker: Worker, step: int, point: ResumePoint) -> Snapshot:
    """A copy of this rank's state after `step` minibatches.

    Args:
        point: where that is in the stream, under an asynchronous schedule.

    Raises:
        UserError: optimizer or scheduler hold what a checkpoint cannot.
    """
    faults.at("save-snapshot", step=step)
    found = referred(worker, step, point)
    return found._replace(files={name: state.copied() for name, state in found.files.items()})


def check_finite(worker: Worker, step: int, point: ResumePoint) -> None:
    """Look at the state of which there is a checkpoint, of a version that did not look. Collective.

    Raises:
        NotSaved: it is not finite, on every rank.
    """
    found = referred(worker, step, point).not_finite()
    for told in worker.control.allgather(found):
        if told is not None:
            raise NotSaved(f"{told}; so it is in the checkpoint that was resumed from: take one before", step)


def referred(worker: Worker, step: int, point: ResumePoint) -> Snapshot:
    """Return this rank's files, their tensors still those that training works on."""
    state = worker.state_dict(point)
    files = {stage_file(s): of_stage for s, of_stage in state.stages.items()}
    return Snapshot(step, files | {rank_file(worker.control.rank): state.own}, state.learnt)


def software() -> dict[str, str]:
    """What writes a checkpoint."""
    from importlib.metadata import version

    return {
        "hybridpipe": version("hybridpipe"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def described_model(worker: Worker) -> dict[str, JSON]:
    """The whole model's tensors: their types and shapes."""
    return described(worker.model.state_dict())


class Saver:
    """This rank's part in saving. One checkpoint at a time: a new one waits for the one before.

    Args:
        communicator: of all ranks, and nobody else's.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._held: dict[Path, int] = {}  # folders that rank 0 has locked, and by which descriptors

    def start(self, snapshot: Snapshot, root: Path, manifest: dict[str, JSON] | None, keep: int) -> None:
        """Write and publish in the background; collective, each rank in its own time.

        Args:
            manifest: what it says; rank 0's counts.

        Raises:
            Exception: what went wrong with the one before, in a world of one rank; others have ended by it.
        """
        self.wait()
        self._hold(root.absolute())
        job = (snapshot, root.absolute(), manifest, keep)
        self._thread = threading.Thread(target=self._run, args=job, name="hybridpipe-checkpoint", daemon=True)
        self._thread.start()

    def _hold(self, root: Path) -> None:
        """Before anything is begun there: what another training has begun must not be given up with it."""
        if self._communicator.rank == 0 and root not in self._held:
            try:
                self._held[root] = directory.hold(root)
            except UserError as error:
                if self._communicator.size > 1:
                    failure.refuse(error)
                raise

    def wait(self) -> None:
        """Return once the checkpoint that was started is published. Raises as `start`."""
        if self._thread is not None:
            with rank_status.waiting(CHECKPOINT, range(self._communicator.size)):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait, and give the communicator back. Collective."""
        self.wait()
        self._communicator.Free()
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held = {}

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
            # Of a full disk or a lost mount one line says enough; but a mistake would not be tried again.
            failed = NotSaved(str(error), snapshot.step) if isinstance(error, UserError) else error
            if self._communicator.size == 1 or isinstance(failed, NotSaved):
                directory.abandon(root, snapshot.step)
            if self._communicator.size == 1:
                self._error = failed  # told by the training thread
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
            f"{folder}: is not seen on host {socket.gethostname()}: "
            "checkpoints go to a folder that all ranks share"
        ) from FileNotFoundError(folder)
    with rank_status.in_saving("looks whether all that was learnt is finite"):
        found = snapshot.not_finite()
    if found is not None:
        kept = "nothing is saved; the checkpoint before, if there is one, stays the last one"
        raise NotSaved(f"{found}; {kept}", snapshot.step)
    entries = []
    for name, state in snapshot.files.items():
        with rank_status.in_saving(f"writes {name}"):
            entries.append(write_shard(folder / name, state.tensors, state.meta))
    return entries
