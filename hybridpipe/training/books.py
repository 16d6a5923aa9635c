"""Books: what a training knows of itself beside the state of its ranks: where it stands, its epochs, its
records; and how that goes into a checkpoint and comes back.

One for each rank, kept by `Trainer`. Invariant: what is loaded is what was described, or nothing is.
"""

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hybridpipe.checkpoint import snapshot
from hybridpipe.checkpoint.names import name_of, step_of
from hybridpipe.checkpoint.policy import Checkpointing, Keeper
from hybridpipe.checkpoint.resume import (
    Found,
    Nothing,
    changed_line,
    check_model,
    find,
    is_exact,
    load,
    refuse_changed,
)
from hybridpipe.checkpoint.snapshot import Saver
from hybridpipe.comm.groups import meet
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status
from hybridpipe.data.samples import DRAWN_ANEW
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import UserError, shown
from hybridpipe.health import preemption
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.stage.state import pack
from hybridpipe.stage.statistics import statistics
from hybridpipe.training.metrics import Past, Recorder
from hybridpipe.training.train_state import SoFar, Standing, read_so_far


class Sizes(NamedTuple):
    """What randomness and the order of the samples follow from; a training goes on with the same only."""

    seed: int
    minibatch_size: int


class Books:
    """Where a training stands and what it has seen.

    Args:
        settings: what else is trained by, as text by name; a checkpoint's training had the same, or what has
            changed is asked for (`find`).
        history: an entry for each epoch, of the runs before a checkpoint, too.
    """

    def __init__(self, sizes: Sizes, world: MPI.Comm, settings: Callable[[], Mapping[str, str]]) -> None:
        self.sizes, self.world, self._settings = sizes, world, settings
        self._data: Mapping[str, str] = {}  # the fingerprint of what was trained on last
        self._allow_changed = False
        self.standing, self.recorder = Standing(), Recorder()
        self.history: list[dict[str, Any]] = []
        self._found: Found | None = None  # to be loaded when there is a worker
        self._found_data: Found | None = None  # whose data set is to be compared
        self._came_from: Path | None = None
        self._saver: Saver | None = None

    def begin_epoch(self, dataset_samples: int, shuffle: bool) -> SoFar:
        """Go on with the epoch that a checkpoint, or a stop, has left begun; else begin one."""
        begun = self.standing.so_far
        if begun is None or not begun.position:
            begun = self.standing.so_far = SoFar(dataset_samples, shuffle)
        elif (begun.dataset_samples, begun.shuffle) != (dataset_samples, shuffle):
            raise UserError(
                f"epoch {self.standing.epoch} was begun with {begun.dataset_samples} samples and shuffle = "
                f"{begun.shuffle}, and cannot go on with {dataset_samples} and {shuffle}"
            )
        return begun

    def end_epoch(self, validation: dict[str, float] | None) -> dict[str, Any]:
        """All of it was trained on, and evaluated if it is to be. Its entry of the history."""
        so_far = self.standing.so_far
        assert so_far is not None
        entry: dict[str, Any] = {
            "epoch": self.standing.epoch,
            "loss": so_far.loss_sum / so_far.num_samples,
            "seconds": so_far.seconds,
        }
        if validation is not None:
            entry["validation"] = self.recorder.metrics = validation
        self.recorder.training_seconds += so_far.seconds
        self.history.append(entry)
        self.standing.epoch += 1
        self.standing.so_far = None
        return entry

    @property
    def resume_point(self) -> ResumePoint:
        """Where the training stands between two epochs, or where it was stopped."""
        return self._so_far.resume_point(self.sizes.minibatch_size)

    @property
    def _so_far(self) -> SoFar:
        return self.standing.so_far or SoFar(0, shuffle=True)

    def leave_if_preempted(self, folder: str | os.PathLike[str]) -> None:
        """Raises Preempted, on all ranks alike, if one was asked to stop; all there is to save is saved."""
        if self.standing.preempted:
            step, saved = self.standing.step, "before the first minibatch, with nothing to save"
            if step:
                saved = f"at step {step}, saved as {Path(folder) / name_of(step)}"
            preemption.stop(f"stopped {saved}", step, partial(meet, self.world))

    def keeper(
        self, worker: Worker, asked: Checkpointing, microbatch_size: int, anew: bool = False
    ) -> Keeper:
        """Who saves. Collective, the first time.

        Args:
            anew: also what is in the folder already.
        """
        if self._saver is None:
            with rank_status.waiting("making communicators", range(self.world.size)):
                self._saver = Saver(self.world.Dup())

        describe = partial(self._described, worker, microbatch_size)
        saved = None if anew else self._step_in(asked.folder)
        return Keeper(asked, self._saver, worker, self.standing.step, saved, describe)

    def _described(self, worker: Worker, microbatch_size: int) -> dict[str, Any]:
        """What a manifest says beside the step, of a snapshot whose losses are just in."""
        so_far = replace(self._so_far, position=self._so_far.recorded)  # by now it may be further
        run = {
            **self.sizes._asdict(),
            "microbatch_size": microbatch_size,
            "ranks": self.world.size,
            "past": asdict(self.recorder.past()),
            "settings": dict(self._settings()),
            "data": dict(self._data),
            "history": self.history,
            "so_far": asdict(so_far),
            "model": snapshot.described_model(worker),
            "statistics": sorted(statistics(worker.model)),
        }
        return {
            "epoch": self.standing.epoch,
            "position": so_far.position,
            "plan": snapshot.plan_json(worker.plan),
            "versions": snapshot.software(),
            "run": pack(run, "run", {}),
        }

    def find(self, source: Path, model: nn.Module, allow_changed: bool) -> Found | Nothing:
        """A checkpoint that can be gone on with; `load` will. Collective.

        Args:
            allow_changed: settings may be others than the checkpoint's training had; the new ones count.

        Raises:
            UserError: it is damaged, or of another training.
        """
        found = find(self.world, source)
        if isinstance(found, Nothing):
            return found
        where = str(found.path)
        check_model(found, model)
        for name, value in self.sizes._asdict().items():
            if found.run.get(name) != value:
                got = shown(found.run.get(name))
                raise UserError(f"{where}: {name}: the training has {value}, the checkpoint {got}")
        read_so_far(found.run.get("so_far"), where)
        _past(found)
        self._allow_changed = allow_changed
        self._compare(found, _settings_of(found), self._settings())
        self._found = self._found_data = found
        return found

    def check_data(self, facts: Mapping[str, str]) -> None:
        """Compare the first data set after `find` with the one that the checkpoint's training had.

        Args:
            facts: its fingerprint, the same on every rank.
        """
        found, self._found_data, self._data = self._found_data, None, facts
        then = None if found is None else found.run.get("data")
        if found is not None and isinstance(then, dict):
            self._compare(found, then, facts)

    def _compare(self, found: Found, then: Mapping[str, object], now: Mapping[str, str]) -> None:
        """Refuse, or tell, what has changed of what both say; older checkpoints do not say what they had.

        One of step 0 is an imported one: nothing was trained by its settings.
        """
        for name, before in then.items() if found.manifest.step else ():
            if name in now and before != now[name] and DRAWN_ANEW not in (before, now[name]):
                line = changed_line(name, now[name], before)
                if not self._allow_changed:
                    refuse_changed(str(found.path), line)
                self._tell_changed(line)

    def _tell_changed(self, line: str) -> None:
        if self.world.rank == 0:
            print(f"hybridpipe: resuming with changed settings: {line}", file=sys.stderr, flush=True)

    def load(self, worker: Worker) -> None:
        """Go on with what was found, if anything was. Collective. Raises UserError if it does not fit."""
        found, self._found = self._found, None
        if found is None:
            return
        for line in load(worker, found, self._allow_changed):
            self._tell_changed(line)
        so_far = read_so_far(found.run["so_far"], str(found.path))
        if not is_exact(found, worker.plan):  # another pipeline fills from here
            so_far.stream_start = so_far.position
        manifest = found.manifest
        self.standing = Standing(manifest.step, manifest.epoch, so_far if so_far.position else None)
        self._came_from = found.path
        self.recorder.go_on(_past(found))
        self.history = found.run["history"]

    def close(self) -> None:
        """Wait for what is being saved. Collective."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _step_in(self, folder: str | os.PathLike[str]) -> int | None:
        """The step that the training has come from, if that checkpoint is in this folder."""
        came = self._came_from
        if came is None or came.parent.resolve() != Path(folder).resolve():
            return None
        return step_of(came)


def _settings_of(found: Found) -> dict[str, object]:
    """As the checkpoint has them, but for a loss of another version of Python, which compiles differently."""
    settings = found.run.get("settings")
    python = str(found.manifest.versions.get("python")).split(".")[:2]
    left_out = () if python == list(platform.python_version_tuple()[:2]) else ("loss",)
    found_ones = settings if isinstance(settings, dict) else {}
    return {name: value for name, value in found_ones.items() if name not in left_out}


def _past(found: Found) -> Past:
    """The records before it. Raises UserError if the manifest does not say."""
    try:
        past = Past(**found.run["past"])
        list(found.run["history"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{found.path}: past and history cannot be understood: {error}") from None
    return past
