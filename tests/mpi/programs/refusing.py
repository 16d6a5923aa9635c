"""One rank sees a mistake of the user; the others wait.

refusing.py RANK             this rank refuses
refusing.py 0 FOLDER NAME    rank 0 cannot write NAME, a script's file in FOLDER
refusing.py 0 FOLDER full    nor anything, from the first minibatch on
"""

import resource
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Callback, Plan, StageSpec, Trainer
from hybridpipe.callbacks import CSVLogger, RunFolder
from hybridpipe.comm.mpi import MPI
from hybridpipe.health import failure


class FullDisk(Callback):
    def on_minibatch(self, run, record) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))


def train(folder: Path, name: str) -> None:
    if name != "full":
        (folder / name).mkdir(exist_ok=True)
    torch.manual_seed(0)
    samples = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    trainer = Trainer(
        nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        plan=Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=2),
        minibatch_size=8,
        callbacks=[FullDisk(), RunFolder(folder)]
        if name == "full"
        else [CSVLogger(folder / "log.csv"), RunFolder(folder)],
    )
    MPI.COMM_WORLD.Barrier()
    trainer.fit(samples)


failure.install()
if len(sys.argv) > 2:
    train(Path(sys.argv[2]), sys.argv[3])
if MPI.COMM_WORLD.rank == int(sys.argv[1]):
    failure.refuse(ValueError("only here"))
MPI.COMM_WORLD.Barrier()
