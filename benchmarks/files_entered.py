"""Files entered: the files of the package that one train step enters, and the calls from one to another.

    python benchmarks/files_entered.py
    python benchmarks/files_entered.py --checkout OTHER      beside those of another checkout

Two ranks on CPUs, plan 1-1, schedule 1f1b, four microbatches of an `nn.Sequential`. Counted is the second
`Trainer.train_step`, in the thread that trains. A call crosses where the nearest caller inside the package is
in another file; what lies between, as torch, does not count.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 120.0


class Counter:
    """Which files of a package calls enter, and how many of these calls come from another of its files."""

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}{os.sep}"
        self.calls: dict[str, int] = {}
        self.crossings = 0

    def count(self, action: Callable[[], object]) -> None:
        """What the action enters."""
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


def count_a_step() -> None:
    """On each of two ranks; rank 0 prints what both have counted."""
    import torch
    from mpi4py import MPI
    from torch import nn

    import hybridpipe
    from hybridpipe import Plan, StageSpec, Trainer

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)]
    trainer = Trainer(
        nn.Sequential(*layers),
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
    found = MPI.COMM_WORLD.gather({"calls": counter.calls, "crossings": counter.crossings})
    if found:
        print(json.dumps(found), flush=True)


def counted(checkout: Path) -> list[dict[str, Any]]:
    """By each rank, with the package of a checkout."""
    command = [sys.executable, "-m", "hybridpipe.launcher", "2", "--", sys.executable, __file__, "--rank"]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS
    )
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def report(found: list[dict[str, Any]]) -> str:
    """The files, the calls of each rank that enter them, and the totals."""
    lines = [f"{'calls of rank 0':>15}{'of rank 1':>12}   file"]
    files = sorted(set().union(*(rank["calls"] for rank in found)))
    for file in files:
        lines.append(f"{found[0]['calls'].get(file, 0):15}{found[1]['calls'].get(file, 0):12}   {file}")
    for what, both, each in (
        ("files entered", len(files), [len(rank["calls"]) for rank in found]),
        ("calls that cross files", sum(rank["crossings"] for rank in found), [r["crossings"] for r in found]),
    ):
        lines.append(f"{what}: {both} by both together, {each[0]} by rank 0, {each[1]} by rank 1")
    return "\n".join(lines)


def main() -> None:
    """Prints what there is of each checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, help="another checkout of the repository, shown first")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        count_a_step()
        return
    for checkout in filter(None, (options.checkout, HERE)):
        print(f"{checkout}\n{report(counted(checkout.resolve()))}\n")


if __name__ == "__main__":
    main()
