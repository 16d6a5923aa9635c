"""TrainerView: the half of a trainer that is read: its place in the training, its plan, its figures.

Not known here: how a training is made. Invariant: nothing here changes a training.
"""

import os
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.engine.worker import Worker
from hybridpipe.model.layers import explain
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.timeline import Timeline
from hybridpipe.report.model import model_text
from hybridpipe.training.checkpoints import CheckpointManager
from hybridpipe.training.fit import FitLoop
from hybridpipe.training.metrics import Metrics, Traced
from hybridpipe.training.planner.choice import Choice
from hybridpipe.training.planner.planner import Planner
from hybridpipe.training.train_state import TrainState

_Figures = TypeVar("_Figures")
_FIXED = ("model", "loss", "seed", "minibatch_size", "rule", "world", "group", "device")


class TrainerView:
    """The readable half of a `Trainer`, which sets these attributes."""

    world: MPI.Comm
    group: TrainingGroup
    minibatch_size: int
    seed: int
    device: torch.device
    choice: Choice | None  # how the plan was chosen; None for one that was given
    state: TrainState
    metrics: Metrics
    rule: UpdateRule
    _planner: Planner
    _checkpoints: CheckpointManager
    _worker: Worker | None
    _continues_plan: bool
    _fitting: FitLoop | None  # the last call of `fit`

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and hasattr(self, name):
            raise AttributeError(f"{name} of a Trainer cannot be changed: make a new Trainer")
        super().__setattr__(name, value)

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch; the last one of a short minibatch may have fewer."""
        return self._planner.microbatch_size

    @property
    def step(self) -> int:
        """Minibatches trained on."""
        return self.state.step

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return self.state.complete_epochs(self.minibatch_size)

    @property
    def stopped(self) -> bool:
        """True if `stop_from`, `max_steps` or a callback has ended the last `fit`."""
        return self._fitting is not None and self._fitting.stopped

    @property
    def history(self) -> list[dict[str, Any]]:
        """Entries that `fit` returned for each epoch, those before a checkpoint included."""
        return self.state.history

    @property
    def continues_plan(self) -> bool:
        """True if the plan was made for a checkpoint's training, and is its plan."""
        return self._continues_plan

    @property
    def plan(self) -> Plan:
        """Plan of the training; RuntimeError before a plan by name is made, from the first minibatch."""
        return self.worker.plan

    @property
    def worker(self) -> Worker:
        """Worker of this rank; RuntimeError before the plan is made and after `close`."""
        if self._worker is None:
            why = "model and machines are measured with the first minibatch; train one first"
            raise RuntimeError("the Trainer is closed; make a new one" if self.state.closed else why)
        return self._worker

    def claim(self, folder: str | os.PathLike[str]) -> None:
        """Keep other trainings out of a folder until `close`; one that is there ends this one."""
        self._checkpoints.claim(folder)

    def settings(self) -> dict[str, str | int | float]:
        """Sizes, seed, precision and plan by name, such as a logger shows."""
        return {
            "plan": self.plan.name,
            "schedule": self.plan.schedule,
            "ranks": self.world.size,
            "minibatch_size": self.minibatch_size,
            "microbatch_size": self.microbatch_size,
            "precision": self.rule.precision,
            "seed": self.seed,
        }

    def not_split(self) -> list[str] | None:
        """Trained modules whose backward a splitting schedule cannot split; on rank 0, else None."""
        if not self.plan.traits.splits_backward:
            return []
        executor = self.worker.executor
        held = zip(executor.held, executor.stages, strict=True)
        gathered = self.worker.control.gather([(s, stage.not_split) for s, stage in held])
        if gathered is None or not self.group.tells:
            return None
        by_stage = dict(each for ranks_own in gathered for each in ranks_own)  # replicas say the same
        return [name for s in sorted(by_stage) for name in by_stage[s]]

    def explain(self) -> str | None:
        """Text about what is made of the model, on rank 0; RuntimeError before its forward is recorded."""
        layers = self._planner.known_layers
        return model_text(explain(layers)) if self.world.rank == 0 else None

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """`model.state_dict()` of the whole model on rank 0; None elsewhere.

        With several groups its weights are those that they have in common.

        Raises:
            RuntimeError: minibatches of an asynchronous schedule are under way.
        """
        self.state.check_call("full_state_dict", in_fit=True)
        return self.worker.full_state_dict()

    def timeline(self) -> Timeline | None:
        """Timeline of a typical full minibatch on rank 0; None elsewhere."""
        return self._from_first(self.metrics.timeline(self.worker))

    def traced(self) -> Traced | None:
        """Timeline of the last full minibatches and each rank's time in them, on rank 0; None elsewhere."""
        return self._from_first(self.metrics.traced(self.worker))

    def summary(self) -> dict[str, Any] | None:
        """Figures of the training so far, as in summary.json, on rank 0; None elsewhere."""
        return self._from_first(self.metrics.summary(self.worker))

    def _from_first(self, figures: _Figures | None) -> _Figures | None:
        """Return the figures of the first group, whose rank 0 is the one of all."""
        return figures if self.group.tells else None
