"""Under mpirun: a training that HYBRIDPIPE_FAULT asks to stop, and that goes on where it was stopped.

Usage: preempted.py FOLDER PLAN SCHEDULE [start|last], with plans such as 2-1. `start`: asked before the first
minibatch; `last`: to be compared with a training that nobody has asked to stop. NUM_WORKERS: of the trainer.
"""

import os
import signal
import sys
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.comm.mpi import MPI
from hybridpipe.health import preemption

SAMPLES, MINIBATCH, EPOCHS = 92, 8, 4  # twelve minibatches an epoch, the last one short
folder, shape, schedule, *when = sys.argv[1:]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 9), nn.Linear(9, 3)
    )


def data(samples: int) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(samples, 5, generator=torch.Generator().manual_seed(samples))
    return torch.utils.data.TensorDataset(inputs, (inputs.abs().argmax(1) % 3))


def plan() -> Plan:
    replicas = [int(each) for each in shape.split("-")]
    cuts = [0, *range(6 - len(replicas), 6)]
    stages = [StageSpec(a, b, m) for a, b, m in zip(cuts, cuts[1:], replicas)]
    return Plan(tuple(stages), schedule=schedule, num_microbatches=1 if schedule == "pipedream" else 4)


def trainer() -> Trainer:
    return Trainer(
        model(),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        plan=plan(),
        minibatch_size=MINIBATCH,
        num_workers=int(os.environ.get("NUM_WORKERS", "0")),
    )


def come_to(trained: Trainer) -> tuple[object, object]:
    state = trained.full_state_dict() or {}
    losses = [(entry["epoch"], entry["loss"], entry["validation"]) for entry in trained.history]
    return {name: tensor.tolist() for name, tensor in state.items()}, losses


def main() -> None:
    validation = data(20)
    undisturbed = None
    if when == ["last"]:
        alone = trainer()
        alone.fit(data(SAMPLES), EPOCHS, validation=validation)
        undisturbed = come_to(alone)
        alone.close()
    stopped = trainer()
    print("; ".join(stopped.resume(folder, or_anew=True)), flush=True)
    fit = partial(stopped.fit, data(SAMPLES), EPOCHS - stopped.epoch, validation=validation)
    if when == ["start"]:
        # Being asked while the program starts is for whoever listens so early, as the command does.
        preemption.listen()
        if MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
    fit(checkpoint=Checkpointing(folder, every=4))
    assert undisturbed == come_to(stopped), "other weights or losses than of the undisturbed training"
    if MPI.COMM_WORLD.rank == 0:
        print("as undisturbed")


main()
