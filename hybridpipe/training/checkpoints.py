"""Checkpoints of a training: what they say beside the state of ranks, and how a training goes on from one.

One manager on each rank, kept by `Trainer`; when to save is `checkpoint.policy`'s affair. Invariant: what is
loaded is what was described, or nothing is.
"""

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
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
    load_plain,
    refuse_changed,
)
from hybridpipe.checkpoint.snapshot import Saver
from hybridpipe.comm.groups import barrier_with_timeout
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status
from hybridpipe.data.samples import DRAWN_ANEW
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import UserError, shown
from hybridpipe.health import preemption
from hybridpipe.stage.state import pack
from hybridpipe.stage.statistics import statistics
from hybridpipe.training.metrics import Past, Recorder
from hybridpipe.training.train_state import EpochProgress, TrainState


class Sizes(NamedTuple):
    """What randomness and the order of the samples follow from; a training goes on with the same only."""

    seed: int
    minibatch_size: int


class CheckpointManager:
    """Saves a training's state, and loads it.

    Args:
        settings: what else is trained by, as text by name; a checkpoint's training had the same, or what has
            changed is asked for (`find`).
    """

    def __init__(
        self,
        sizes: Sizes,
        world: MPI.Comm,
        state: TrainState,
        recorder: Recorder,
        settings: Callable[[], Mapping[str, str]],
    ) -> None:
        self._sizes, self._world, self._state, self._recorder = sizes, world, state, recorder
        self._settings = settings
        self._data: Mapping[str, str] = {}  # the fingerprint of what was trained on last
        self._allow_changed = False
        self._found: Found | None = None  # to be loaded when there is a worker
        self._found_data: Found | None = None  # whose data set is to be compared
        self._came_from: Path | None = None
        self._saver: Saver | None = None

    def leave_if_preempted(self, folder: str | os.PathLike[str]) -> None:
        """Raises Preempted, on all ranks alike, if one was asked to stop; all there is to save is saved."""
        if self._state.preempted:
            step, saved = self._state.step, "before the first minibatch, with nothing to save"
            if step:
                saved = f"at step {step}, saved as {Path(folder) / name_of(step)}"
            preemption.stop(f"stopped {saved}", step, partial(barrier_with_timeout, self._world))

    def keeper(
        self, worker: Worker, asked: Checkpointing, microbatch_size: int, anew: bool = False
    ) -> Keeper:
        """Make the keeper that saves. Collective, the first time.

        Args:
            anew: also what is in the folder already.
        """
        if self._saver is None:
            with rank_status.waiting("making communicators", range(self._world.size)):
                self._saver = Saver(self._world.Dup())

        describe = partial(self._described, worker, microbatch_size)
        saved = None if anew else self._step_in(asked.folder)
        return Keeper(asked, self._saver, worker, self._state.step, saved, describe)

    def _described(self, worker: Worker, microbatch_size: int) -> dict[str, Any]:
        """What a manifest says beside the step, of a snapshot whose losses are just in."""
        state = self._state.state_dict()
        run = {
            **self._sizes._asdict(),
            "microbatch_size": microbatch_size,
            "ranks": self._world.size,
            "past": asdict(self._recorder.past()),
            "settings": dict(self._settings()),
            "data": dict(self._data),
            **state,
            "model": snapshot.described_model(worker),
            "statistics": sorted(statistics(worker.model)),
        }
        return {
            "epoch": self._state.epoch,
            "position": state["so_far"]["position"],
            "plan": snapshot.plan_json(worker.plan),
            "versions": snapshot.software(),
            "run": pack(run, "run", {}),
        }

    def find(
        self, source: Path, model: nn.Module, or_anew: bool, allow_changed: bool
    ) -> tuple[Found | None, list[str]]:
        """Find a checkpoint to resume from, which `load` will load; a file of weights is loaded at once.

        Collective.

        Args:
            or_anew: a folder may hold none.
            allow_changed: settings may differ from those of the checkpoint's training; the new ones count.

        Returns:
            the checkpoint, if there is one, and lines that tell what was found.

        Raises:
            UserError: it is damaged, of another training, or there is none and `or_anew` is False.
        """
        if source.suffix == ".safetensors":
            load_plain(self._world, model, source)
            return None, [f"weights of {source}; all else starts anew"]
        found = find(self._world, source)
        if isinstance(found, Nothing):
            if not or_anew:
                raise UserError("; ".join([f"{source}: holds no checkpoint to resume from", *found.notes]))
            return None, [*found.notes, f"no checkpoint in {source}: training starts anew"]
        where = str(found.path)
        check_model(found, model)
        for name, value in self._sizes._asdict().items():
            if found.run.get(name) != value:
                got = shown(found.run.get(name))
                raise UserError(f"{where}: {name}: the training has {value}, the checkpoint {got}")
        EpochProgress.read(found.run.get("so_far"), where)
        _past(found)
        self._allow_changed = allow_changed
        self._compare(found, _settings_of(found), self._settings())
        self._found = self._found_data = found
        return found, [*found.notes, f"resuming from {found.path}: {found.place}"]

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
        if self._world.rank == 0:
            print(f"hybridpipe: resuming with changed settings: {line}", file=sys.stderr, flush=True)

    def load(self, worker: Worker) -> None:
        """Go on with what was found, if anything was. Collective. Raises UserError if it does not fit."""
        found, self._found = self._found, None
        if found is None:
            return
        for line in load(worker, found, self._allow_changed):
            self._tell_changed(line)
        progress = EpochProgress.read(found.run["so_far"], str(found.path))
        if not is_exact(found, worker.plan):  # another pipeline fills from here
            progress.stream_start = progress.position
        self._state.load(found.manifest.step, found.manifest.epoch, progress, found.run["history"])
        self._came_from = found.path
        self._recorder.go_on(_past(found))

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
