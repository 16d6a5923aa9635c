"""What is exported from a checkpoint of several ranks is the model they hold; other plans start from it.

So it is with a checkpoint of an older version, which does not say what each replica's statistics have seen.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint import snapshot as runtime
from hybridpipe.checkpoint.exchange import write
from hybridpipe.checkpoint.saved_model import SavedModel
from hybridpipe.stage.state import BATCHES_AGREED, SAMPLES_SEEN

HYBRID = StageSpec(0, 2, replicas=2), StageSpec(2, 4)


def trainer(*stages: StageSpec, num_microbatches: int = 4) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        plan=Plan(stages, num_microbatches=num_microbatches),
        minibatch_size=16,
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def as_an_older_version(hybrid: Trainer, folder: Path) -> Path:
    """Save as one that counted no samples."""
    referred = runtime.referred

    def without_counts(*arguments):
        found = referred(*arguments)
        for state in found.files.values():
            state.meta = {k: v for k, v in state.meta.items() if k not in (SAMPLES_SEEN, BATCHES_AGREED)}
        return found

    runtime.referred = without_counts
    try:
        return hybrid.save(folder)
    finally:
        runtime.referred = referred


def go_on_from_older(checkpoint: Path, data: TensorDataset) -> None:
    """Replicas had other numbers of batches for good, and what was exported was not what they held."""
    hybrid = trainer(*HYBRID)
    hybrid.resume(checkpoint)
    held = hybrid.full_state_dict()
    if held is not None:
        saved = SavedModel(checkpoint)
        assert same({key: saved.read(key) for key in saved.forms}, held)
        before = held["1.num_batches_tracked"]
    hybrid.train_step(*data[:16])  # four microbatches, two a replica
    held = hybrid.full_state_dict()
    tracked = hybrid.model[1].num_batches_tracked.item()
    tracked_by_each = MPI.COMM_WORLD.allgather(tracked)
    hybrid.close()
    if held is not None:
        assert tracked_by_each[:2] == [before + 4] * 2, (before, tracked_by_each)


def main(folder: Path) -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(42, 4), torch.randint(0, 3, (42,)))  # one replica sees 22 of them
    hybrid = trainer(*HYBRID)
    hybrid.fit(data)
    older = as_an_older_version(hybrid, folder / "older")
    checkpoint = hybrid.save(folder / "checkpoints")
    held, file = hybrid.full_state_dict(), folder / "model.safetensors"
    hybrid.close()
    if held is not None:
        write(SavedModel(checkpoint), file, "safetensors")
        assert same(load_file(file), held)
    MPI.COMM_WORLD.Barrier()
    go_on_from_older(older, data)
    straight = trainer(StageSpec(0, 1), StageSpec(1, 3), StageSpec(3, 4), num_microbatches=2)
    straight.resume(file)
    again = straight.full_state_dict()
    straight.close()
    if held is not None and again is not None:
        assert same(again, held)
        print("the same")


main(Path(sys.argv[1]))
