"""Counts the package's files that a train step enters; each rank writes DIR/rankN.json.

Only public names are used, because PYTHONPATH may name an older package.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import hybridpipe
from hybridpipe import Plan, StageSpec, Trainer


class Counter:
    """Counts the calls into each file of a package, and the calls from one of its files to another."""

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}{os.sep}"
        self.calls: dict[str, int] = {}
        self.crossings = 0

    def count(self, action: Callable[[], object]) -> None:
        """Count the calls of an action in this thread."""
        sys.setprofile(self._note)
        try:
            action()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self.prefix):
            return
        name = file.removeprefix(self.prefix)
        self.calls[name] = self.calls.get(name, 0) + 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self.prefix):
            caller = caller.f_back
        self.crossings += caller is not None and caller.f_code.co_filename != file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=Plan((StageSpec(0, 2), StageSpec(2, 4)), schedule="1f1b", num_microbatches=4),
        minibatch_size=16,
    )
    inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
    trainer.train_step(inputs, targets)
    counter = Counter(Path(hybridpipe.__file__).parent)
    counter.count(lambda: trainer.train_step(inputs, targets))
    trainer.close()
    found = {"calls": counter.calls, "crossings": counter.crossings}
    (out / f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
