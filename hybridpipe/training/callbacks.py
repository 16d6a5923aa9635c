"""Callbacks: what `fit` calls at its events, on every rank, and the view of the training that they get.

Not known here: the work of a callback. Invariant: a callback is called on all ranks in the same order and at
the same points of the training, so it may call what is collective.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridpipe.errors import shown
from hybridpipe.planning.plan import Plan
from hybridpipe.training.metrics import MinibatchRecord

if TYPE_CHECKING:
    from hybridpipe.training.view import TrainerView


class Run:
    """A callback's view of the training; what it returns is to be read, not changed.

    Args:
        trainer: the trainer whose `fit` calls.
        save: saves a checkpoint in a folder, of which it keeps a number.
        epochs: epochs that this call of `fit` trains at most.
        steps: minibatches after which the training ends at the latest; None if its data set cannot tell.
    """

    def __init__(
        self,
        trainer: "TrainerView",
        save: Callable[[str | os.PathLike[str], int], Path],
        epochs: int,
        steps: int | None,
    ) -> None:
        self._trainer, self._save, self._last_epoch = trainer, save, trainer.epoch + epochs
        self._steps = steps

    @property
    def trainer(self) -> "TrainerView":
        """The trainer, to be read: its plan and how that was chosen, and its figures."""
        return self._trainer

    @property
    def rank(self) -> int:
        """Rank of this process; files and prints are rank 0's."""
        return self._trainer.world.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks, with those that the plan leaves unused."""
        return self._trainer.world.size

    @property
    def num_groups(self) -> int:
        """Number of groups that each train a copy of the model."""
        return self._trainer.group.options.count

    @property
    def plan(self) -> Plan:
        """Plan of the training, with its prediction if there is one."""
        return self._trainer.plan

    @property
    def step(self) -> int:
        """Minibatches in this rank's weights."""
        return self._trainer.step

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return self._trainer.epoch

    @property
    def epochs(self) -> int:
        """Epochs after which the training ends at the latest, those before a checkpoint included."""
        return self._last_epoch

    @property
    def steps(self) -> int | None:
        """Minibatches after which the training ends at the latest; None if its data set cannot tell."""
        return self._steps

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """An entry for each complete epoch (`Trainer.fit`)."""
        return self._trainer.history

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer; with `zero` its parameters are the parts of weights that this rank updates.

        None on a rank that trains nothing.
        """
        return self._trainer.worker.executor.update.optimizer

    def gather_weights(self) -> None:
        """Give each replica the parts of the weights that others have changed; needed with `zero` only.

        Collective over the replicas of a stage.
        """
        shares = self._trainer.worker.executor.shares
        if shares is not None:
            shares.gather()

    @property
    def settings(self) -> Mapping[str, str | int | float]:
        """The trainer's arguments that are numbers or names, with the plan, for loggers."""
        return self._trainer.settings()

    def save(self, folder: str | os.PathLike[str], keep: int = 1) -> Path:
        """Write a checkpoint into `folder` and return its path. Collective.

        Args:
            keep: number of latest checkpoints in the folder that stay.

        Raises:
            RuntimeError: losses of minibatches are under way, as in `on_minibatch`.
        """
        return self._save(folder, keep)

    def stop(self) -> None:
        """Ask all ranks to end the training; one rank is enough.

        It ends a minibatch or two later, the same on every rank, or with the epoch under an asynchronous
        schedule. A checkpoint is saved as at any end.
        """
        self._trainer.worker.end_requested = True


class Callback:
    """Base class of callbacks: every method may be left out. Each is called on every rank.

    Attributes:
        needs_validation: True refuses a `fit` without validations.
        folders: that it writes to; `fit` keeps other trainings out of them, until `Trainer.close`.
    """

    needs_validation = False
    folders: Sequence[str | os.PathLike[str]] = ()

    def on_fit_start(self, run: Run) -> None:
        """Begin: the plan is made, and no minibatch is trained on yet."""

    def on_minibatch(self, run: Run, record: MinibatchRecord) -> None:
        """Take the record of a minibatch, which comes at least one minibatch late, as losses travel."""

    def on_evaluate(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Take the loss and the metrics of a validation."""

    def on_epoch_end(self, run: Run, entry: Mapping[str, Any]) -> None:
        """Take an epoch's entry of the history, after its validation."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Take the path of a published checkpoint of `fit`, before `fit` writes the next one."""

    def evaluating(self, run: Run) -> AbstractContextManager[None]:
        """Return a context around each validation of `fit`."""
        return nullcontext()

    def on_fit_end(self, run: Run) -> None:
        """End: all checkpoints are published. Not called after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the callback, of JSON's types; rank 0's is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Every rank gets it before `on_fit_start`."""


class OnMinibatch(Callback):
    """A function that is called with the record of each minibatch."""

    def __init__(self, function: Callable[[MinibatchRecord], None]) -> None:
        self.function = function

    def on_minibatch(self, run: Run, record: MinibatchRecord) -> None:
        """Call the function."""
        self.function(record)


def _origin(callback: Callback) -> str:
    """Return the module that a callback, or the function behind it, comes from."""
    made = callback.function if isinstance(callback, OnMinibatch) else type(callback)
    return getattr(made, "__module__", None) or ""


class CallbackList:
    """The callbacks of one call of `fit`, called in their order.

    Args:
        run: what each of them gets.

    Attributes:
        are_users: some are the user's, so that they may change the model.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._run, self._named = run, dict(zip(names_of(callbacks), callbacks, strict=True))
        own = __name__.partition(".")[0] + "."
        self.are_users = any(not _origin(each).startswith(own) for each in callbacks)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of each."""
        for callback in self._named.values():
            getattr(callback, event)(self._run, *arguments)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Enter the context of each around a validation."""
        with ExitStack() as stack:
            for callback in self._named.values():
                stack.enter_context(callback.evaluating(self._run))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {name: callback.state_dict() for name, callback in self._named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand each its state; one that the checkpoint does not know begins again."""
        for name, callback in self._named.items():
            if name in state:
                callback.load_state_dict(state[name])


def check_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks as a list.

    Raises:
        TypeError: it is no sequence of `Callback`s.
    """
    found = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in found:
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks must be a list of hybridpipe.Callback objects, got {shown(callback)}")
    return found


def names_of(callbacks: Sequence[Callback]) -> list[str]:
    """Return names by which checkpoints know them: that of the class; a second of one class is `Name#2`."""
    classes = [type(callback).__qualname__ for callback in callbacks]
    before = [classes[:i].count(name) for i, name in enumerate(classes)]
    return [f"{name}#{count + 1}" if count else name for name, count in zip(classes, before, strict=True)]
