"""Import of plain weights as a checkpoint of step 0, for `train --resume auto` to start from.

A job that is requeued or restarted must continue where it was: `--resume FILE` would start from FILE again.
Invariant: under any plan, the training equals one started by `--resume FILE.safetensors`.
"""

from pathlib import Path

from torch import nn

from hybridpipe.checkpoint.directory import checkpoints
from hybridpipe.checkpoint.resume import load_plain
from hybridpipe.cli.data import data_of, first_microbatch, in_one_line
from hybridpipe.cli.profile import build_model
from hybridpipe.comm.mpi import MPI
from hybridpipe.config.file import Config
from hybridpipe.errors import UserError
from hybridpipe.model.layers import Layers, known_layers, layers_of
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.training.trainer import Trainer
from hybridpipe.types import Loss


def import_weights(config: Config, source: Path, folder: Path) -> Path:
    """Write the checkpoint `folder/step-00000000` with the weights of `source`, and return its path.

    Model, optimizer and seed are the config's; so is the data, of which a model that is no `nn.Sequential`
    needs the first microbatch. One process writes a checkpoint of one rank, which any plan can resume.

    Raises:
        UserError: `source` has no weights (`plain.Weights`) or does not fit the model, `folder` holds
            checkpoints, or the config is one that `train` refuses.
    """
    if found := checkpoints(folder):
        raise UserError(
            f"{folder}: holds checkpoints already, such as {found[0].name}; import into a new one"
        )
    model = build_model(config)
    load_plain(MPI.COMM_SELF, model, source)
    layers: Layers | None = known_layers(model)
    data, loss = None, config.loss.build()
    if layers is None:
        data = data_of(config)
        inputs, targets = first_microbatch(config, data)
        layers = layers_of(model, inputs, loss, targets)
    with in_one_line(TypeError, ValueError):
        trainer = _trainer(config, model, loss, layers.num_layers)
    try:
        if data is not None:
            with in_one_line(TypeError, ValueError):
                trainer.prepare(data)
        return trainer.save(folder)
    finally:
        trainer.close()


def _trainer(config: Config, model: nn.Module, loss: Loss, num_layers: int) -> Trainer:
    """Return a trainer of one rank and one stage."""
    minibatch = config.train.minibatch
    count = ceil_div(minibatch, config.train.microbatch or minibatch)
    return Trainer(
        model,
        loss=loss,
        optimizer=config.optimizer.bound(),
        plan=Plan((StageSpec(0, num_layers),), num_microbatches=count),
        minibatch_size=minibatch,
        lr_scheduler=None if config.lr_scheduler is None else config.lr_scheduler.build,
        seed=config.train.seed,
        device="cpu",
        world=MPI.COMM_SELF,
        verbose=False,  # nothing is trained
    )
