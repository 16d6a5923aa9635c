"""Importing: the command. From a plain file of weights to a checkpoint that a training starts from.

`train --resume FILE.safetensors` starts from the file each time it is called; a job that is requeued, or is
started again by its supervisor, has to go on from where it was instead. So the file is made a checkpoint of
step 0, once, and `train --resume auto` does the rest.
Invariant: what starts from it is what `--resume FILE.safetensors` starts, under any plan.
"""

from pathlib import Path

from hybridpipe.checkpoint.directory import checkpoints
from hybridpipe.checkpoint.resume import load_plain
from hybridpipe.cli.profile import build_model
from hybridpipe.comm.mpi import MPI
from hybridpipe.config import Config
from hybridpipe.errors import UserError
from hybridpipe.model.sequential import num_layers
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.training.trainer import Trainer


def import_weights(config: Config, source: Path, folder: Path) -> Path:
    """Write `folder/step-00000000`: the config's model, optimizer and seed, and the weights of `source`.

    One process, whatever will train: the checkpoint is of one rank, and any plan can go on from it.

    Raises:
        UserError: the file is no safetensors file or not of this model, or the folder holds checkpoints.
    """
    if found := checkpoints(folder):
        raise UserError(
            f"{folder}: holds checkpoints already, such as {found[0].name}; import into a new one"
        )
    model = build_model(config)
    load_plain(MPI.COMM_SELF, model, source)
    minibatch = config.train.minibatch
    count = ceil_div(minibatch, config.train.microbatch or minibatch)
    trainer = Trainer(
        model,
        loss=config.loss.build(),
        optimizer=config.optimizer.build,
        plan=Plan((StageSpec(0, num_layers(model)),), num_microbatches=count),
        minibatch_size=minibatch,
        lr_scheduler=None if config.lr_scheduler is None else config.lr_scheduler.build,
        seed=config.train.seed,
        device="cpu",
        world=MPI.COMM_SELF,
    )
    try:
        return trainer.save(folder)
    finally:
        trainer.close()
