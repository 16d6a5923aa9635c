"""Asked to stop before the first minibatch: while data are read and the machines measured, a rank listens."""

import os
import subprocess
import sys

ASKED = """
import os, signal, sys
import torch
from functools import partial
from hybridpipe import Checkpointing, Plan, StageSpec, Trainer

class Asks(torch.utils.data.TensorDataset):  # as Slurm does, to every rank, whatever it is doing
    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitem__(i)

data = Asks(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))
trainer = Trainer(
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)),
    loss=torch.nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=Plan((StageSpec(0, 2),)), minibatch_size=4,
)
trainer.fit(data, checkpoint=Checkpointing(sys.argv[1]))
print("trained")
"""


def test_a_script_that_is_asked_before_its_first_minibatch_ends_with_75(tmp_path):
    command = [sys.executable, "-c", ASKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 75 and "trained" not in done.stdout, done.stderr
    assert "hybridpipe: stopped before the first minibatch, with nothing to save" in done.stderr
