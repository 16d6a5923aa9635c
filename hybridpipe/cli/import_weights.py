"""Import of a plain file of weights as a checkpoint of step 0, for `train --resume auto` to start from.

A job that is requeued or restarted must continue where it was: `--resume FILE` would start from FILE again.
Invariant: under any plan, the training equals one started by `--resume FILE.safetensors`.
"""

from pathlib import Path

from hybridpipe.checkpoint.directory import checkpoints
from hybridpipe.checkpoint.resume import load_plain
from hybridpipe.cli.profile import build_model
from hybridpipe.comm.mpi import MPI
from hybridpipe.config import Config
from hybridpipe.data.reader import first_minibatch
from hybridpipe.data.source import source_of
from hybridpipe.errors import UserError
from hybridpipe.model.layers import Layers, known_layers, layers_of
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.training.trainer import Trainer


def import_weights(config: Config, source: Path, folder: Path) -> Path:
    """Write the checkpoint `folder/step-00000000` with the weights of `source`, and return its path.

    Model, optimizer and seed are the config's; so is the data, of which a model that is no `nn.Sequential`
    needs the first microbatch. One process writes a checkpoint of one rank, which any plan can resume.

    Raises:
        UserError: `source` is no safetensors file or does not fit the model, or `folder` holds checkpoints.
    """
    if found := checkpoints(folder):
        raise UserError(
            f"{folder}: holds checkpoints already, such as {found[0].name}; import into a new one"
        )
    model = build_model(config)
    load_plain(MPI.COMM_SELF, model, source)
    minibatch = config.train.minibatch
    microbatch = config.train.microbatch or minibatch
    layers: Layers | None = known_layers(model)
    data, loss = None, config.loss.build()
    if layers is None:
        data = config.data.build()
        first = first_minibatch(source_of("data", data), minibatch, microbatch)
        layers = layers_of(model, first.inputs(0), loss, first.targets(0))
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=config.optimizer.build,
        plan=Plan((StageSpec(0, layers.num_layers),), num_microbatches=ceil_div(minibatch, microbatch)),
        minibatch_size=minibatch,
        lr_scheduler=None if config.lr_scheduler is None else config.lr_scheduler.build,
        seed=config.train.seed,
        device="cpu",
        world=MPI.COMM_SELF,
    )
    try:
        if data is not None:
            trainer.prepare(data)
        return trainer.save(folder)
    finally:
        trainer.close()
