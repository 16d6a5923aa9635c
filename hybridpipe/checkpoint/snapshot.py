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
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic_core import to_jsonable_python

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.shard import FileEntry, write_shard
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import CHECKPOINT, rank_status
from hybridpipe.engine.stashed_weights import Before
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import NotSaved, UserError
from hybridpipe.health import failure, faults
from hybridpipe.model.sequential import StageModule
from hybridpipe.model.tensors import not_finite
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.resume_point import ResumePoint, num_updates, versions_in_use
from hybridpipe.stage.state import (
    BATCHES_AGREED,
    SAMPLES_SEEN,
    Generators,
    State,
    described,
    name_of,
    pack,
    prefixed,
    take_optimizer,
)
from hybridpipe.stage.statistics import statistics

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


def stage_modules(worker: Worker) -> dict[int, StageModule]:
    """Return the layers of each stage that this rank holds."""
    executor = worker.executor
    return {s: stage.layers for s, stage in zip(executor.held, executor.stages, strict=True)}


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
    files = {name: state.copied() for name, state in referred(worker, point).items()}
    return Snapshot(step, files, _learnt(worker))


def check_finite(worker: Worker, step: int, point: ResumePoint) -> None:
    """Look at the state of which there is a checkpoint, of a version that did not look. Collective.

    Raises:
        NotSaved: it is not finite, on every rank.
    """
    found = Snapshot(step, referred(worker, point), _learnt(worker)).not_finite()
    for told in worker.control.allgather(found):
        if told is not None:
            raise NotSaved(f"{told}; so it is in the checkpoint that was resumed from: take one before", step)


def _learnt(worker: Worker) -> frozenset[str]:
    """The keys of this rank's trained parameters, and of running statistics."""
    found = set()
    for layers in stage_modules(worker).values():
        found |= {key for parameter, key in layers.parameters().items() if parameter.requires_grad}
        found |= {layers.key(path) for path in statistics(layers.module)}
    return frozenset(found)


def referred(worker: Worker, point: ResumePoint) -> dict[str, State]:
    """This rank's files, their tensors still those that training works on."""
    files: dict[str, State] = {}
    own = State()
    before: Before | None = None
    if worker.place is not None:
        if worker.executor.stashed is not None:
            before = worker.executor.stashed.before_flight()
        for s, layers in stage_modules(worker).items():
            buffers = layers.buffers()
            if before is not None:
                then = {layers.key(path): copy for path, copy in before.buffers.items()}
                buffers = {key: then.get(key, buffer) for key, buffer in buffers.items()}
            if worker.place.replica == 0:
                files[stage_file(s)] = _of_stage(worker, s, layers, buffers, point)
            else:
                own.tensors |= prefixed("model", buffers)
                _put_versions(worker, layers, _own_versions(worker.plan, worker.place, point), own)
        seen = worker.executor.statistics.num_samples if before is None else before.num_samples
        own.meta[SAMPLES_SEEN] = seen
    random = Generators.now(worker.device).state()
    own.tensors |= random.tensors
    own.meta |= random.meta
    return files | {rank_file(worker.control.rank): own}


def _of_stage(
    worker: Worker, s: int, layers: StageModule, buffers: Mapping[str, torch.Tensor], point: ResumePoint
) -> State:
    assert worker.place is not None
    update = worker.executor.update
    state = State(prefixed("model", {**layers.tensors(), **buffers}))
    state.meta["num_minibatches"] = update.num_minibatches
    batches = worker.executor.statistics.num_batches[worker.executor.held.index(s)]
    state.meta[BATCHES_AGREED] = {layers.key(path): number for path, number in batches.items()}
    if update.optimizer is not None:
        take_optimizer(update.optimizer, layers.parameters(), state, update.given.options)
    if update.scheduler is not None:
        held = pack(update.scheduler.state_dict(), "lr_scheduler", state.tensors)
        given = pack(update.given.scheduler, "lr_scheduler.given", state.tensors)
        state.meta["lr_scheduler"] = {"class": name_of(update.scheduler), "state": held, "given": given}
    _put_versions(worker, layers, versions_in_use(worker.plan, worker.place, point), state)
    if worker.plan.is_asynchronous:
        state.meta["newest"] = num_updates(worker.plan, worker.place.stage, point)
    return state


def _own_versions(plan: Plan, place: Place, point: ResumePoint) -> list[int]:
    """What a replica needs beyond what the first one writes: under vertical sync they may differ."""
    written = versions_in_use(plan, Place(place.stage, 0), point)
    return [number for number in versions_in_use(plan, place, point) if number not in written]


def _put_versions(worker: Worker, layers: StageModule, numbers: list[int], state: State) -> None:
    state.meta["versions"] = numbers
    if not numbers:
        return
    assert worker.executor.stashed is not None
    for number, weights in worker.executor.stashed.kept(numbers).items():
        state.tensors |= prefixed(f"version.{number}", layers.weights(weights))


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
