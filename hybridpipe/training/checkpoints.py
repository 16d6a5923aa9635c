"""Checkpoints of a training: their manifest's description of it, and resuming.

The steps at which to save are not known here (`checkpoint.policy`). Invariant: the described state is loaded
completely, or not at all.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hybridpipe.checkpoint import snapshot
from hybridpipe.checkpoint.claim import Claim
from hybridpipe.checkpoint.directory import checkpoints, is_good
from hybridpipe.checkpoint.names import name_of, of_group, step_of
from hybridpipe.checkpoint.plain import is_weights
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
from hybridpipe.comm.communicators import barrier_with_timeout
from hybridpipe.comm.status import rank_status
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.data.samples import DRAWN_ANEW
from hybridpipe.engine import consistency
from hybridpipe.engine.worker import Worker
from hybridpipe.environment.allocator import room_left
from hybridpipe.errors import UserError, shown
from hybridpipe.health import exit_report, failure, preemption
from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.tensors import tied
from hybridpipe.notices import notices
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.state import pack
from hybridpipe.stage.statistics import statistics
from hybridpipe.training.callbacks import Callback, CallbackList
from hybridpipe.training.metrics import Metrics, Past
from hybridpipe.training.train_state import EpochProgress, TrainState

AS_EXPECTED = ("no checkpoint in ", "resuming from ")  # how lines begin that warn of nothing


class Sizes(NamedTuple):
    """Settings behind random numbers and the order of samples; a resumed training must have the same."""

    seed: int
    minibatch_size: int


class CheckpointManager:
    """Saves and loads a training's state.

    Args:
        sizes: settings that cannot change.
        group: the ranks of the training. Each of several groups saves in a folder of its own.
        state: the train state.
        metrics: the records so far.
        settings: returns all other settings as text by name. A resumed training must have the same, unless
            changes are allowed (`find`).
    """

    def __init__(
        self,
        sizes: Sizes,
        group: TrainingGroup,
        state: TrainState,
        metrics: Metrics,
        settings: Callable[[], Mapping[str, str]],
    ) -> None:
        self._sizes, self._group, self._state, self._metrics = sizes, group, state, metrics
        self._world = group.world
        self._settings = settings
        self.limit_bytes: int | None = None  # of this process's memory; None: not limited
        self._callbacks: CallbackList | None = None  # of the last `fit`
        self._callback_states: Mapping[str, Any] = {}  # of the checkpoint that was loaded
        self._data: Mapping[str, str] = {}  # fingerprint of the last data set
        self._allow_changed = False
        self._found: Found | None = None  # checkpoint to load once there is a worker
        self._found_data: Found | None = None  # checkpoint whose data set must be compared
        self._came_from: Path | None = None
        self._saver: Saver | None = None
        self._claims: dict[Path, Claim] = {}  # on rank 0, by folder

    def claim(self, *folders: str | os.PathLike[str]) -> None:
        """Keep other trainings out of folders until `close`; where one is, this one is refused.

        Raises:
            UserError: in a world of one; in others it ends the job.
        """
        for root in (Path(folder).resolve() for folder in folders if self._group.leads):
            if root not in self._claims:
                with failure.refusing(self._group.everyone.size):
                    self._claims[root] = Claim(root)

    def enter(
        self,
        settings: Checkpointing | None,
        callbacks: Sequence[Callback],
        resume: Callable[..., list[str]] | str | None,
        epochs: int,
    ) -> int:
        """Claim the folders that a `fit` writes to, then resume; return how many of all epochs are left.

        Args:
            resume: `Trainer.resume`; None to begin where the training is.
            epochs: of the whole training.
        """
        of_callbacks = (folder for callback in callbacks for folder in callback.folders)
        self.claim(*(() if settings is None else (settings.folder,)), *of_callbacks)
        if settings is None or not callable(resume):
            return epochs
        return self._resume_epochs(resume, settings.folder, epochs)

    def leave_if_preempted(self, settings: Checkpointing | None) -> None:
        """Raise Preempted on all ranks if one was asked to stop; the state must have been saved."""
        if settings is not None and self._state.preempted:
            step, saved = self._state.step, "before the first minibatch, with nothing to save"
            if step:
                saved = f"at step {step}, saved as {Path(settings.folder) / name_of(step)}"
            wait = partial(barrier_with_timeout, self._group.everyone)
            preemption.stop(f"stopped {saved}", step, wait)

    def save(self, worker: Worker, settings: Checkpointing, microbatch_size: int) -> Path:
        """Save the state between two steps, and return the checkpoint's path. Collective."""
        keeper = self.keeper(worker, settings, microbatch_size, anew=True)
        keeper.finish(self._state.step, self._state.resume_point(self._sizes.minibatch_size))
        return Path(settings.folder) / name_of(self._state.step)

    def keeper(
        self,
        worker: Worker,
        settings: Checkpointing,
        microbatch_size: int,
        anew: bool = False,
        callbacks: CallbackList | None = None,
    ) -> Keeper:
        """Make a keeper. The first call is collective.

        Args:
            settings: folder, interval and number of checkpoints.
            anew: True to save even a state that was just resumed from this folder.
            callbacks: called for each checkpoint.
        """
        self._callbacks = callbacks or self._callbacks
        self.claim(settings.folder)
        if self._saver is None:
            with rank_status.waiting("making communicators", range(self._world.size)):
                self._saver = Saver(self._world.Dup())

        describe = partial(self._described, worker, microbatch_size)
        saved = None if anew else self._step_in(settings.folder)
        published = None if callbacks is None else partial(callbacks.tell, "on_checkpoint")
        room = partial(room_left, self.limit_bytes)
        own = replace(settings, folder=of_group(Path(settings.folder), self._group.folder_index))
        return Keeper(own, self._saver, worker, self._state.step, saved, describe, published, room)

    def _described(self, worker: Worker, microbatch_size: int) -> dict[str, Any]:
        """Return the manifest's contents besides the step, for a snapshot whose losses have just come in."""
        state = self._state.state_dict()
        run = {
            **self._sizes._asdict(),
            "microbatch_size": microbatch_size,
            "ranks": self._world.size,
            "group": [self._group.index, self._group.options.count],
            "past": asdict(self._metrics.past()),
            "settings": dict(self._settings()),
            "data": dict(self._data),
            **state,
            "model": snapshot.described_model(worker),
            "tied": tied(worker.model.state_dict()),
            "statistics": sorted(statistics(worker.model)),
            "callbacks": {} if self._callbacks is None else self._callbacks.state_dict(),
        }
        return {
            "epoch": self._state.epoch,
            "position": state["so_far"]["position"],
            "plan": snapshot.plan_json(worker.plan),
            "versions": snapshot.software(),
            "run": pack(run, "run", {}),
        }

    def begin_fit(
        self,
        worker: Worker,
        settings: Checkpointing | None,
        microbatch_size: int,
        callbacks: CallbackList,
    ) -> Keeper | None:
        """Hand the callbacks what the loaded checkpoint kept of them, and make `fit`'s keeper.

        The first call with a keeper is collective.

        Args:
            settings: folder, interval and number of checkpoints; None to save none.
        """
        callbacks.load_state_dict(self._callback_states)
        self._callbacks, self._callback_states = callbacks, {}
        if settings is None:
            return None
        return self.keeper(worker, settings, microbatch_size, callbacks=callbacks)

    def find(
        self,
        source: Path,
        model: nn.Module,
        or_anew: bool,
        allow_changed: bool,
        later: bool,
        numbers: Numbers | None = None,
        worker: Worker | None = None,
    ) -> tuple[Found | None, list[str]]:
        """Find a checkpoint for `load`; a file of weights is loaded at once. Collective.

        Args:
            later: there is no worker yet. The train state is the checkpoint's from now on, and whatever is
                refused in `load` is refused again.
            or_anew: allow a folder without checkpoints. The same call then resumes after a restart, and the
                supervisor knows it.
            allow_changed: allow settings that differ from the checkpoint's; the new ones are used.
            numbers: of tensors on the meta device, which a file of weights, or the checkpoint, then gives.
            worker: of this rank, if there is one.

        Returns:
            The checkpoint, if there is one, and lines for the user.

        Raises:
            UserError: the checkpoint is damaged or of another training, or there is none without `or_anew`.
        """
        of_resume = {"or_anew": repr(bool(or_anew)), "allow_changed": repr(bool(allow_changed))}
        consistency.check_alike(self._group.everyone, of_resume)
        if self._group.everyone.bcast(is_weights(source)):  # rank 0's disk decides which collective follows
            load_plain(self._world, model, source, numbers)
            if worker is not None:
                worker.reset_centre()
            return None, [f"weights of {source}; everything else starts anew"]
        if or_anew:
            exit_report.continues(source)
        found = find(self._world, self._of_group(source))
        if isinstance(found, Nothing):
            if not or_anew:
                raise UserError("; ".join([f"{source}: holds no checkpoint to resume from", *found.notes]))
            return None, [*found.notes, f"{AS_EXPECTED[0]}{source}: training starts anew"]
        where = str(found.path)
        check_model(found, model)
        if numbers is not None:
            numbers.unset.clear()  # the checkpoint has them
        for name, value in self._sizes._asdict().items():
            if found.run.get(name) != value:
                got = shown(found.run.get(name))
                raise UserError(f"{where}: {name}: the training has {value}, the checkpoint {got}")
        progress = EpochProgress.read(found.run.get("so_far"), where)
        _past(found)
        self._allow_changed = allow_changed
        self._compare(found, _settings_of(found), self._settings())
        self._found = self._found_data = found
        if later:
            self._state.load(found.manifest.step, found.manifest.epoch, progress, found.run["history"])
        return found, [*found.notes, f"{AS_EXPECTED[1]}{found.path}: {found.place}"]

    def _of_group(self, source: Path) -> Path:
        """Return this group's checkpoint, of the newest step that all groups have, behind the user's path.

        It is the first group's where others have none: they begin with what the groups have in common.
        Collective over all groups.
        """
        if self._group.world is self._group.everyone:
            return source
        own, step = of_group(source, self._group.index), step_of(source)
        everyone, folder = self._group.everyone, own if step is None else own.parent
        here = None if self._world.rank else {step_of(path) for path in checkpoints(folder)}
        steps = [each for each in everyone.allgather(here) if each is not None]
        in_all = sorted((each for each in set.intersection(*steps) if each is not None), reverse=True)
        if step is not None:
            return own if step in in_all else source
        for each in in_all:
            if all(everyone.allgather(self._world.rank > 0 or is_good(own / name_of(each)))):
                return own / name_of(each)
        return source

    def _resume_epochs(
        self, resume: Callable[..., list[str]], folder: str | os.PathLike[str], epochs: int
    ) -> int:
        """Resume from a folder if nothing is trained yet; return how many of all epochs are left."""
        if not self._state.step:
            for line in resume(folder, or_anew=True):
                if not line.startswith(AS_EXPECTED):
                    self._tell(line)
                elif self._group.leads:
                    notices.say(line)
        if self._metrics.has_reached_target:
            return 0
        return max(0, epochs - self._state.complete_epochs(self._sizes.minibatch_size))

    def check_data(self, facts: Mapping[str, str]) -> None:
        """Compare the first data set after `find` with the checkpoint's.

        Args:
            facts: the data set's fingerprint, the same on every rank.

        Raises:
            UserError: the data sets differ, and changes are not allowed.
        """
        found, self._data = self._found_data, facts
        then = None if found is None else found.run.get("data")
        if found is not None and isinstance(then, dict):
            self._compare(found, then, facts)
        self._found_data = None  # only now, so that what is refused once is refused again

    def _compare(self, found: Found, then: Mapping[str, object], now: Mapping[str, str]) -> None:
        """Refuse or report each setting that both have and that differs.

        A checkpoint of step 0 is an imported one: its settings have trained nothing.
        """
        for name, before in then.items() if found.manifest.step else ():
            if name in now and before != now[name] and DRAWN_ANEW not in (before, now[name]):
                line = changed_line(name, now[name], before)
                if not self._allow_changed:
                    refuse_changed(str(found.path), line)
                self._tell(f"resuming with changed settings: {line}")

    def _tell(self, line: str) -> None:
        if self._group.leads:
            notices.tell(line)

    def continues(self, plan: Plan) -> bool:
        """True if a checkpoint of this plan was found, and is not loaded yet."""
        return self._found is not None and is_exact(self._found, plan)

    def load(self, worker: Worker, is_new: bool = False) -> None:
        """Load the found checkpoint, if there is one. Collective.

        Args:
            is_new: the worker was made for the first minibatch. If the checkpoint is refused, it is closed,
                and whatever needs one next is refused as well.

        Raises:
            UserError: it does not fit; no state has changed.
        """
        found = self._found
        if found is None:
            return
        try:
            lines = load(worker, found, self._allow_changed)
        except UserError:
            if is_new:
                worker.close()
            else:
                self._found = self._found_data = None
            raise
        for line in lines:
            self._tell(f"resuming with changed settings: {line}")
        progress = EpochProgress.read(found.run["so_far"], str(found.path))
        if not is_exact(found, worker.plan):  # another pipeline starts its stream here
            progress.stream_start = progress.position
        self._state.load(found.manifest.step, found.manifest.epoch, progress, found.run["history"])
        self._found, self._came_from = None, found.path
        self._callback_states = found.run.get("callbacks", {})
        self._metrics.continue_from(_past(found))

    def close(self) -> None:
        """Wait until the last checkpoint is published, and let the folders go. Collective."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        for claim in self._claims.values():
            claim.release()
        self._claims = {}

    def _step_in(self, folder: str | os.PathLike[str]) -> int | None:
        """Return the step of the resumed checkpoint if it is in this folder, else None."""
        came = self._came_from
        own = of_group(Path(folder), self._group.folder_index)
        if came is None or came.parent.resolve() != own.resolve():
            return None
        return step_of(came)


def _settings_of(found: Found) -> dict[str, object]:
    """Return the checkpoint's settings, without a loss of another Python version, whose bytecode differs."""
    settings = found.run.get("settings")
    python = str(found.manifest.versions.get("python")).split(".")[:2]
    left_out = () if python == list(platform.python_version_tuple()[:2]) else ("loss",)
    known = settings if isinstance(settings, dict) else {}
    return {name: value for name, value in known.items() if name not in left_out}


def _past(found: Found) -> Past:
    """Return a checkpoint's records; UserError if the manifest lacks them."""
    try:
        past = Past(**found.run["past"])
        list(found.run["history"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{found.path}: past and history cannot be read: {error}") from None
    return past
