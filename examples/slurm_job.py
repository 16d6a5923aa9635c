"""A training that outlives its Slurm job: it saves before the time limit, is requeued, and continues.

hybridpipe slurm --nodes 2 --ntasks-per-node 4 --time 1:00:00 --submit -- python examples/slurm_job.py
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from models import mlp

import hybridpipe
from hybridpipe.data import digits

parser = argparse.ArgumentParser(description="Trains; started again, it continues where it stopped.")
parser.add_argument("--out", type=Path, default=Path("runs/slurm_job"), help="a folder that all hosts share")
parser.add_argument("--epochs", type=int, default=100, help="counted from the first start")
options = parser.parse_args()

torch.manual_seed(0)
trainer = hybridpipe.Trainer(
    mlp(),
    loss=F.cross_entropy,
    optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9),
    plan="auto",  # a checkpoint fits any plan, also one for another number of ranks
    minibatch_size=64,
)
saving = hybridpipe.Checkpointing(options.out / "checkpoints", every=50)
trainer.fit(digits(), epochs=options.epochs, validation=digits(train=False), checkpoint=saving, resume="auto")

# Reached once all epochs are trained. A job that is asked to stop ends inside `fit`, with exit code 75.
state = trainer.full_state_dict()
if state is not None:  # on rank 0
    torch.save(state, options.out / "model.pt")
    print(f"trained {trainer.step} minibatches, held out {trainer.history[-1]['validation']}")
trainer.close()
